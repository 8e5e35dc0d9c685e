"""`WeaverConfig`, what a Weaver artifact says of itself, `TreeConfig`, how its trees are grown, and `AdapterConfig`."""

from copy import copy
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers import PreTrainedConfig

from .acceptance import RULES
from .errors import CheckpointError, TreeConfigError

__all__ = ["AdapterConfig", "TreeConfig", "WeaverConfig"]

DEFAULT_BUDGET = 63  # with the root 64 rows, which fills a tile of the matrix units
DEFAULT_BUDGET_CPU = 15  # on a CPU rows are not free
DEFAULT_COUPLING = 1.2  # what the embedded drafter is fitted to at temperature 1; it shapes trees, never a text


@dataclass(slots=True)
class TreeConfig:
    """How the trees of a Weaver are grown. Change a field by plain assignment; each call of `generate` copies it first.

    Attributes:
        builder: name of the rule that grows the tree. `"suffix"`: matches of the current suffix earlier in the text;
            `"chain"`: the drafter's best token of each depth; `"marginal"`: the best paths of its marginals;
            `"weaver"`: the best paths of the adapter's conditionals, grown, then pruned; `"weaver-paper"`: the same by
            the paper's rule, where what is expanded is what is kept.
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
        adapter_temperature, adapter_coupling_temperature: the same two for the adapter's scores, which builders
            `"weaver"` and `"weaver-paper"` use.
        rounds: of builder `"weaver"`: passes of the adapter a step, the root's included. None: 16, or the budget if
            that is less.
        parents: nodes that each later pass scores. None: so many that all passes score as many nodes as are kept.
        children: candidates of a node that compete for a place in the tree. None: 16.
        pool: of both weaver builders: candidates that the adapter scores a depth. None: its `pool_size`, which is also
            the most it takes.

    Raises:
        TreeConfigError: on assignment of a value that cannot be used.
    """

    builder: str = "suffix"
    budget: int | None = None
    acceptance: str | None = None
    lossy_margin: float = 0.3
    draft_temperature: dict[str, list[float]] = field(default_factory=dict)
    coupling_temperature: dict[str, list[float]] = field(default_factory=dict)
    adapter_temperature: dict[str, list[float]] = field(default_factory=dict)
    adapter_coupling_temperature: dict[str, list[float]] = field(default_factory=dict)
    rounds: int | None = None
    parents: int | None = None
    children: int | None = None
    pool: int | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        least = {"budget": 0, "rounds": 1, "parents": 1, "children": 1, "pool": 1}
        usable = value is None or (isinstance(value, int) and not isinstance(value, bool))
        if name in least and not (usable and (value is None or value >= least[name])):
            raise TreeConfigError(
                f"{name} {value!r}",
                f"an integer of at least {least[name]}, or None",
                f"Set `weaver.tree_config.{name} = 15`.",
            )
        if name == "acceptance" and value is not None and value not in RULES:
            raise TreeConfigError(
                f"acceptance {value!r}", f"one of {list(RULES)}, or None", "Set `weaver.tree_config.acceptance = None`."
            )
        if name == "lossy_margin" and not (isinstance(value, int | float) and value >= 0):
            raise TreeConfigError(
                f"lossy_margin {value!r}", "nats, at least 0", "Set `weaver.tree_config.lossy_margin = 0.3`."
            )
        if name.endswith("_temperature"):
            _check_temperatures(name, value)
        object.__setattr__(self, name, value)

    def nodes_on(self, device_type: str) -> int:
        """The budget that holds on a device of this type (`"cpu"`, `"cuda"`, ...)."""
        if self.budget is not None:
            return self.budget
        return DEFAULT_BUDGET_CPU if device_type == "cpu" else DEFAULT_BUDGET

    def temperatures_at(self, temperature: float, depths: int, *, adapter: bool = False) -> list[float]:
        """The temperature of each depth, the drafter's or the adapter's, for a target temperature (0: greedy)."""
        table = self.adapter_temperature if adapter else self.draft_temperature
        return _nearest(table, temperature, depths, otherwise=temperature or 1.0)

    def couplings_at(self, temperature: float, depths: int, *, adapter: bool = False) -> list[float]:
        """The coupling temperature of each depth, the drafter's or the adapter's, for a target temperature."""
        table = self.adapter_coupling_temperature if adapter else self.coupling_temperature
        return _nearest(table, temperature, depths, otherwise=DEFAULT_COUPLING)


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


