"""The targets that a Weaver can be attached to, as a table."""

from dataclasses import dataclass

import torch.nn as nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True)
class Family:
    """How to find the parts of one kind of model.

    Attributes:
        model_class: name of the transformers class with the language-modelling head.
        mixer_class: name of its Gated DeltaNet module class.
        attention_class: name of its full-attention module class.
        decoder: attribute path from the model to the module that holds `layers` and the final `norm`.
    """

    model_class: str
    mixer_class: str
    attention_class: str
    decoder: str

    def decoder_of(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule(self.decoder)

    def mixers_of(self, model: PreTrainedModel) -> list[nn.Module]:
        """The Gated DeltaNet modules, also where a subclass (or a class swapped in) took their place."""
        return _modules_of(model, self.mixer_class)

    def attentions_of(self, model: PreTrainedModel) -> list[nn.Module]:
        """The full-attention modules, likewise."""
        return _modules_of(model, self.attention_class)


def _modules_of(model: PreTrainedModel, name: str) -> list[nn.Module]:
    return [m for m in model.modules() if any(c.__name__ == name for c in type(m).__mro__)]


#: `config.model_type` -> family.
FAMILIES = {
    "qwen3_5_text": Family(
        model_class="Qwen3_5ForCausalLM",
        mixer_class="Qwen3_5GatedDeltaNet",
        attention_class="Qwen3_5Attention",
        decoder="model",
    ),
    "qwen3_5_moe_text": Family(
        model_class="Qwen3_5MoeForCausalLM",
        mixer_class="Qwen3_5MoeGatedDeltaNet",
        attention_class="Qwen3_5MoeAttention",
        decoder="model",
    ),
}


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model.

    Raises:
        UnsupportedModelError: names the model's type and those that are supported.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None or not any(c.__name__ == family.model_class for c in type(model).__mro__):
        raise UnsupportedModelError(
            f"a {type(model).__name__} of model_type {model.config.model_type!r}",
            " or ".join(f"a {f.model_class} of model_type {name!r}" for name, f in FAMILIES.items()),
            "Load the target with `AutoModelForCausalLM`; other families are not supported yet.",
        )
    kinds = set(model.config.layer_types)
    if kinds != {"linear_attention", "full_attention"}:
        raise UnsupportedModelError(
            f"layers of kinds {sorted(kinds)}",
            "both linear_attention and full_attention layers",
            "Use a hybrid target.",
        )
    activations = {str(m.activation) for m in family.mixers_of(model)}
    if activations != {"silu"}:
        raise UnsupportedModelError(
            f"Gated DeltaNet layers with hidden_act {sorted(activations)}",
            "silu",
            "Use a target with SiLU convolutions.",
        )
    return family
