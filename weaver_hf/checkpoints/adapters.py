"""Put the adapter of one artifact beside the drafter of another."""

from typing import Any

import torch.nn as nn

from ..errors import CheckpointError
from . import trymirai

__all__ = ["check_finite", "load_adapter"]

# Where an artifact with an adapter must agree with the drafter that the adapter is put beside.
_SAME_DRAFTER = (
    "hidden_size",
    "vocab_size",
    "block_size",
    "mask_token_id",
    "num_hidden_layers",
    "target_layer_ids",
    "num_target_layers",
)

# Settings of `TreeConfig` that are fitted to one adapter.
_FITS = ("adapter_temperature", "adapter_coupling_temperature")


def load_adapter(weaver: Any, name: str, hub: dict[str, Any]) -> None:
    """Give a Weaver with a drafter the adapter of `name`, after checking that it was made for such a drafter.

    Temperatures that were fitted to an adapter come with it, and those of an adapter that it replaces go.

    Args:
        weaver: a `WeaverModel`.
        name: see `WeaverModel.from_pretrained`.
        hub: `token`, `cache_dir`, `local_files_only` and the like.

    Raises:
        CheckpointError: names the two things that disagree.
        OSError: nothing is at `name`.
    """
    path = trymirai.find(name, hub)
    if path is not None:
        hidden_size, config, tensors = trymirai.read(path)
        differing = [("hidden_size", hidden_size, weaver.config.hidden_size)]
        fits: dict[str, Any] = {}
    else:
        other = type(weaver).from_pretrained(name, **hub)
        if not other.has_adapter:
            raise CheckpointError(
                f"a Weaver without an adapter in {name}", "one with an adapter", "Pass the adapter's own source."
            )
        config, tensors = other.adapter.config, other.adapter.state_dict()
        fits = {setting: getattr(other.tree_config, setting) for setting in _FITS}
        differing = [(key, getattr(other.config, key), getattr(weaver.config, key)) for key in _SAME_DRAFTER]
    for key, theirs, ours in differing:
        if None not in (theirs, ours) and theirs != ours:
            raise CheckpointError(
                f"an adapter made for {key} {theirs} in {name}",
                f"{key} {ours}, the drafter's",
                "Load the adapter that was trained on this drafter.",
            )
    weaver.init_adapter(config, tensors)
    for setting, fitted in fits.items():
        setattr(weaver.tree_config, setting, fitted)
    check_finite(weaver.adapter, name)


def check_finite(adapter: nn.Module, name: str) -> None:
    """Raise where weights are NaN or infinite, naming them and their source."""
    broken = [key for key, tensor in adapter.state_dict().items() if not bool(tensor.isfinite().all())]
    if broken:
        raise CheckpointError(
            f"NaN or infinite values in the adapter's {', '.join(broken)} in {name}",
            "finite weights",
            "Take an earlier checkpoint of the training, or download the file again.",
        )