@dataclass(frozen=True)
class AdapterConfig:
    """Geometry of a `TopKAdapter`; the defaults are those of the released Qwen3.6-27B adapter.

    Attributes:
        generation: `"learned"` (the paper's: a table of positions, GELU) or `"rope"` (the newer one: rotary positions,
            SwiGLU).
        rank: width of the adapter.
        num_layers: blocks.
        num_heads: attention heads, each `rank / num_heads` wide.
        mlp_dim: width of the MLP.
        max_depth: depths it scores: those that the drafter predicts.
        pool_size: candidates a depth that it was trained on.
        rope_base: of rotary positions; without meaning for `"learned"`.
        dtype: of the stored weights, None where they have the drafter's.

    Raises:
        CheckpointError: names the values that do not go together.
    """

    generation: str = "learned"
    rank: int = 2048
    num_layers: int = 1
    num_heads: int = 16
    mlp_dim: int = 2048
    max_depth: int = 15
    pool_size: int = 512
    rope_base: float = 10000.0
    dtype: str | None = None

    def __post_init__(self) -> None:
        def refuse(found: str, expected: str) -> None:
            raise CheckpointError(f"an adapter with {found}", expected, "Correct `adapter` in config.json.")

        if self.generation not in ("learned", "rope"):
            refuse(f"generation {self.generation!r}", "generation 'learned' or 'rope'")
        for name in ("rank", "num_layers", "num_heads", "mlp_dim", "max_depth", "pool_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                refuse(f"{name} {value!r}", "an integer of at least 1")
        if self.rank % self.num_heads:
            refuse(f"rank {self.rank} and {self.num_heads} heads", "a rank that is a multiple of the heads")
        if self.generation == "rope" and (self.rank // self.num_heads) % 2:
            refuse(f"rotary positions and heads of width {self.rank // self.num_heads}", "heads of an even width")
        if not self.rope_base > 0:
            refuse(f"rope_base {self.rope_base!r}", "a positive number")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AdapterConfig":
        """From the `adapter` of a config.json; an unknown key is an error that names it."""
        if not isinstance(values, dict):
            raise CheckpointError(
                f"adapter {values!r} in a WeaverConfig",
                "its geometry as a dict",
                "To load an adapter from elsewhere, call `WeaverModel.from_pretrained(drafter, adapter=...)`.",
            )
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise CheckpointError(
                f"adapter settings {unknown}",
                f"some of {sorted(f.name for f in fields(cls))}",
                "Correct `adapter` in config.json, or install the weaver_hf version that wrote it.",
            )
        return cls(**values)


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
        adapter: fields of `AdapterConfig`, None for a Weaver without an adapter. An adapter needs a drafter.
        adapter_initialized: whether the artifact holds the adapter's weights. False where it only declares the shape,
            so that PEFT finds the module to put trained weights into; builder `"weaver"` refuses it.
        tree_config: fields of `TreeConfig`; with an adapter the default builder is `"weaver"`.
        base_model_name_or_path: Hub id or path of the target that the artifact was made for.
        base_model_revision: commit of that target, None where not recorded.
        probe: what `weaver-hf doctor --record` found of it: the acceptance on a short probe, and what identifies target
            and tokenizer; later examinations compare themselves with it.
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
        adapter: dict[str, Any] | AdapterConfig | None = None,
        adapter_initialized: bool = True,
        tree_config: dict[str, Any] | TreeConfig | None = None,
        base_model_name_or_path: str | None = None,
        base_model_revision: str | None = None,
        probe: dict[str, Any] | None = None,
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
        self.adapter = asdict(adapter) if isinstance(adapter, AdapterConfig) else copy(adapter)
        self.adapter_initialized = adapter_initialized
        self.tree_config = asdict(tree_config) if isinstance(tree_config, TreeConfig) else dict(tree_config or {})
        if adapter is not None and adapter_initialized:
            self.tree_config.setdefault("builder", "weaver")
        self.base_model_name_or_path = base_model_name_or_path
        self.base_model_revision = base_model_revision
        self.probe = probe
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
        self.check_adapter()
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
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups or self.head_dim % 2:
            raise CheckpointError(
                f"{heads} attention heads of width {self.head_dim} over {groups} key/value heads",
                "a multiple of the key/value heads, of an even width",
                "Correct the drafter's geometry.",
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

    def check_adapter(self) -> None:
        """Raise where the adapter's geometry does not fit the drafter's.

        Raises:
            CheckpointError: names both values.
        """
        if self.adapter is None:
            return
        adapter = AdapterConfig.from_dict(self.adapter)
        if not self.num_hidden_layers:
            raise CheckpointError(
                "an adapter without a drafter",
                "a drafter, whose candidates it scores",
                "Load the drafter, and the adapter with `WeaverModel.from_pretrained(drafter, adapter=...)`.",
            )
        if adapter.max_depth != self.block_size - 1:
            raise CheckpointError(
                f"an adapter of {adapter.max_depth} depths beside a drafter of block_size {self.block_size}",
                f"{self.block_size - 1} depths, those that the drafter predicts",
                "Load the adapter that was trained on this drafter.",
            )
        if self.vocab_size is not None and adapter.pool_size > self.vocab_size:
            raise CheckpointError(
                f"an adapter with pool_size {adapter.pool_size} beside a vocabulary of {self.vocab_size} tokens",
                "a pool of at most the vocabulary",
                "Correct `pool_size`, or load the adapter that belongs to this target.",
            )

    def check_target(self, target: PreTrainedConfig) -> None:
        """Compare what is declared here with a target's config; None declares nothing.

        Raises:
            CheckpointError: names the two values.
        """
        text = target.get_text_config()
        for name in ("vocab_size", "hidden_size"):
            declared, actual = getattr(self, name), getattr(text, name)
            if declared is not None and declared != actual:
                made_for = self.base_model_name_or_path
                raise CheckpointError(
                    f"a Weaver made for {name} {declared}" + (f" (it names {made_for})" if made_for else ""),
                    f"{name} {actual}, the target's",
                    "Load the Weaver that belongs to this target.",
                )
        layers = text.num_hidden_layers
        if self.num_target_layers not in (None, layers):
            raise CheckpointError(
                f"a Weaver made for {self.num_target_layers} target layers",
                f"{layers}, the target's",
                "Load the Weaver that belongs to this target.",
            )
        mask = self.mask_token_id
        if mask is not None and not 0 <= mask < text.vocab_size:
            raise CheckpointError(
                f"mask_token_id {mask}",
                f"an id below the target's vocabulary of {text.vocab_size}",
                "Load the Weaver that belongs to this target, or correct its config.json.",
            )
        # The last layer's output is seen after the final norm by some libraries and before it by others.
        wrong = [i for i in self.target_layer_ids if not 0 <= i < layers - 1]
        if wrong:
            raise CheckpointError(
                f"target_layer_ids {wrong}",
                f"ids from 0 to {layers - 2}: the target has {layers} layers and the last one is never tapped",
                "Load the Weaver that belongs to this target, or correct its config.json.",
            )
