"""Readers and writers of other people's formats, one file each: drafters, and (`trymirai`) the adapter beside one.

A drafter's reader turns the format's `config.json` into a `WeaverConfig` and says how its tensors are named here; a
writer makes a folder that its own tools load. Tensors are never changed, so going there and back is bit-identical.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configuration_weaver import WeaverConfig
from . import speculators, zlab

__all__ = ["FORMATS", "Format", "format_of"]


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: as users call it.
        recognizes: whether a `config.json` is of this format. Never by `model_type`, which says qwen3 in z-lab's.
        read_config: from its `config.json`; raises `CheckpointError` on what is not supported.
        key_mapping: regular expressions from its tensor names to ours.
        ignored: regular expressions of tensors that are copies of the target's.
        write: an artifact into a folder.
    """

    name: str
    recognizes: Callable[[dict[str, Any]], bool]
    read_config: Callable[[dict[str, Any]], WeaverConfig]
    key_mapping: dict[str, str]
    ignored: list[str]
    write: Callable[[Any, Path], None]


FORMATS = [
    Format("z-lab", zlab.recognizes, zlab.read_config, zlab.KEY_MAPPING, [], zlab.write),
    Format(
        "speculators",
        speculators.recognizes,
        speculators.read_config,
        zlab.KEY_MAPPING,
        speculators.IGNORED,
        speculators.write,
    ),
]


def format_of(config: dict[str, Any]) -> Format | None:
    """The format whose `config.json` this is, None for our own or an unknown one."""
    return next((format_ for format_ in FORMATS if format_.recognizes(config)), None)
