"""`WeaverConfig`, what a Weaver artifact says of itself, and `TreeConfig`, how its trees are grown."""

from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from .acceptance import RULES
from .errors import CheckpointError, TreeConfigError

__all__ = ["TreeConfig", "WeaverConfig"]

DEFAULT_BUDGET = 63  # with the root 64 rows, which fills a tile of the matrix units
DEFAULT_BUDGET_CPU = 15  # on a CPU rows are not free
DEFAULT_COUPLING = 1.2  # what the embedded drafter is fitted to at temperature 1; it shapes trees, never a text


@dataclass(slots=True)
class TreeConfig:
    """How the trees of a Weaver are grown. Change a field by plain assignment; each call of `generate` copies it first.

    Attributes:
        builder: name of the rule that grows the tree. `"suffix"`: matches of the current suffix earlier in the text;
            `"chain"`: the drafter's best token of each depth; `"marginal"`: the best paths of its marginals.
        budget: drafted nodes a step, the root not counted. None: 63 on an accelerator, 15 on a CPU. 0 drafts nothing:
            plain decoding, one token a pass, with the same noise.
        acceptance: how sampled text is accepted. `"sample"`: the target draws at each node, and the matching child is
            followed. `"coupled"`: the same draws, and the builder is told the noise, so that it can guess them; for
            builders that score the vocabulary (all but `"suffix"`). None: `"coupled"` where the builder can, otherwise
            `"sample"`. `"lossy_margin"`, also under greedy decoding: a drafted token that the target finds nearly as
            good as its choice is taken instead, so the text is not the target's; `stats.lossy` says so.
        lossy_margin: of that rule, in nats.
        draft_temperature: a divisor of the drafter's logits for each depth, fitted on a dev split for each temperature
            of the target: `{"0.0": [...], "1.0": [...]}`. The entry nearest to the call's temperature is used; depths
            beyond a list mean 1. Where nothing is fitted, the call's own temperature (1 for greedy decoding).
        coupling_temperature: in the same form, tau of coupled scores (`scoring.candidate_log_probs`), which are made at
            the call's own temperature; `training.coupling.fit_coupling` fits it. Where nothing is fitted, 1.2.

    Raises:
        TreeConfigError: on assignment of a value that cannot be used.
    """

    builder: str = "suffix"
    budget: int | None = None
    acceptance: str | None = None
    lossy_margin: float = 0.3
    draft_temperature: dict[str, list[float]] = field(default_factory=dict)
    coupling_temperature: dict[str, list[float]] = field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        usable = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)
        if name == "budget" and not usable:
            raise TreeConfigError(
                f"budget {value!r}", "an integer of at least 0, or None", "Set `weaver.tree_config.budget = 15`."
            )
        if name == "acceptance" and value is not None and value not in RULES:
            raise TreeConfigError(
                f"acceptance {value!r}", f"one of {list(RULES)}, or None", "Set `weaver.tree_config.acceptance = None`."
            )
        if name == "lossy_margin" and not (isinstance(value, int | float) and value >= 0):
            raise TreeConfigError(
                f"lossy_margin {value!r}", "nats, at least 0", "Set `weaver.tree_config.lossy_margin = 0.3`."
            )
        if name in ("draft_temperature", "coupling_temperature"):
            _check_temperatures(name, value)
        object.__setattr__(self, name, value)

    def nodes_on(self, device_type: str) -> int:
        """The budget that holds on a device of this type (`"cpu"`, `"cuda"`, ...)."""
        if self.budget is not None:
            return self.budget
        return DEFAULT_BUDGET_CPU if device_type == "cpu" else DEFAULT_BUDGET

    def temperatures_at(self, temperature: float, depths: int) -> list[float]:
        """The draft temperature of each depth for a target temperature (0 for greedy decoding)."""
        return _nearest(self.draft_temperature, temperature, depths, otherwise=temperature or 1.0)

    def couplings_at(self, temperature: float, depths: int) -> list[float]:
        """The coupling temperature of each depth for a target temperature."""
        return _nearest(self.coupling_temperature, temperature, depths, otherwise=DEFAULT_COUPLING)


def _nearest(table: dict[str, list[float]], temperature: float, depths: int, otherwise: float) -> list[float]:
    """The entry of the nearest temperature, one value a depth."""
    if not table:
        return [otherwise] * depths
    fitted = table[min(table, key=lambda key: abs(float(key) - temperature))][:depths]
    return [*fitted, *[1.0] * (depths - len(fitted))]


