"""Lossless tree decoding for Hugging Face transformers, behind `model.generate(..., assistant_model=weaver)`."""

from transformers import AutoConfig, AutoModel

from ._version import __version__
from .configuration_weaver import TreeConfig, WeaverConfig
from .modeling_weaver import WeaverModel
from .stats import GenerationStats
from .tiny import load_tiny
from .tree import TokenTree

__all__ = ["GenerationStats", "TokenTree", "TreeConfig", "WeaverConfig", "WeaverModel", "__version__", "load_tiny"]

AutoConfig.register("weaver", WeaverConfig)
AutoModel.register(WeaverConfig, WeaverModel)
