"""Tree builders: rules that turn what a step knows into a `TokenTree` under a node budget. One file a rule."""

from collections.abc import Callable

from ..errors import TreeConfigError
from .protocol import DraftContext, TreeBuilder
from .suffix import SuffixBuilder

__all__ = ["BUILDERS", "DraftContext", "SuffixBuilder", "TreeBuilder", "make_builder"]

#: Name in `TreeConfig.builder` -> what makes a builder for a budget of drafted nodes.
BUILDERS: dict[str, Callable[[int], TreeBuilder]] = {"suffix": SuffixBuilder}


def make_builder(name: str, budget: int) -> TreeBuilder:
    """The builder of that name for `budget` drafted nodes a step.

    Raises:
        TreeConfigError: no builder has that name.
    """
    if name not in BUILDERS:
        raise TreeConfigError(
            f"builder {name!r}", f"one of {sorted(BUILDERS)}", 'Set `weaver.tree_config.builder = "suffix"`.'
        )
    return BUILDERS[name](budget)