def _check_temperatures(name: str, value: Any) -> None:
    try:
        good = all(float(key) >= 0 and all(t > 0 for t in row) for key, row in value.items())
    except (AttributeError, TypeError, ValueError):
        good = False
    if not good:
        raise TreeConfigError(
            f"{name} {value!r}",
            "positive numbers, a list for each target temperature",
            f'Set e.g. `weaver.tree_config.{name} = {{"0.0": [1.0] * 15}}`.',
        )


class WeaverConfig(PreTrainedConfig):
    """Configuration of a `WeaverModel`: the drafter's geometry, tree defaults, and the identity of the target.

    The drafter's fields are named as in DFlash checkpoints (z-lab) and transformers' own DFlash path, flat.

    Args:
        vocab_size: the target's vocabulary. None fits any target (a Weaver without learned parts and tokenizer).
        hidden_size: the target's hidden size. None where nothing learned depends on it.
        target_layer_ids: taps, 0-based ids of the target's decoder layers whose outputs the drafter reads. Never the
            last layer. The numbering is DFlash's: tap `t` is `hidden_states[t + 1]` of a full capture.
        num_hidden_layers: layers of the block drafter; 0 for a Weaver without one.
        block_size: slots of a block, the anchor's included: `block_size - 1` tokens are drafted a pass.
        mask_token_id: token whose embedding fills the slots to be predicted.
        num_target_layers: decoder layers of the target, None where not recorded.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rms_norm_eps, rope_theta, attention_bias:
            geometry of the drafter, independent of the target's but for the hidden size.
        layer_types: `"full_attention"` or `"sliding_attention"` a drafter layer; sliding layers see `sliding_window`
            positions back and are causal inside the block.
        is_causal: overrides the causality inside the block of all layers where not None.
        tree_config: fields of `TreeConfig`.
        base_model_name_or_path: Hub id or path of the target that the artifact was made for.
        bos_token_id, eos_token_id, pad_token_id: the target's, which transformers' pipelines compare.
    """

    model_type = "weaver"

    def __init__(
        self,
        vocab_size: int | None = None,
        hidden_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        num_hidden_layers: int = 0,
        block_size: int = 16,
        mask_token_id: int | None = None,
        num_target_layers: int | None = None,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 8,
        head_dim: int = 128,
        intermediate_size: int | None = None,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1e7,
        attention_bias: bool = False,
        layer_types: list[str] | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        tree_config: dict[str, Any] | TreeConfig | None = None,
        base_model_name_or_path: str | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.target_layer_ids = list(target_layer_ids or [])
        self.num_hidden_layers = num_hidden_layers
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.num_target_layers = num_target_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.attention_bias = attention_bias
        self.layer_types = list(layer_types or ["full_attention"] * num_hidden_layers)
        self.sliding_window = sliding_window
        self.is_causal = is_causal
        self.tree_config = asdict(tree_config) if isinstance(tree_config, TreeConfig) else dict(tree_config or {})
        self.base_model_name_or_path = base_model_name_or_path
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self._check()
        super().__init__(**kwargs)

    def _check(self) -> None:
        """Raise on a config that no Weaver can be built from."""
        unknown = sorted(set(self.tree_config) - set(TreeConfig.__slots__))
        if unknown:
            raise TreeConfigError(
                f"tree settings {unknown}",
                f"some of {sorted(TreeConfig.__slots__)}",
                "Correct `tree_config` in config.json, or install the weaver_hf version that wrote it.",
            )
        TreeConfig(**self.tree_config)
        if not self.num_hidden_layers:
            return
        needed = ("vocab_size", "hidden_size", "intermediate_size", "mask_token_id")
        missing = [name for name in needed if getattr(self, name) is None]
        missing += [] if self.target_layer_ids else ["target_layer_ids"]
        if missing:
            raise CheckpointError(
                f"a drafter of {self.num_hidden_layers} layers without {', '.join(missing)}",
                "all fields of its geometry",
                "Add them to config.json.",
            )
        known = {"full_attention", "sliding_attention"}
        if len(self.layer_types) != self.num_hidden_layers or not known.issuperset(self.layer_types):
            raise CheckpointError(
                f"layer_types {self.layer_types}",
                f"{self.num_hidden_layers} of {sorted(known)}",
                "Correct `layer_types` in config.json.",
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise CheckpointError(
                "sliding_attention layers without sliding_window", "a window in positions", "Add `sliding_window`."
            )
        if self.block_size < 2:
            raise CheckpointError(f"block_size {self.block_size}", "at least 2", "Correct `block_size` in config.json.")
