"""`WeaverConfig`, what a Weaver artifact says of itself, and `TreeConfig`, how its trees are grown."""

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedConfig

from .errors import TreeConfigError

__all__ = ["TreeConfig", "WeaverConfig"]

DEFAULT_BUDGET = 63  # with the root 64 rows, which fills a tile of the matrix units
DEFAULT_BUDGET_CPU = 15  # on a CPU rows are not free


@dataclass(slots=True)
class TreeConfig:
    """How the trees of a Weaver are grown. Change a field by plain assignment; each call of `generate` copies it first.

    Attributes:
        builder: name of the rule that grows the tree. `"suffix"`: matches of the current suffix earlier in the text.
        budget: drafted nodes a step, the root not counted. None: 63 on an accelerator, 15 on a CPU.

    Raises:
        TreeConfigError: on assignment of a budget that is not a positive integer.
    """

    builder: str = "suffix"
    budget: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        usable = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)
        if name == "budget" and not usable:
            raise TreeConfigError(
                f"budget {value!r}", "an integer of at least 1, or None", "Set `weaver.tree_config.budget = 15`."
            )
        object.__setattr__(self, name, value)

    def nodes_on(self, device_type: str) -> int:
        """The budget that holds on a device of this type (`"cpu"`, `"cuda"`, ...)."""
        if self.budget is not None:
            return self.budget
        return DEFAULT_BUDGET_CPU if device_type == "cpu" else DEFAULT_BUDGET


class WeaverConfig(PreTrainedConfig):
    """Configuration of a `WeaverModel`.

    Args:
        vocab_size: the target's vocabulary. None fits any target (a Weaver without learned parts and tokenizer).
        hidden_size: the target's hidden size. None where nothing learned depends on it.
        target_layer_ids: taps, 0-based ids of the target's decoder layers whose outputs the drafter reads. Never the
            last layer. The numbering is DFlash's (arXiv 2602.06036): tap `t` is `hidden_states[t + 1]` of a full
            capture.
        tree_config: fields of `TreeConfig`.
        base_model_name_or_path: Hub id or path of the target that the artifact was made for.
    """

    model_type = "weaver"

    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        tree_config: dict[str, Any] | TreeConfig | None = None,
        base_model_name_or_path: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.target_layer_ids = list(target_layer_ids or [])
        self.tree_config = asdict(tree_config) if isinstance(tree_config, TreeConfig) else dict(tree_config or {})
        self.base_model_name_or_path = base_model_name_or_path
        unknown = sorted(set(self.tree_config) - set(TreeConfig.__slots__))
        if unknown:
            raise TreeConfigError(
                f"tree settings {unknown}",
                f"some of {sorted(TreeConfig.__slots__)}",
                "Correct `tree_config` in config.json, or install the weaver_hf version that wrote it.",
            )
        TreeConfig(**self.tree_config)
        super().__init__(**kwargs)
