"""Attach: swap the classes of one model instance and of its mixers, reversibly.

A class swap, because bound-method patches are lost when transformers kernelizes a model or accelerate hooks it, and
global patches reach models that nobody attached. The subclasses carry the names of their originals and pickle as them.
"""

import copyreg
import functools
import inspect
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedModel

from ..errors import NotAttachedError, UnsupportedModelError
from .attention import TreeAttention
from .compat import check_version
from .families import Family, family_of
from .fused import FusedLayer, unfuse_projections
from .gated_delta import TreeMixer

__all__ = ["Attachment", "attach", "attachment_of", "detach", "head_device", "unwrap"]

_ATTACHMENT = "_weaver_attachment"


@dataclass
class Attachment:
    """What a target carries while Weavers are attached to it.

    Attributes:
        family: how to find its parts.
        weavers: the attached Weavers; the last one to leave puts the classes back.
        turn: held during a call of `generate` with a Weaver: concurrent calls on one model take turns.
        decoding: such a call runs.
        steps: captured ones, kept between calls (`graph.py`); they go with the attachment.
        asked: new tokens that a capture is wanted for, whatever a call writes (`WeaverModel.warmup`).
    """

    family: Family
    weavers: list[nn.Module] = field(default_factory=list)
    turn: Any = field(default_factory=threading.RLock)
    decoding: bool = False
    steps: dict[Any, Any] = field(default_factory=dict)
    asked: int | None = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark the block as decoding; a call inside a call (from a processor) leaves the mark of the outer one."""
        before, self.decoding = self.decoding, True
        try:
            yield
        finally:
            self.decoding = before


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, or the model itself.

    Raises:
        UnsupportedModelError: not a transformers model, or wrapped for prompt learning.
    """
    peft = sys.modules.get("peft")  # a model cannot be a PeftModel before peft is imported
    if peft is not None and isinstance(model, peft.PeftModel):
        for name, config in model.peft_config.items():
            if config.is_prompt_learning:
                raise UnsupportedModelError(
                    f"PEFT adapter {name!r} of type {config.peft_type}, which learns a prompt",
                    "an adapter that changes weights (LoRA and its relatives), or none",
                    "Attach to the base model, or train a LoRA adapter instead.",
                )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"a {type(model).__name__}", "a transformers model", "Pass what `from_pretrained` returned."
        )
    return model


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of a model, None where no Weaver is attached."""
    return model.__dict__.get(_ATTACHMENT)


def attach(model: PreTrainedModel, weaver: nn.Module, generation_mixin: type) -> None:
    """Swap the classes of the model and of its mixers, unless they are swapped already; count the Weaver.

    Args:
        model: an unwrapped target.
        weaver: who attaches.
        generation_mixin: the class whose `generate` hooks the model gets.

    Raises:
        UnsupportedModelError: the family is not in the table.
    """
    check_version()
    attachment = attachment_of(model)
    if attachment is None:
        attachment = Attachment(family_of(model))
        family = attachment.family
        model.__dict__[_ATTACHMENT] = attachment
        swaps: Any = (
            (family.mixers_of(model), TreeMixer),
            (family.attentions_of(model), TreeAttention),
            (family.decoder_of(model).layers, FusedLayer),
        )
        for modules, mixin in swaps:
            for module in modules:
                original: Any = type(module)
                _swap(module, _subclass(original, mixin))
        _swap(model, _subclass(model.__class__, generation_mixin))
    if not any(other is weaver for other in attachment.weavers):
        attachment.weavers.append(weaver)


def detach(model: PreTrainedModel, weaver: nn.Module) -> None:
    """Take one Weaver off; the last one puts the original classes back. Waits for a call that runs in another thread.

    Raises:
        NotAttachedError: called from inside a running `generate` (a streamer, a processor).
    """
    attachment = attachment_of(model)
    if attachment is None:
        return
    with attachment.turn:
        if attachment.decoding:
            raise NotAttachedError(
                "a call of detach() from inside a running generate()",
                "a model that is not decoding",
                "Let generate() end first; to stop it, raise an exception or use a stopping criterion.",
            )
        attachment.weavers = [other for other in attachment.weavers if other is not weaver]
        attachment.steps = {key: step for key, step in attachment.steps.items() if key[1] != id(weaver)}
        if attachment.weavers:
            return
        unfuse_projections(model)
        for module in model.modules():
            stood_in_for = type(module).__dict__.get("_weaver_original")
            if stood_in_for is not None:
                _swap(module, stood_in_for)
        del model.__dict__[_ATTACHMENT]


def head_device(model: PreTrainedModel) -> torch.device:
    """Where the language-modelling head computes: where its weight is, or where accelerate brings an offloaded one."""
    head = model.get_output_embeddings()
    if head.weight.device.type == "meta":
        return torch.device(head._hf_hook.execution_device)
    return head.weight.device


@functools.cache
def _subclass(original: Any, mixin: Any) -> type:
    """The subclass that stands in for `original`; one for each class, so that two models share it."""
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": _reduce_as_original,
        "_weaver_original": original,
    }
    return type(original.__name__, (mixin, original), namespace)


def _reduce_as_original(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle and deep-copy as the original class, without the attachment and without a need for this package.

    `_reconstructor` makes the object: `__newobj__`, the usual one, insists on the class that the instance has now.
    """
    swapped: Any = type(self)
    reduced: Any = super(swapped, self).__reduce_ex__(protocol)
    state = {name: value for name, value in reduced[2].items() if name != _ATTACHMENT}
    return (copyreg._reconstructor, (swapped._weaver_original, object, None), state)  # type: ignore[attr-defined]


def _swap(module: nn.Module, cls: type) -> None:
    """Change the module's class, and rebind the forwards that accelerate keeps on the instance.

    `add_hook_to_module` saves the bound forward as `_old_forward` and `remove_hook_from_module` leaves it behind as
    `forward`. A forward that is neither class's own (a kernel) is left alone; the verification notices it.
    """
    before = type(module)
    module.__class__ = cls
    own = [c.__dict__["forward"] for c in (*before.__mro__, *cls.__mro__) if "forward" in c.__dict__]
    for name in ("forward", "_old_forward"):
        bound = module.__dict__.get(name)
        if inspect.ismethod(bound) and any(bound.__func__ is forward for forward in own):
            module.__dict__[name] = types.MethodType(cls.forward, module)  # type: ignore[attr-defined]
