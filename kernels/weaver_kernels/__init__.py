"""Tree verification of Gated DeltaNet hybrids: the plain torch contract (`reference`), its Triton kernels, and `ops`,
which runs the one or the other.

Imports torch and triton alone and knows nothing of `weaver_hf`.
"""

from . import dispatch, ops, reference

__all__ = ["dispatch", "ops", "reference"]
