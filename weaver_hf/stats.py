"""What a call of `generate` reports: acceptance as the whole project counts it, and where the time went."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from .tree import TokenTree

__all__ = ["GenerationStats"]


@dataclass
class GenerationStats:
    """Acceptance and time of one call of `generate`, over all the sequences that it returns.

    A step is one verification. The step that a length limit ends is left out of the means: it might have accepted more.
    A step that ends in EOS or a stop string counts up to it, and what ended it stands for the bonus token.

    Attributes:
        runs: tokens emitted by each step, the bonus token counted (the prefill's token is in none).
        prefilled: sequences whose first token was chosen after the prefill.
        cuts: indices of the runs that a length limit ended.
        lossy: the text is not the target's: the rule `lossy_margin` was on.
        seconds: host seconds by part: prefill, draft, commit, verify, accept. An accelerator works asynchronously; the
            wait for it falls into `accept`, where the accepted tokens come back.
        best_tree: the tree with the longest accepted path, which is marked in it.
    """

    runs: list[int] = field(default_factory=list)
    prefilled: int = 0
    cuts: set[int] = field(default_factory=set)
    lossy: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    best_tree: TokenTree | None = None
    _drafts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list, repr=False)

    @property
    def steps(self) -> int:
        """Verifications."""
        return len(self.runs)

    @property
    def last_cut(self) -> bool:
        """A length limit ended the last step."""
        return self.steps - 1 in self.cuts

    @property
    def target_passes(self) -> int:
        """Passes of the target: the verifications and the prefill."""
        return self.steps + (self.prefilled > 0)

    @property
    def new_tokens(self) -> int:
        """Tokens generated, those of the prefill included."""
        return sum(self.runs) + self.prefilled

    @property
    def drafted_nodes(self) -> int:
        """Nodes drafted over all steps, roots not counted. Summed when asked: the sizes lie on the device."""
        return sum(int(sizes.sum()) - sizes.numel() for sizes, _ in self._drafts)

    @property
    def expected(self) -> list[float]:
        """Drafted tokens that each tree expected to be accepted: the sum of its nodes' path probabilities.

        Beside the runs (less one), it says how well the builder's probabilities are calibrated.
        """
        return [float(log_probs[:, 1:].exp().sum()) / len(sizes) for sizes, log_probs in self._drafts]

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a step, the bonus token counted; NaN where no whole step was run."""
        whole = self.whole_runs
        return sum(whole) / len(whole) if whole else math.nan

    @property
    def accepted_per_step(self) -> float:
        """Mean drafted tokens accepted a step (the paper's accepted draft length); NaN where no whole step was run."""
        return self.tokens_per_step - 1

    @property
    def histogram(self) -> dict[int, int]:
        """Accepted drafted tokens -> number of whole steps."""
        return dict(sorted(Counter(run - 1 for run in self.whole_runs).items()))

    @property
    def whole_runs(self) -> list[int]:
        """The runs that enter the means."""
        return [run for step, run in enumerate(self.runs) if step not in self.cuts]

    def record(self, tree: TokenTree, path: list[int], cut: bool) -> None:
        """Count one step that emitted a token at each node of `path`."""
        if len(path) > max(self.runs, default=0):
            self.best_tree = tree.annotate(accepted=torch.tensor([path]))
        if cut:
            self.cuts.add(len(self.runs))
        self.runs.append(len(path))
        self._drafts.append((tree.sizes, tree.log_probs))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to `seconds[part]`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + perf_counter() - start

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON; a mean over no step is None."""
        means = {"tokens_per_step": self.tokens_per_step, "accepted_per_step": self.accepted_per_step}
        return {
            "steps": self.steps,
            "new_tokens": self.new_tokens,
            "target_passes": self.target_passes,
            **{name: None if math.isnan(mean) else mean for name, mean in means.items()},
            "histogram": self.histogram,
            "drafted_nodes": self.drafted_nodes,
            "lossy": self.lossy,
            "seconds": dict(self.seconds),
        }
