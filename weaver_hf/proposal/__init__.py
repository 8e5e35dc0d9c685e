"""Tree builders: rules that turn what a step knows into a `TokenTree` under a node budget. One file a rule."""

from collections.abc import Callable

from ..configuration_weaver import TreeConfig
from ..errors import MissingAdapterError, MissingDrafterError, TreeConfigError
from .chain import ChainBuilder
from .conditional import PaperBuilder, WeaverBuilder
from .marginal import MarginalBuilder
from .protocol import DraftContext, Scorer, TreeBuilder
from .suffix import SuffixBuilder

__all__ = [
    "BUILDERS",
    "ChainBuilder",
    "DraftContext",
    "MarginalBuilder",
    "PaperBuilder",
    "Scorer",
    "SuffixBuilder",
    "TreeBuilder",
    "WeaverBuilder",
    "make_builder",
]

#: Name in `TreeConfig.builder` -> what makes a builder for a budget of drafted nodes, and its own `options` if any.
BUILDERS: dict[str, Callable[..., TreeBuilder]] = {
    "suffix": SuffixBuilder,
    "chain": ChainBuilder,
    "marginal": MarginalBuilder,
    "weaver": WeaverBuilder,
    "weaver-paper": PaperBuilder,
}


def make_builder(config: TreeConfig, budget: int, *, has_drafter: bool, has_adapter: bool) -> TreeBuilder:
    """The builder that `config` names, for `budget` drafted nodes a step.

    Raises:
        TreeConfigError: no builder has that name.
        MissingDrafterError: the builder reads a drafter's block, and there is no drafter.
        MissingAdapterError: the builder reads an adapter's scores, and there is no adapter with weights.
    """
    name = config.builder
    if name not in BUILDERS:
        raise TreeConfigError(
            f"builder {name!r}", f"one of {sorted(BUILDERS)}", 'Set `weaver.tree_config.builder = "suffix"`.'
        )
    factory = BUILDERS[name]
    builder = factory(budget, **{option: getattr(config, option) for option in getattr(factory, "options", ())})
    if getattr(builder, "needs_block", False) and not has_drafter:
        raise MissingDrafterError(
            f"builder {name!r} with a Weaver that has no learned drafter",
            "a Weaver with a drafter, or the builder 'suffix'",
            'Load a drafter, or set `weaver.tree_config.builder = "suffix"`.',
        )
    if getattr(builder, "needs_adapter", False) and not has_adapter:
        raise MissingAdapterError(
            f"builder {name!r} with a Weaver whose adapter is missing, or only declared (adapter_initialized: false)",
            "a Weaver with a trained adapter, or the builder 'marginal'",
            "Load one with `WeaverModel.from_pretrained(drafter, adapter=...)`, "
            'or set `weaver.tree_config.builder = "marginal"`.',
        )
    return builder
