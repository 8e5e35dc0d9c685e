"""What tree decoding does not support, refused before any work is done."""

from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from .errors import EmptyPromptError, NotAttachedError, SamplingNotSupportedError, UnsupportedOptionError
from .target.attach import attachment_of
from .target.cache import check_cache
from .target.compat import CACHE_KEY

if TYPE_CHECKING:
    from .modeling_weaver import WeaverModel

__all__ = ["check_inputs", "check_options"]

# Other ways to assist a generation, and a lossy one: an option beside `assistant_model=weaver` would be ignored.
_RIVALS = (
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
    "speculation_type",
    "assistant_ensemble_weight",
)


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
        SamplingNotSupportedError: `do_sample=True`.
        UnsupportedOptionError: names the option and what to pass instead.
    """
    attachment = attachment_of(model)
    if attachment is None or not any(other is weaver for other in attachment.weavers):
        raise NotAttachedError(
            "a Weaver that is attached to " + ("another model" if weaver.target is not None else "no model"),
            "a Weaver attached to the model whose `generate` is called",
            "Call `weaver.detach()` and `weaver.attach(model)` first.",
        )
    if config.do_sample:
        raise SamplingNotSupportedError(
            "do_sample=True (passed, or set in the model's generation_config)",
            "greedy decoding: sampling with trees is not implemented yet",
            "Pass `do_sample=False`.",
        )
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise UnsupportedOptionError(
            f"generation mode {mode.value!r} (num_beams={config.num_beams})",
            "greedy decoding of one sequence",
            "Pass `num_beams=1` and drop the options of that mode, or leave out `assistant_model`.",
        )
    for name in _RIVALS:
        if value := getattr(config, name):
            raise UnsupportedOptionError(
                f"{name}={value!r} beside a Weaver", "one kind of assistance", f"Drop `{name}` or `assistant_model`."
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
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise UnsupportedOptionError(
                f"{name}=True", "scores and logits alone as outputs of tree decoding", f"Drop `{name}`."
            )
    if mode_kwargs.get("synced_gpus"):
        raise UnsupportedOptionError(
            "synced_gpus=True (ZeRO-3 or FSDP)", "one process a model", "Pass `synced_gpus=False` or drop the Weaver."
        )


def check_inputs(input_ids: Tensor, inputs_tensor: Tensor | None, model_kwargs: dict[str, Any]) -> None:
    """Check the tensors of a call, before the prefill.

    Raises:
        UnsupportedOptionError: more than one sequence.
        EmptyPromptError: no token to continue from.
        UnsupportedCacheError: a cache that trees cannot be verified on.
    """
    if input_ids.shape[0] != 1:
        raise UnsupportedOptionError(
            f"a batch of {input_ids.shape[0]} sequences", "one sequence", "Call `generate` once for each prompt."
        )
    if (input_ids if inputs_tensor is None else inputs_tensor).shape[1] == 0:
        raise EmptyPromptError("a prompt of 0 tokens", "at least 1 token", "Pass a prompt, or a BOS token.")
    check_cache(model_kwargs.get(CACHE_KEY))
