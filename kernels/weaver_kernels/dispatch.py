"""Which implementation runs: Triton on CUDA devices, plain torch elsewhere. Decided here and nowhere else."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch import Tensor

__all__ = ["forced", "takes", "use_triton"]

logger = logging.getLogger(__name__)

_CHOICES = ("triton", "reference")
_forced: list[str] = []  # the innermost `forced` block last; of the whole process, as the environment is


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Run every operation of this process as `"triton"` or `"reference"` inside the block.

    Raises:
        ValueError: another name.
    """
    _check(name, "forced()")
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def use_triton(x: Tensor) -> bool:
    """Whether an operation on `x` is to run as a Triton kernel.

    The innermost `forced` decides, then the environment variable `WEAVER_KERNELS`, then the device.
    """
    asked = _forced[-1] if _forced else os.environ.get("WEAVER_KERNELS", "")
    if asked:
        _check(asked, "WEAVER_KERNELS")
    chosen = asked or ("triton" if x.is_cuda else "reference")
    _say(f"tree verification runs as {chosen} ({'asked for' if asked else f'tensors on {x.device.type}'})")
    return chosen == "triton"


def takes(unsupported: str | None) -> bool:
    """Whether a kernel takes these inputs; where it does not, plain torch runs and the log says why, once."""
    if unsupported is not None:
        _say(f"plain torch instead of a kernel: {unsupported}")
    return unsupported is None


def _check(name: str, where: str) -> None:
    if name not in _CHOICES:
        raise ValueError(f"Found {name!r} in {where}; expected one of {_CHOICES}.")


@cache
def _say(message: str) -> None:
    """Once a message."""
    logger.info(message)
