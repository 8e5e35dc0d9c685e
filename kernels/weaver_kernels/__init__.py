"""Tree verification of Gated DeltaNet hybrids: the plain torch contract (`reference`), later its kernels.

Imports torch alone and knows nothing of `weaver_hf`.
"""

from . import reference

__all__ = ["reference"]
