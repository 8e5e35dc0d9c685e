"""What changed between transformers 5.17 and 5.24, chosen by version. Nothing else in weaver_hf asks for a version."""

from typing import Any

import transformers
from packaging.version import Version
from transformers.cache_utils import Cache

__all__ = ["CACHE_KEY", "MINIMUM_TRANSFORMERS", "TRANSFORMERS", "cache_argument", "check_version"]

TRANSFORMERS = Version(transformers.__version__)
MINIMUM_TRANSFORMERS = Version("5.17.0")

# 5.24 renamed `past_key_values` (models, outputs, generate) and `cache_params` (mixers) to `cache`.
_RENAMED = Version(TRANSFORMERS.base_version) >= Version("5.24.0")

#: Name of the cache in `generate`'s model kwargs, in model forwards and in outputs.
CACHE_KEY = "cache" if _RENAMED else "past_key_values"

_MIXER_CACHE_KEY = "cache" if _RENAMED else "cache_params"


def cache_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    """The cache among the arguments of a mixer's forward after `hidden_states`, given by position or by either name."""
    for name in (_MIXER_CACHE_KEY, "cache_params", "cache"):
        if kwargs.get(name) is not None:
            return kwargs[name]
    return args[0] if args else None


def check_version() -> None:
    """Raise where the installed transformers is older than what the class swap was written for."""
    if Version(TRANSFORMERS.base_version) < MINIMUM_TRANSFORMERS:
        raise ImportError(
            f"weaver_hf needs transformers {MINIMUM_TRANSFORMERS} or newer, found {transformers.__version__}. "
            f"Run `pip install -U 'transformers>={MINIMUM_TRANSFORMERS}'`."
        )
