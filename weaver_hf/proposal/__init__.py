"""Tree builders: rules that turn what a step knows into a `TokenTree` under a node budget. One file a rule."""

from collections.abc import Callable

from ..errors import MissingDrafterError, TreeConfigError
from .chain import ChainBuilder
from .marginal import MarginalBuilder
from .protocol import DraftContext, TreeBuilder
from .suffix import SuffixBuilder

__all__ = [
    "BUILDERS",
    "ChainBuilder",
    "DraftContext",
    "MarginalBuilder",
    "SuffixBuilder",
    "TreeBuilder",
    "make_builder",
]

#: Name in `TreeConfig.builder` -> what makes a builder for a budget of drafted nodes.
BUILDERS: dict[str, Callable[[int], TreeBuilder]] = {
    "suffix": SuffixBuilder,
    "chain": ChainBuilder,
    "marginal": MarginalBuilder,
}


def make_builder(name: str, budget: int, *, has_drafter: bool) -> TreeBuilder:
    """The builder of that name for `budget` drafted nodes a step.

    Raises:
        TreeConfigError: no builder has that name.
        MissingDrafterError: the builder reads a drafter's block, and there is no drafter.
    """
    if name not in BUILDERS:
        raise TreeConfigError(
            f"builder {name!r}", f"one of {sorted(BUILDERS)}", 'Set `weaver.tree_config.builder = "suffix"`.'
        )
    builder = BUILDERS[name](budget)
    if getattr(builder, "needs_block", False) and not has_drafter:
        raise MissingDrafterError(
            f"builder {name!r} with a Weaver that has no learned drafter",
            "a Weaver with a drafter, or the builder 'suffix'",
            'Load a drafter, or set `weaver.tree_config.builder = "suffix"`.',
        )
    return builder
