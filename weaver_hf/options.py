"""What tree decoding does not support, refused before any work is done."""

from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from .errors import (
    EmptyPromptError,
    NotAttachedError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from .target.attach import Attachment, attachment_of
from .target.cache import check_cache
from .target.compat import CACHE_KEY

if TYPE_CHECKING:
    from .modeling_weaver import WeaverModel

__all__ = ["check_inputs", "check_options", "check_prefill", "require_attached"]

# Other ways to assist or to decode, and a lossy one: beside `assistant_model=weaver` they would be ignored.
_RIVALS = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
    "dola_layers",
)

# Options of transformers' own assistants and caches that would have no effect here, and what has.
_UNUSED = {
    "num_assistant_tokens": "set `weaver.tree_config.budget`",
    "num_assistant_tokens_schedule": "set `weaver.tree_config.budget`",
    "assistant_confidence_threshold": "set `weaver.tree_config.budget`",
    "max_matching_ngram_size": "the suffix builder takes the longest match",
    "assistant_lookbehind": "a Weaver drafts in the target's own tokens",
    "target_lookbehind": "a Weaver drafts in the target's own tokens",
    "is_assistant": "the model that `generate` is called on is the target",
    "compile_config": "on a GPU the step is captured, not compiled",
    "cache_config": "the cache is the dynamic one",
}
_STOCK_DEFAULTS = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
    "is_assistant": False,
}


def require_attached(model: nn.Module, weaver: "WeaverModel") -> Attachment:
    """The model's attachment.

    Raises:
        NotAttachedError: the Weaver is attached to another model, or to none.
    """
    attachment = attachment_of(model)
    if attachment is None or not any(other is weaver for other in attachment.weavers):
        raise NotAttachedError(
            "a Weaver that is attached to " + ("another model" if weaver.target is not None else "no model"),
            "a Weaver attached to the model whose `generate` is called",
            "Call `weaver.detach()` and `weaver.attach(model)` first.",
        )
    return attachment


def check_options(
    model: nn.Module,
    weaver: "WeaverModel",
    mode: GenerationMode,
    config: GenerationConfig,
    mode_kwargs: dict[str, Any],
) -> None:
    """Check the options of a call with `assistant_model=weaver`; runs before anything is prepared.

    Raises:
        NotAttachedError: the Weaver is attached to another model, or to none.
        UnsupportedOptionError: names the option and what to pass instead.
    """
    require_attached(model, weaver)
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise UnsupportedOptionError(
            f"generation mode {mode.value!r} (num_beams={config.num_beams})",
            "greedy decoding or sampling without beams",
            "Pass `num_beams=1` and drop the options of that mode, or leave out `assistant_model`.",
        )
    for name in _RIVALS:
        if value := getattr(config, name):
            raise UnsupportedOptionError(
                f"{name}={value!r} beside a Weaver", "one way to decode", f"Drop `{name}` or `assistant_model`."
            )
    if "assistant_tokenizer" in mode_kwargs:
        raise UnsupportedOptionError(
            "an assistant_tokenizer", "none: a Weaver drafts in the target's own tokens", "Drop `assistant_tokenizer`."
        )
    if config.use_cache is False:
        raise UnsupportedOptionError(
            "use_cache=False", "use_cache=True: a tree is verified against the cache", "Drop `use_cache=False`."
        )
    if config.cache_implementation not in (None, "dynamic"):
        raise UnsupportedOptionError(
            f"cache_implementation={config.cache_implementation!r}",
            "the dynamic cache",
            "Drop `cache_implementation`; static, quantized and offloaded caches are not supported yet.",
        )
    for name, fix in _UNUSED.items():
        if getattr(config, name) not in (None, _STOCK_DEFAULTS.get(name)):
            raise UnsupportedOptionError(
                f"{name}={getattr(config, name)!r}", "an option that tree decoding uses", f"Drop it; {fix}."
            )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise UnsupportedOptionError(
                f"{name}=True", "scores and logits alone as outputs of tree decoding", f"Drop `{name}`."
            )
    if config.num_return_sequences > 1 and mode_kwargs.get("streamer") is not None:
        raise UnsupportedOptionError(
            f"a streamer for {config.num_return_sequences} sequences",
            "one sequence to stream",
            "Drop `streamer` or `num_return_sequences`.",
        )
    if mode_kwargs.get("synced_gpus"):
        raise UnsupportedOptionError(
            "synced_gpus=True (ZeRO-3 or FSDP)", "one process a model", "Pass `synced_gpus=False` or drop the Weaver."
        )


def check_inputs(input_ids: Tensor, inputs_tensor: Tensor | None, texts: int, model_kwargs: dict[str, Any]) -> None:
    """Check the tensors of a call, before the prefill; `texts` is `num_return_sequences`.

    Raises:
        UnsupportedOptionError: more than one prompt, or several texts that would continue one cache.
        EmptyPromptError: no token to continue from.
        UnsupportedCacheError: a cache that trees cannot be verified on.
    """
    if input_ids.shape[0] != texts:
        raise UnsupportedOptionError(
            f"a batch of {input_ids.shape[0] // texts} sequences", "one prompt", "Call `generate` once for each prompt."
        )
    if (input_ids if inputs_tensor is None else inputs_tensor).shape[1] == 0:
        raise EmptyPromptError("a prompt of 0 tokens", "at least 1 token", "Pass a prompt, or a BOS token.")
    cache = model_kwargs.get(CACHE_KEY)
    check_cache(cache)
    if texts > 1 and getattr(cache, "_is_user_defined", False):
        raise UnsupportedOptionError(
            f"a cache to be continued by {texts} sequences",
            "`num_return_sequences=1` with a cache",
            "Drop the cache, or call `generate` once for each sequence with a copy of it.",
        )


def check_prefill(cache: Cache, sequences: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Check that the cache holds exactly the text after the prefill: trees would be verified at wrong places otherwise.

    Raises:
        UnsupportedModelError: something put other rows into it, e.g. learned prompt tokens of a PEFT adapter, a chunked
            prefill that fed a continued cache its old text again (transformers before 5.24), or token healing, which
            drops special tokens from the prompt and leaves its mask as it was.
    """
    mask = model_kwargs.get("attention_mask")
    length = mask.shape[1] if mask is not None else getattr(config, "_mask_length", sequences.shape[1])
    if cache.get_seq_length() != length:
        raise UnsupportedModelError(
            f"{cache.get_seq_length()} rows in the cache after the prefill",
            f"{length}, one for each token of the text",
            "Drop prompt-learning adapters, `prefill_chunk_size` together with a continued cache, and `token_healing` "
            "of a prompt with special tokens.",
        )
