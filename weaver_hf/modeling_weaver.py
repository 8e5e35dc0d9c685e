"""`WeaverModel`: the artifact that drafts for a target, and its tie to it."""

import re
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from .adapter import AdapterNorm, AdapterScorer, FoldedTables, TopKAdapter
from .checkpoints import format_of
from .checkpoints.adapters import check_finite, load_adapter
from .configuration_weaver import AdapterConfig, TreeConfig, WeaverConfig
from .custom_generate import decode, write_door
from .drafter import BlockDrafter, DraftBlock, DrafterContext, RMSNorm, StaticContext
from .errors import CheckpointError, MissingDrafterError, NotAttachedError, TreeConfigError
from .hub import PUSH_OPTIONS, push
from .noise import GumbelField
from .peft_weaver import PeftWeaver, load_folder
from .scoring import DraftRule
from .stats import GenerationStats
from .target.attach import attach, attachment_of, detach, head_device, unwrap
from .target.taps import TapSink, TapStates

__all__ = ["WeaverModel"]

logger = logging.get_logger(__name__)

_HUB = ("cache_dir", "force_download", "local_files_only", "token")
_CONTEXT = "_weaver_context"  # on a cache: whose it is (id of the Weaver, PEFT adapter), and the context


class WeaverModel(PeftWeaver, PreTrainedModel):
    """Drafts token trees for a target that `generate` then verifies: `generate(..., assistant_model=weaver)`.

    A Weaver without learned parts is complete: its builder `"suffix"` drafts from the text alone.

    Args:
        config: what the artifact declares; `WeaverConfig()` fits any supported target.

    Attributes:
        tree_config: how trees are grown; change it by plain assignment between calls.
        stats: of the last call of `generate`, None before the first.
        planted_acceptance: for timing alone, set by the bench: a probability with which a drafted token is accepted,
            whatever the target says. Texts are then meaningless, and `stats.lossy` is set.
    """

    config_class = WeaverConfig
    base_model_prefix = "weaver"
    main_input_name = "noise_embeds"

    def __init__(self, config: WeaverConfig) -> None:
        super().__init__(config)
        self._trees = {None: TreeConfig(**config.tree_config)}
        self.stats: GenerationStats | None = None
        self.planted_acceptance: float | None = None
        self._target: weakref.ref[PreTrainedModel] | None = None
        self.drafter = BlockDrafter(config) if config.num_hidden_layers else None
        self.adapter: TopKAdapter | None = None
        self._fold = False
        self._tables: tuple[str | None, FoldedTables] | None = None
        if config.adapter is not None:
            geometry = AdapterConfig.from_dict(config.adapter)
            assert config.hidden_size is not None, "the config has a drafter, and says so"
            self.adapter = TopKAdapter(config.hidden_size, geometry)
            if geometry.dtype is not None:  # not the drafter's: loading must not round it to that
                self._keep_in_fp32_modules_strict = {"adapter"}
        self.post_init()
        self._watch_peft()

    # ---- the target --------------------------------------------------------------------------------------------------

    @property
    def target(self) -> PreTrainedModel | None:
        """The model this Weaver is attached to. Held weakly, and never a submodule."""
        return None if self._target is None else self._target()

    def attach(self, model: nn.Module, fold: bool = False) -> "WeaverModel":
        """Make `model.generate(..., assistant_model=self)` decode with this Weaver's trees.

        The classes of the model instance and of its Gated DeltaNet modules are swapped for subclasses of the same
        names; everything else about the model, plain `generate` included, stays as it was. Attaching twice changes
        nothing.

        Args:
            model: a supported target, also inside a PEFT wrapper.
            fold: let the adapter read two tables over the vocabulary (`[V, rank]` each, in the target's dtype) instead
                of embedding and head: the same scores, in more memory and less time. They are computed at the first
                use, kept until `detach` or the next `attach`, and do not follow later changes of weights.

        Returns:
            The Weaver itself, on the target's device and in its dtype.

        Raises:
            UnsupportedModelError: the model's family is not supported.
            CheckpointError: the Weaver was made for another kind of target.
            NotAttachedError: the Weaver is attached to another model.
        """
        from .generation import WeaverGenerationMixin  # the loop knows this class, so it cannot be imported above

        target = unwrap(model)
        if self.target is not None and self.target is not target:
            raise NotAttachedError(
                "a Weaver that is attached to another model",
                "a free one",
                "Call `weaver.detach()` first, or load a second Weaver.",
            )
        attachment = attachment_of(target)
        if attachment is None or not any(other is self for other in attachment.weavers):
            self.config.check_target(target.config)
            attach(target, self, WeaverGenerationMixin)
        self._target = weakref.ref(target)
        self._fold, self._tables = fold, None
        return self.to(device=head_device(target), dtype=target.dtype)

    def detach(self) -> "WeaverModel":
        """Undo `attach`: when the last Weaver leaves a model, its classes are the original ones again."""
        if self.target is not None:
            detach(self.target, self)
        self._target, self._fold, self._tables = None, False, None
        return self

    def warmup(self, max_new_tokens: int = 1024, prompt_tokens: int = 1024, **options: Any) -> "WeaverModel":
        """Capture the step before the first call needs it; without it, the first long call on a GPU does.

        Args:
            max_new_tokens, prompt_tokens: of the longest calls to come.
            options: of `generate` in those calls: sampling and its settings.

        Returns:
            The Weaver itself.

        Raises:
            NotAttachedError: the Weaver is attached to no model.
        """
        target = self.target
        attachment = None if target is None else attachment_of(target)
        if target is None or attachment is None:
            raise NotAttachedError("a Weaver without a target", "an attached one", "Call `weaver.attach(model)` first.")
        ids = torch.zeros(1, 8, dtype=torch.long, device=head_device(target))
        attachment.asked = prompt_tokens + max_new_tokens
        try:
            # Two tokens: one of the prefill, one of a step.
            limits = {"max_new_tokens": 2, "min_new_tokens": None, "attention_mask": torch.ones_like(ids)}
            target.generate(ids, assistant_model=self, **{**options, **limits})
        finally:
            attachment.asked = None
        return self

    #: `model.generate(..., custom_generate=weaver.custom_generate)` decodes a model that carries no Weaver.
    custom_generate = decode

    def tap_sink(self, device: torch.device) -> TapSink | None:
        """A sink that gathers the attached target's taps on `device`, None where the config names none."""
        target = self.target
        if target is None or not self.config.target_layer_ids:
            return None
        attachment = attachment_of(target)
        assert attachment is not None, "a target is set while attached"
        decoder = attachment.family.decoder_of(target)
        return TapSink(decoder, self.config.target_layer_ids, device)

    # ---- the drafter -------------------------------------------------------------------------------------------------

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm | AdapterNorm):
            nn.init.ones_(module.weight)
            if isinstance(module, AdapterNorm):
                nn.init.zeros_(module.bias)
        elif isinstance(module, TopKAdapter):  # after its parts
            if module.config.generation == "learned":
                nn.init.normal_(module.pos_emb, std=0.02)
            nn.init.zeros_(module.lm_head_query_in.weight)  # untrained, it changes nothing: the drafter's own scores

    def forward(
        self,
        noise_embeds: Tensor | None = None,
        context_hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """transformers' native DFlash contract: `generate(..., speculation_type="dflash")` on a dense target runs it.

        Args:
            noise_embeds: `[B, Q, H]`, the target's embeddings of the anchor and the mask tokens.
            context_hidden_states: `[B, R, n * H]`, tap features of the rows that are new since the last call.
            position_ids: `[B, R + Q]` of those rows and of the block.
            attention_mask: `[B, S + Q]` over all rows with the block, 0 where padded, or None.
            past_key_values, cache: the drafter's cache under either name (5.24 renamed it).

        Returns:
            `last_hidden_state` `[B, Q, H]`.

        Raises:
            MissingDrafterError: the Weaver has no drafter.
        """
        if self.drafter is None:
            raise MissingDrafterError(
                "a Weaver without a learned drafter",
                "one with a drafter, for `speculation_type='dflash'` or a direct call",
                "Pass it to `generate(..., assistant_model=weaver)` of the attached model instead.",
            )
        assert noise_embeds is not None
        assert context_hidden_states is not None
        assert position_ids is not None
        cache = past_key_values if cache is None else cache
        rows, size = context_hidden_states.shape[1], noise_embeds.shape[1]
        fresh = self.drafter.context_rows(context_hidden_states, position_ids[:, :rows])
        # The stock loop crops the block's rows from the cache after each call, so they are put into it too; the drafter
        # makes the same keys itself, and reads the context alone from here.
        filler = noise_embeds.new_zeros(*fresh[0][0].shape[:2], size, fresh[0][0].shape[-1])
        context = []
        for layer, (key, value) in enumerate(fresh):
            if cache is not None:
                filled = (torch.cat([key, filler], 2), torch.cat([value, filler], 2))
                key, value = (x[:, :, :-size] for x in cache.update(*filled, layer))
            context.append((key, value))
        length = context[0][0].shape[2]
        first = position_ids[:, rows:, None].transpose(1, 2)  # [B, 1, Q]
        # Context rows are contiguous up to the anchor.
        positions = torch.arange(length, device=noise_embeds.device) + first[:, 0, :1] - length
        if attention_mask is not None:
            positions = positions.masked_fill(attention_mask[:, :length] == 0, -1)
        hidden = self.drafter(noise_embeds[:, None], context, positions, first)
        return BaseModelOutput(last_hidden_state=hidden[:, 0])

    def drafter_context(self, cache: Any) -> DrafterContext | None:
        """What the drafter knows of the text in `cache`; None for a Weaver without a drafter.

        The context of an earlier turn travels on the target's cache. Where stock code has moved the cache on since, or
        made it, the text so far was not seen by the drafter: it starts at the new suffix, at its true positions.
        """
        if self.drafter is None:
            return None
        length = 0 if cache is None else cache.get_seq_length()
        owner, kept = getattr(cache, _CONTEXT, (None, DrafterContext([])))
        if length and owner == (id(self), self.peft_adapter) and kept.cache_length == length:
            return kept
        if length:
            logger.info("The drafter did not see the %d tokens in this cache; it starts at the new suffix.", length)
        return DrafterContext([], next_position=length)

    def keep_context(self, cache: Any, context: DrafterContext | None, taps: TapStates | None) -> None:
        """Leave the context on the cache that `generate` returns, for the next turn, the last rows read too."""
        if cache is not None and context is not None:
            self.read_taps(context, taps)
            context.cache_length = cache.get_seq_length()
            setattr(cache, _CONTEXT, ((id(self), self.peft_adapter), context))

    @torch.no_grad()
    def read_taps(self, context: DrafterContext, taps: TapStates | None) -> None:
        """Let the drafter read the rows that entered the target's cache."""
        assert self.drafter is not None
        if taps is not None:
            batch, rows, _ = taps.features.shape
            positions = context.ahead(rows, batch, taps.features.device)
            context.append(self.drafter.context_rows(taps.features, positions))

    @torch.no_grad()
    def draft(
        self, anchors: Tensor, context: DrafterContext, rule: DraftRule, pool: int, noise: GumbelField | None = None
    ) -> DraftBlock:
        """One pass: the best `pool` tokens of each depth behind the anchors, by the target's embedding and head.

        Args:
            anchors: int64 `[B, 1]`.
            context: what the drafter knows of the text before them.
            rule: how logits become log-probabilities; a block has at most as many depths as it has temperatures.
            pool: candidates kept a depth.
            noise: that the target draws with, from the token behind the anchor on, for coupled drafts. The pool is then
                chosen by the perturbed scores, over the whole vocabulary.
        """
        drafter, target = self.drafter, self.target
        assert drafter is not None
        assert target is not None
        depths = min(self.config.block_size - 1, len(rule.temperatures))
        masks = torch.full_like(anchors, self.config.mask_token_id).expand(-1, self.config.block_size - 1)
        slots = target.get_input_embeddings()(torch.cat([anchors, masks], 1))
        batch, device = len(anchors), anchors.device
        if isinstance(context, StaticContext):
            hidden = drafter.block(slots, context)[:, 1 : depths + 1]
        else:
            positions = context.ahead(self.config.block_size, batch, device)[:, None]
            places = context.places(batch, device)
            hidden = drafter(slots[:, None], context.used(), places, positions)[:, 0, 1 : depths + 1]
        logits = target.get_output_embeddings()(hidden).float()  # [B, D, V]
        gumbels = None if noise is None else noise.rows(depths, logits.shape[-1])
        log_probs, token_ids = rule.log_probs(logits, gumbels).topk(min(pool, logits.shape[-1]), -1)
        known = None if gumbels is None else gumbels.gather(-1, token_ids)
        return DraftBlock(hidden, token_ids, logits.gather(-1, token_ids), log_probs, known)

    # ---- the adapter -------------------------------------------------------------------------------------------------

    def init_adapter(self, config: AdapterConfig, weights: dict[str, Tensor] | None = None) -> "WeaverModel":
        """Put an adapter beside the drafter, in place of any other and its fits, and make `"weaver"` the builder.

        A fresh one has a zero `lm_head_query_in`: until it is trained, the conditionals are the drafter's marginals,
        renormalised to the pool.

        Args:
            config: its geometry; must fit the drafter's.
            weights: its tensors, taken as they are; by default a fresh one is made on the Weaver's device and in its
                dtype.

        Returns:
            The Weaver itself.

        Raises:
            CheckpointError: names what does not fit.
        """
        before, self.config.adapter = self.config.adapter, asdict(config)
        try:
            self.config.check_adapter()
        except CheckpointError:
            self.config.adapter = before
            raise
        adapter = TopKAdapter(int(self.config.hidden_size), config).train(self.training)
        if weights is None:
            adapter.apply(self._init_weights)
            adapter.to(self.device, self.dtype)
        else:
            adapter.load_state_dict(weights, assign=True)
        self.adapter, self._tables = adapter, None
        self.config.adapter_initialized = True
        self.tree_config.builder = "weaver"
        self.tree_config.adapter_temperature, self.tree_config.adapter_coupling_temperature = {}, {}
        return self

    def pool_size(self, tree_config: TreeConfig) -> int:
        """Candidates a depth that the adapter scores under these settings.

        Raises:
            TreeConfigError: more than it was trained on.
        """
        assert self.adapter is not None
        trained = self.adapter.config.pool_size
        if (tree_config.pool or 0) > trained:
            raise TreeConfigError(
                f"a pool of {tree_config.pool} candidates",
                f"at most {trained}, the pool_size that the adapter was trained on",
                "Lower `weaver.tree_config.pool`, or set it to None.",
            )
        return tree_config.pool or trained

    @torch.no_grad()
    def scorer(self, block: DraftBlock, taps: TapStates | None, rule: DraftRule) -> AdapterScorer:
        """Conditional scores of a block's candidates, for one step.

        Args:
            block: from `draft`.
            taps: of the rows that entered the target's cache last; the last row's logits chose the anchor.
            rule: how the adapter's logits become log-probabilities; coupled where the block knows the noise.

        Raises:
            NotAttachedError: there are no taps, as in transformers' own assisted loop.
        """
        adapter, target = self.adapter, self.target
        assert adapter is not None
        assert target is not None
        if taps is None:
            raise NotAttachedError(
                "no state of the target to start the adapter from",
                "the states that `generate(..., assistant_model=weaver)` of the attached model reads",
                "Call that, or set another builder.",
            )
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        if self._fold and (self._tables is None or self._tables[0] != self.peft_adapter):
            self._tables = self.peft_adapter, FoldedTables.build(adapter, embedding, head)
        tables = None if self._tables is None else self._tables[1]
        return AdapterScorer(adapter, embedding, head, block, taps.final_hidden[:, -1], rule, tables)

    @property
    def device(self) -> torch.device:
        """Where the weights are; without any, where the target's head is, or the CPU."""
        if next(self.parameters(), None) is not None:
            return super().device
        return torch.device("cpu") if self.target is None else head_device(self.target)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; without any, of the target, or fp32."""
        if next(self.parameters(), None) is not None:
            return super().dtype
        return torch.float32 if self.target is None else self.target.dtype

    # ---- the artifact ------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write `config.json` (with the current `tree_config`) and `model.safetensors`, in transformers' format.

        Drafter and adapter are in the one file, each in its own dtype; an adapter that is only declared is left out.
        With a PEFT adapter in use, that one alone is written, in PEFT's format.

        Args:
            save_directory: the folder.
            kwargs: transformers' own, and `custom_generate=True` for what `model.generate(..., custom_generate=folder,
                trust_remote_code=True)` runs to decode with this Weaver.
        """
        with_door = kwargs.pop("custom_generate", False)
        push = kwargs.pop("push_to_hub", False)
        repo_id = kwargs.pop("repo_id", Path(save_directory).name)
        of_push = {name: kwargs.pop(name) for name in PUSH_OPTIONS if name in kwargs}
        of_both = {name: kwargs[name] for name in ("token", "max_shard_size") if name in kwargs}
        if self.__dict__.get("peft_config"):
            self._save_peft(save_directory)
        else:
            self._save_whole(save_directory, **kwargs)
        if with_door:
            write_door(save_directory)
        if push:
            self.push_to_hub(repo_id, custom_generate=with_door, **of_push, **of_both)

    def _save_whole(self, folder: str | Path, **kwargs: Any) -> None:
        self.config.tree_config = asdict(self.tree_config)
        if self.adapter is not None and self.config.adapter is not None:
            dtype = self.adapter.out_norm.weight.dtype
            self.config.adapter["dtype"] = None if dtype == self.dtype else str(dtype).removeprefix("torch.")
            if not self.config.adapter_initialized and kwargs.get("state_dict") is None:
                kwargs["state_dict"] = {k: v for k, v in self.state_dict().items() if not k.startswith("adapter.")}
        # transformers would give tensors that were read from another format their old names back.
        super().save_pretrained(folder, save_original_format=False, **kwargs)
        if next(self.parameters(), None) is None:
            # transformers writes no file for no tensors; an empty one keeps loading uniform and strict.
            save_file({}, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload weights, config, tokenizer and a card of facts; options and errors are those of `hub.push`."""
        return push(self, repo_id, **options)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, adapter: str | Path | None = None, **kwargs: Any
    ) -> Any:
        """Load an artifact from a local folder or the Hub, strictly: ours, or a DFlash drafter of z-lab or speculators.

        Takes transformers' arguments (`revision`, `token`, `cache_dir`, `local_files_only`, ...).

        Args:
            pretrained_model_name_or_path: folder or Hub id of the drafter, or of drafter and adapter.
            adapter: another source for the adapter: a `.pth` file of trymirai's layout, a folder or Hub id that holds
                one (itself or in `weaver/`), or one of our artifacts with an adapter. Then the builder is `"weaver"`.

        Raises:
            CheckpointError: the folder is not a Weaver's, a file is damaged, or tensors are missing, unknown or of
                another shape; the message names them.
        """
        name = str(pretrained_model_name_or_path)
        if name.endswith(".pth"):
            raise CheckpointError(
                f"an adapter alone: {name}",
                "a drafter, whose candidates it scores",
                "Call `WeaverModel.from_pretrained(drafter, adapter=...)`.",
            )
        wants_info = kwargs.pop("output_loading_info", False)
        # transformers' AutoModel has resolved a PEFT folder to its base already.
        given = (kwargs.pop("adapter_kwargs", None) or {}).get("_adapter_model_path")
        if kwargs.get("config") is None or given is not None:
            with_peft = load_folder(cls, str(given or name), name if given else None, {**kwargs, "adapter": adapter})
            if with_peft is not None:
                return (with_peft, {}) if wants_info else with_peft
        kwargs.pop("ignore_mismatched_sizes", None)  # loading is strict
        ignored: list[str] = []
        if kwargs.get("config") is None:
            hub = (*_HUB, "revision", "subfolder")
            described, _ = PreTrainedConfig.get_config_dict(name, **{k: kwargs[k] for k in hub if k in kwargs})
            foreign = format_of(described)
            if foreign is not None:
                kwargs |= {"config": foreign.read_config(described), "key_mapping": foreign.key_mapping}
                ignored = foreign.ignored
            elif described.get("model_type") != WeaverConfig.model_type:
                raise CheckpointError(
                    f"a config of model_type {described.get('model_type')!r} in {name}",
                    "model_type 'weaver', or a DFlash checkpoint of z-lab or speculators",
                    "Pass the Weaver's folder or Hub id here, and the target's to `AutoModelForCausalLM`.",
                )
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except SafetensorError as error:
            raise CheckpointError(
                f"a damaged safetensors file in {name} ({error})",
                "whole safetensors files",
                "Download or copy the folder again.",
            ) from error
        absent = () if model.config.adapter_initialized else ("adapter.",)
        faults = {
            "missing": sorted(key for key in info["missing_keys"] if not key.startswith(absent)),
            "unknown": sorted(k for k in info["unexpected_keys"] if not any(re.match(p, k) for p in ignored)),
            "of another shape": sorted(str(key) for key in info["mismatched_keys"]),
        }
        if any(faults.values()):
            declared = "exactly the tensors that config.json declares"
            if any(key.startswith("adapter.") for keys in faults.values() for key in keys) and model.config.adapter:
                declared += f", with an adapter of generation {model.config.adapter['generation']!r}"
            raise CheckpointError(
                f"tensors {'; '.join(f'{kind}: {keys}' for kind, keys in faults.items() if keys)} in {name}",
                declared,
                "Check that weights and config.json come from the same artifact.",
            )
        asked = kwargs.get("dtype", kwargs.get("torch_dtype")) not in (None, "auto")
        if model.has_adapter:
            check_finite(model.adapter, name)
            stored = model.adapter.config.dtype
            if stored is not None:
                model.adapter.to(model.dtype if asked else getattr(torch, stored))
        if adapter is not None:
            load_adapter(model, str(adapter), {key: kwargs[key] for key in _HUB if key in kwargs})
            model.adapter.to(model.device, model.dtype if asked else None)
        return (model, info) if wants_info else model

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and deep copies: the copy is not attached."""
        return {**self.__dict__, "_target": None, "_fold": False, "_tables": None}
