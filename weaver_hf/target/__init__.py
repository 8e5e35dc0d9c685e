"""The target's side: class swap, tree forward of the mixers, tree attention, the cache and its commit, taps."""
