"""`WeaverModel`: the artifact that drafts for a target, and its tie to it."""

import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel

from .configuration_weaver import TreeConfig, WeaverConfig
from .errors import CheckpointError, MissingDrafterError, NotAttachedError
from .stats import GenerationStats
from .target.attach import attach, attachment_of, detach, unwrap
from .target.taps import TapSink

__all__ = ["WeaverModel"]


class WeaverModel(PreTrainedModel):
    """Drafts token trees for a target that `generate` then verifies: `generate(..., assistant_model=weaver)`.

    A Weaver without learned parts is complete: its builder `"suffix"` drafts from the text alone.

    Args:
        config: what the artifact declares; `WeaverConfig()` fits any supported target.

    Attributes:
        tree_config: how trees are grown; change it by plain assignment between calls.
        stats: of the last call of `generate`, None before the first.
    """

    config_class = WeaverConfig
    base_model_prefix = "weaver"
    main_input_name = "noise_embeds"
    _supports_sdpa = True

    def __init__(self, config: WeaverConfig) -> None:
        super().__init__(config)
        self.tree_config = TreeConfig(**config.tree_config)
        self.stats: GenerationStats | None = None
        self._target: weakref.ref[PreTrainedModel] | None = None
        self.post_init()

    # ---- the target --------------------------------------------------------------------------------------------------

    @property
    def target(self) -> PreTrainedModel | None:
        """The model this Weaver is attached to. Held weakly, and never a submodule."""
        return None if self._target is None else self._target()

    def attach(self, model: nn.Module) -> "WeaverModel":
        """Make `model.generate(..., assistant_model=self)` decode with this Weaver's trees.

        The classes of the model instance and of its Gated DeltaNet modules are swapped for subclasses of the same
        names; everything else about the model, plain `generate` included, stays as it was. Attaching twice changes
        nothing.

        Args:
            model: a supported target, also inside a PEFT wrapper.

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
            self._check_fits(target)
            attach(target, self, WeaverGenerationMixin)
        self._target = weakref.ref(target)
        head = target.get_output_embeddings().weight
        return self.to(device=head.device, dtype=head.dtype if head.is_floating_point() else target.dtype)

    def detach(self) -> "WeaverModel":
        """Undo `attach`: when the last Weaver leaves a model, its classes are the original ones again."""
        if self.target is not None:
            detach(self.target, self)
        self._target = None
        return self

    def _check_fits(self, target: PreTrainedModel) -> None:
        """Compare what the config declares with the target; None declares nothing."""
        text = target.config.get_text_config()
        for name in ("vocab_size", "hidden_size"):
            declared, actual = getattr(self.config, name), getattr(text, name)
            if declared is not None and declared != actual:
                raise CheckpointError(
                    f"a Weaver made for {name} {declared}",
                    f"{name} {actual}, the target's",
                    "Load the Weaver that belongs to this target"
                    + (
                        f" (this one names {self.config.base_model_name_or_path})."
                        if self.config.base_model_name_or_path
                        else "."
                    ),
                )
        layers = text.num_hidden_layers
        # The last layer's output is seen after the final norm by some libraries and before it by others.
        wrong = [i for i in self.config.target_layer_ids if not 0 <= i < layers - 1]
        if wrong:
            raise CheckpointError(
                f"target_layer_ids {wrong}",
                f"ids from 0 to {layers - 2}: the target has {layers} layers and the last one is never tapped",
                "Load the Weaver that belongs to this target, or correct its config.json.",
            )

    def tap_sink(self) -> TapSink | None:
        """A sink for the taps of the attached target, None where the config names none."""
        target = self.target
        if target is None or not self.config.target_layer_ids:
            return None
        attachment = attachment_of(target)
        assert attachment is not None, "a target is set while attached"
        decoder = attachment.family.decoder_of(target)
        return TapSink(decoder, self.config.target_layer_ids, target.get_output_embeddings().weight.device)

    # ---- the drafter -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block drafter's forward; a Weaver without one raises `MissingDrafterError`."""
        raise MissingDrafterError(
            "a Weaver without a learned drafter",
            "one with a drafter, for `speculation_type='dflash'` or a direct call",
            "Pass it to `generate(..., assistant_model=weaver)` of the attached model instead.",
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are; without any, where the target's head is, or the CPU."""
        if next(self.parameters(), None) is not None:
            return super().device
        return torch.device("cpu") if self.target is None else self.target.get_output_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; without any, of the target, or fp32."""
        if next(self.parameters(), None) is not None:
            return super().dtype
        return torch.float32 if self.target is None else self.target.dtype

    # ---- the artifact ------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write `config.json` (with the current `tree_config`) and `model.safetensors`, in transformers' format."""
        self.config.tree_config = asdict(self.tree_config)
        super().save_pretrained(save_directory, **kwargs)
        if next(self.parameters(), None) is None:
            # transformers writes no file for no tensors; an empty one keeps loading uniform and strict.
            save_file({}, Path(save_directory) / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load an artifact from a local folder or the Hub, strictly.

        Takes transformers' arguments (`revision`, `token`, `cache_dir`, `local_files_only`, ...).

        Raises:
            CheckpointError: the folder is not a Weaver's, a file is damaged, or tensors are missing, unknown or of
                another shape; the message names them.
        """
        name = str(pretrained_model_name_or_path)
        wants_info = kwargs.pop("output_loading_info", False)
        if kwargs.get("config") is None:
            hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
            config = AutoConfig.from_pretrained(name, **{k: kwargs[k] for k in hub if k in kwargs})
            if not isinstance(config, WeaverConfig):
                raise CheckpointError(
                    f"a config of model_type {config.model_type!r} in {name}",
                    "model_type 'weaver'",
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
        faults = {
            "missing": sorted(info["missing_keys"]),
            "unknown": sorted(info["unexpected_keys"]),
            "of another shape": sorted(str(key) for key in info["mismatched_keys"]),
        }
        if any(faults.values()):
            raise CheckpointError(
                f"tensors {'; '.join(f'{kind}: {keys}' for kind, keys in faults.items() if keys)} in {name}",
                "exactly the tensors that config.json declares",
                "Check that weights and config.json come from the same artifact.",
            )
        return (model, info) if wants_info else model

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and deep copies: the copy is not attached."""
        return {**self.__dict__, "_target": None}
