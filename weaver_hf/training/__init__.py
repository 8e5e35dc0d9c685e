"""Training of drafters: data from the target itself, block losses, the trainer, and the fit of draft temperatures."""
