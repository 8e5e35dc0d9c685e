"""Doors without attach: `generate(..., custom_generate=...)` decodes with a Weaver on a model that carries none.

Two of them: the folder or Hub repository that `weaver.save_pretrained(..., custom_generate=True)` wrote, and the
callable `weaver.custom_generate`. Both attach for the call alone: the model is the stock one again afterwards.
"""

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList

from ._version import __version__
from .errors import CheckpointError, UnsupportedOptionError
from .options import check_options
from .target.attach import unwrap

if TYPE_CHECKING:
    from .modeling_weaver import WeaverModel

__all__ = ["decode", "generate", "write_door"]

_GENERATE_PY = '''"""Tree decoding with the Weaver of this repository: the same tokens in fewer passes of the model.

    model.generate(**inputs, custom_generate="<this repository or folder>", trust_remote_code=True)

Needs the weaver-hf package (requirements.txt); the model needs no preparation and is not changed.
"""

from weaver_hf.custom_generate import generate  # noqa: F401 - transformers calls it by this name
'''

# Arguments that say how a repository is downloaded; `generate` hands them on with its own.
_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")

_GENERATE_CODE = inspect.unwrap(GenerationMixin.generate).__code__
_registering, _loading = threading.Lock(), threading.Lock()
_turns: "weakref.WeakKeyDictionary[WeaverModel, Any]" = weakref.WeakKeyDictionary()
_loaded: "weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, WeaverModel]]]" = weakref.WeakKeyDictionary()


def write_door(folder: str | Path) -> None:
    """Add `custom_generate/generate.py` and its requirements to the folder of a saved Weaver."""
    door = Path(folder) / "custom_generate"
    door.mkdir(parents=True, exist_ok=True)
    (door / "generate.py").write_text(_GENERATE_PY, encoding="utf-8")
    (door / "requirements.txt").write_text(f"weaver-hf>={__version__}\n", encoding="utf-8")


def generate(model: Any, assistant_model: Any = None, **options: Any) -> Any:
    """What `model.generate(..., custom_generate=folder_or_id, trust_remote_code=True)` runs.

    The Weaver is loaded at the first call and kept as long as the model lives; a local folder that has changed since is
    loaded again. Every option goes on to `generate`, so what `assistant_model=weaver` supports and refuses holds here.

    Args:
        model: a supported target.
        assistant_model: must be None.
        options: the arguments of `generate`; those that say how a repository is downloaded (`revision`, `token`,
            `cache_dir`, ...) go to `WeaverModel.from_pretrained`.

    Returns:
        What `generate` returns.

    Raises:
        UnsupportedOptionError: an `assistant_model` beside it, or an option that tree decoding does not support.
        CheckpointError: the repository holds no Weaver, or not this target's.
        UnsupportedModelError: the model's family is not supported.
    """
    _refuse_assistant(assistant_model)
    source = _arguments_of_generate().get("custom_generate")
    if not isinstance(source, str):
        raise CheckpointError(
            "a call that names no repository",
            "`generate(..., custom_generate=folder_or_id, trust_remote_code=True)` of the model to decode with",
            "Load the model without `trust_remote_code`, and name the Weaver's repository in each call of `generate`.",
        )
    weaver = _load(model, source, {name: options.pop(name) for name in _HUB_OPTIONS if name in options})
    with _attached(weaver, model):
        # The class's: a model loaded with `trust_remote_code` may have a `generate` of its own that leads back here.
        return type(model).generate(model, assistant_model=weaver, **options)


def decode(
    weaver: "WeaverModel",
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode a model that carries no Weaver: `model.generate(..., custom_generate=weaver.custom_generate)`.

    A method of `WeaverModel`, which `generate` calls as its decoding method with what it has prepared. What
    `generate(..., assistant_model=weaver)` supports and refuses holds here too, with one exception of transformers'
    making: it keeps `tokenizer` from callables, so that `stop_strings` and `token_healing` raise its own error.

    Returns:
        The sequences, or a `ModelOutput` with `stats` under `return_dict_in_generate=True`.

    Raises:
        UnsupportedOptionError: an option that tree decoding does not support.
        UnsupportedModelError: the model's family is not supported.
        NotAttachedError: the Weaver is attached to another model.
    """
    # transformers drops these where `custom_generate` is a callable. A dropped streamer would leave its reader waiting.
    passed = _arguments_of_generate()
    _refuse_assistant(passed.get("assistant_model"))
    dropped = model._extract_generation_mode_kwargs(None, {}, passed.get("synced_gpus"), None, passed.get("streamer"))
    with _attached(weaver, model):
        mode = generation_config.get_generation_mode(weaver)
        check_options(model, weaver, mode, generation_config, dropped)
        return model._assisted_decoding(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            inputs_tensor=inputs_tensor,
            assistant_model=weaver,
            **dropped,
            **model_kwargs,
        )


@contextmanager
def _attached(weaver: "WeaverModel", model: Any) -> Iterator[None]:
    """Attach for the block, unless it is attached already. Calls with one Weaver take turns, a call inside one runs."""
    with _registering:
        turn = _turns.setdefault(weaver, threading.RLock())
    with turn:
        is_guest = weaver.target is not unwrap(model)
        if is_guest:
            weaver.attach(model)
        try:
            yield
        finally:
            if is_guest:
                weaver.detach()


def _load(model: Any, source: str, hub_options: dict[str, Any]) -> "WeaverModel":
    """The Weaver of a folder or repository for this model, from memory where its files are the same."""
    from .modeling_weaver import WeaverModel  # it names this module's callable, so it cannot be imported above

    with _loading:
        mine = _loaded.setdefault(model, {})
        key = (source, hub_options.get("revision"))
        files = sorted(path for path in Path(source).glob("*") if path.is_file()) if Path(source).is_dir() else []
        version = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files]
        if key not in mine or mine[key][0] != version:
            mine[key] = (version, WeaverModel.from_pretrained(source, **hub_options))
        return mine[key][1]


def _refuse_assistant(assistant_model: Any) -> None:
    if assistant_model is not None:
        raise UnsupportedOptionError(
            f"an assistant_model ({type(assistant_model).__name__}) beside the Weaver of custom_generate",
            "one kind of assistance",
            "Drop `assistant_model` or `custom_generate`.",
        )


def _arguments_of_generate() -> dict[str, Any]:
    """The arguments of the `generate` that is calling us, empty where none is.

    Read from its frame, because transformers keeps two things to itself: the name of the repository it loaded
    `generate.py` from (the file runs from a copy), and the arguments that it drops for a callable.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _GENERATE_CODE:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals
