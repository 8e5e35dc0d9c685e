"""The adapter file of trymirai/weaver (`weaver/qwen36_27b_weaver.pth`), which the authors' SGLang fork loads.

A pickled dict: `config`, the constructor's arguments, and `state_dict`. It holds the adapter alone, for a drafter and a
target that it does not name. The generation is told by the tensors, as in all of their loaders: learned positions come
with `pos_emb` and `fc1`, rotary ones with `gate_up_proj`.
"""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from ..adapter import TopKAdapter
from ..configuration_weaver import AdapterConfig
from ..errors import CheckpointError

__all__ = ["AdapterFile", "find", "generation_of", "read", "write"]

_KIND = "dflash_tfm_weaver"
_COUNTS = {
    "d_rank": "rank",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "mlp_dim": "mlp_dim",
    "K": "max_depth",
    "candidate_pool_size": "pool_size",
}
_WIDTHS = ("d_model", "d_embed")
_CONSTANTS: dict[str, Any] = {"encoder_mode": 3, "score_head": 4, "activation": "swiglu"}  # where present
_ROPE_ONLY = ("activation", "rope_base")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AdapterFile(NamedTuple):
    """What a file holds.

    Attributes:
        hidden_size: of the target and of the drafter that it was made for.
        config: its geometry.
        tensors: under our names, of one dtype.
    """

    hidden_size: int
    config: AdapterConfig
    tensors: dict[str, Tensor]


def find(name: str, hub: dict[str, Any]) -> Path | None:
    """The `.pth` file that `name` means, None for a folder or repository without one.

    Args:
        name: a file, a folder that holds one (itself or in `weaver/`), or a Hub id.
        hub: `token`, `cache_dir`, `local_files_only` and the like.

    Raises:
        OSError: nothing is there.
        CheckpointError: several files are.
    """
    path = Path(name)
    if path.suffix == ".pth":
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}.")
        return path
    if not path.is_dir():
        try:
            path = Path(snapshot_download(name, allow_patterns=["config.json", "*.pth"], **hub))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
            raise OSError(
                f"{name} is neither a local file or folder nor a Hub id that can be reached: {error}"
            ) from error
    files = sorted([*path.glob("*.pth"), *path.glob("weaver/*.pth")])
    if len(files) > 1:
        raise CheckpointError(
            f"{len(files)} adapters in {name}: {', '.join(str(file.relative_to(path)) for file in files)}",
            "one",
            "Pass the file itself.",
        )
    return files[0] if files else None


def read(path: Path) -> AdapterFile:
    """Read a file strictly, without running any code in it.

    Raises:
        CheckpointError: names what is damaged, missing, unknown, or not in agreement.
    """
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"a file {path} that cannot be read as weights ({str(error).splitlines()[0] if str(error) else error!r})",
            "a whole file of tensors and plain containers",
            "Download or copy it again.",
        ) from error
    if not isinstance(payload, dict) or not all(isinstance(payload.get(k), dict) for k in ("config", "state_dict")):
        keys = sorted(map(str, payload)) if isinstance(payload, dict) else type(payload).__name__
        raise CheckpointError(
            f"{keys} in {path}", "dicts `config` and `state_dict`", "Pass the file of a Weaver adapter."
        )
    kind = (payload.get("metadata") or {}).get("speculator_kind", _KIND)
    if kind != _KIND:
        raise CheckpointError(
            f"a speculator of kind {kind!r} in {path}", f"kind {_KIND!r}", "Pass the file of a Weaver adapter."
        )
    tensors = payload["state_dict"]
    odd = sorted(n for n, t in tensors.items() if not isinstance(t, Tensor) or t.dtype not in _DTYPES)
    if odd:
        raise CheckpointError(
            f"entries {odd} in {path} that are no float32, bfloat16 or float16 tensors",
            "plain weights",
            "Pass the original file.",
        )
    generation = generation_of(tensors)
    hidden_size, config = _read_config(payload["config"], generation, path)
    tensors = _fused(tensors, config.num_layers)
    _check_tensors(tensors, hidden_size, config, path)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    return AdapterFile(hidden_size, config, tensors)


def generation_of(names: Iterable[str]) -> str:
    """`"learned"` or `"rope"`, by the tensors' names.

    Raises:
        CheckpointError: the names are of both generations, or of neither.
    """
    names = set(names)
    learned = sorted(n for n in names if n == "pos_emb" or n.startswith(("blocks.0.fc1.", "blocks.0.fc2.")))
    rope = sorted(n for n in names if n.startswith(("blocks.0.gate_up_proj.", "blocks.0.down_proj.")))
    if {"pos_emb", "blocks.0.fc1.weight"} <= names and not rope:
        return "learned"
    if "blocks.0.gate_up_proj.weight" in names and not learned:
        return "rope"
    raise CheckpointError(
        f"tensors {learned} of the generation with learned positions and {rope} of the one with rotary positions",
        "those of one generation",
        "Pass the original file of a Weaver adapter.",
    )


def _read_config(config: dict[str, Any], generation: str, path: Path) -> tuple[int, AdapterConfig]:
    def refuse(found: str, expected: str) -> None:
        raise CheckpointError(f"{found} in the config of {path}", expected, "Pass the original file.")

    needed = (*_WIDTHS, *_COUNTS)
    missing = [key for key in needed if key not in config]
    unknown = sorted(set(config) - {*needed, *_CONSTANTS, "rope_base"})
    if missing or unknown:
        refuse(f"keys missing: {missing}, unknown: {unknown}", f"{list(needed)}, and options of its generation")
    for key in needed:
        if not isinstance(config[key], int) or isinstance(config[key], bool) or config[key] < 1:
            refuse(f"{key} {config[key]!r}", "an integer of at least 1")
    for key in sorted(set(config) & set(_CONSTANTS)):
        if config[key] != _CONSTANTS[key]:
            refuse(f"{key} {config[key]!r}", f"{_CONSTANTS[key]!r}, the only one that exists")
    rotary = [key for key in _ROPE_ONLY if key in config]
    if rotary and generation == "learned":
        refuse(f"{rotary} (generation 'rope')", "no such key beside pos_emb, a tensor of generation 'learned'")
    if config["d_model"] != config["d_embed"]:
        refuse(
            f"d_model {config['d_model']} and d_embed {config['d_embed']}",
            "equal widths: targets whose embeddings have another width than their states are not supported",
        )
    geometry: dict[str, Any] = {ours: config[theirs] for theirs, ours in _COUNTS.items()}
    if "rope_base" in config:
        geometry["rope_base"] = float(config["rope_base"])
    return config["d_model"], AdapterConfig(generation, **geometry)


def _fused(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """With one `qkv_proj` a block: rows of q, then k, then v. A fused one that is there already wins."""
    tensors = dict(tensors)
    for layer in range(layers):
        names = [f"blocks.{layer}.{part}_proj.weight" for part in "qkv"]
        fused = f"blocks.{layer}.qkv_proj.weight"
        if fused not in tensors and all(name in tensors for name in names):
            tensors[fused] = torch.cat([tensors[name] for name in names])
        if fused in tensors:
            for name in names:
                tensors.pop(name, None)
    return tensors


def _check_tensors(tensors: dict[str, Tensor], hidden_size: int, config: AdapterConfig, path: Path) -> None:
    with torch.device("meta"):
        expected = {n: tuple(t.shape) for n, t in TopKAdapter(hidden_size, config).state_dict().items()}
    faults = {
        "missing": sorted(set(expected) - set(tensors)),
        "unknown": sorted(set(tensors) - set(expected)),
        "of another shape": [
            f"{n} {tuple(tensors[n].shape)} for {shape}"
            for n, shape in sorted(expected.items())
            if n in tensors and tuple(tensors[n].shape) != shape
        ],
    }
    if any(faults.values()):
        raise CheckpointError(
            f"tensors {'; '.join(f'{kind}: {names}' for kind, names in faults.items() if names)} in {path}",
            "exactly the tensors that its config declares",
            "Check that weights and config belong together.",
        )


def write(weaver: Any, path: Path) -> None:
    """The adapter of a Weaver as such a file.

    Learned positions are written with separate q, k and v, rotary ones with the fused matrix: the forms that all
    published loaders of each generation take.

    Args:
        weaver: with an adapter.
        path: the file, or a folder in which it is called `weaver.pth`.

    Raises:
        CheckpointError: the Weaver has no adapter.
    """
    if not weaver.has_adapter:
        raise CheckpointError("a Weaver without an adapter", "one with an adapter", "There is nothing to write.")
    path = path if path.suffix == ".pth" else path / "weaver.pth"
    adapter: TopKAdapter = weaver.adapter
    config = adapter.config
    described = dict.fromkeys(_WIDTHS, weaver.config.hidden_size)
    described |= {theirs: getattr(config, ours) for theirs, ours in _COUNTS.items()}
    described |= {"encoder_mode": 3, "score_head": 4}
    if config.generation == "rope":
        described |= {"activation": "swiglu", "rope_base": config.rope_base}
    tensors = {}
    for name, tensor in adapter.state_dict().items():
        if config.generation == "learned" and name.endswith(".qkv_proj.weight"):
            block = name.removesuffix("qkv_proj.weight")
            for part, rows in zip("qkv", tensor.chunk(3)):
                tensors[f"{block}{part}_proj.weight"] = rows
        else:
            tensors[name] = tensor
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {
        name: tensor.detach().cpu().clone() for name, tensor in tensors.items()
    }  # a view would drag its whole along
    torch.save({"config": described, "state_dict": plain, "metadata": {"speculator_kind": _KIND}}, path)
