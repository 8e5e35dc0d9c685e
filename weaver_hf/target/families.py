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
        decoder: attribute path from the model to the module that holds `layers` and the final `norm`.
    """

    model_class: str
    mixer_class: str
    decoder: str

    def decoder_of(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule(self.decoder)

    def mixers_of(self, model: PreTrainedModel) -> list[nn.Module]:
        """The Gated DeltaNet modules, also where a subclass (or a class swapped in) took their place."""
        return [m for m in model.modules() if any(c.__name__ == self.mixer_class for c in type(m).__mro__)]


#: `config.model_type` -> family. Qwen3.5 text models, which are also what Qwen3.6's dense checkpoints load as.
FAMILIES = {
    "qwen3_5_text": Family(model_class="Qwen3_5ForCausalLM", mixer_class="Qwen3_5GatedDeltaNet", decoder="model"),
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
    return family
