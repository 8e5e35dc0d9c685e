"""A Weaver as a PEFT adapter over a drafter: LoRA on the drafter, Weaver's adapter in `modules_to_save`, or both.

A PEFT folder is PEFT's own (`adapter_config.json`, `adapter_model.safetensors`), so `PeftModel.from_pretrained` and
`AutoPeftModel` (`import_allowlist=["weaver_hf"]`) load it; `WeaverModel.from_pretrained` does too. The tree settings of
the adapter stand in its `auto_mapping`, the one field of `adapter_config.json` that takes what PEFT does not know.

PEFT drops tensors that the base has no place for without a word. A Weaver looks at what is loaded into it, whoever
loads it, and refuses.
"""

import json
import warnings
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.nn as nn
from safetensors.torch import save_file
from transformers.utils import find_adapter_config_file

from .configuration_weaver import AdapterConfig, TreeConfig, WeaverConfig
from .errors import CheckpointError

if TYPE_CHECKING:
    from peft import PeftConfig

    from .modeling_weaver import WeaverModel

__all__ = [
    "ADAPTER_TARGETS",
    "DRAFTER_TARGETS",
    "PeftWeaver",
    "add_adapter_part",
    "add_lora",
    "load_folder",
    "weaver_in",
]

#: The linear layers that LoRA changes by default, of the drafter and of Weaver's adapter, as PEFT matches them.
DRAFTER_TARGETS = r"drafter\.(fc|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))"
ADAPTER_TARGETS = r"adapter\.blocks\.\d+\.(qkv_proj|o_proj|gate_up_proj|down_proj|fc1|fc2)"

_NO_LORA = "dummy-target-modules"  # PEFT's own word for a LoRA config that targets no module
_PREFIX = "base_model.model."  # of tensors in PEFT's files


class PeftWeaver:
    """What a `WeaverModel` does with PEFT adapters inside it, however they came there; mixed in before its base."""

    adapter: Any
    config: Any
    _trees: dict[str | None, TreeConfig]

    def _watch_peft(self: Any) -> None:
        self.register_load_state_dict_post_hook(_refuse_partial_load)

    @property
    def peft_adapter(self: Any) -> str | None:
        """Name of the PEFT adapter in use; None where there is none, or where adapters are disabled."""
        if not self.__dict__.get("peft_config"):
            return None
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        for module in self.modules():
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                if module.disable_adapters:
                    return None
                if module.active_adapters:
                    return module.active_adapters[0]
        return None

    @property
    def tree_config(self) -> TreeConfig:
        """How trees are grown; change it by plain assignment between calls. Every PEFT adapter has its own."""
        name = self.peft_adapter
        if name not in self._trees:
            self._trees[name] = self._tree_of(name)
        return self._trees[name]

    @tree_config.setter
    def tree_config(self, settings: TreeConfig) -> None:
        self._trees[self.peft_adapter] = settings

    def _tree_of(self: Any, name: str | None) -> TreeConfig:
        """The tree settings that a PEFT adapter came with, or the base's, with the builder that an adapter asks for."""
        recorded = (self.peft_config[name].auto_mapping or {}).get("tree_config")
        if recorded is not None:
            return TreeConfig(**WeaverConfig(tree_config=recorded).tree_config)
        settings = replace(self._trees[None])
        if self._brings_adapter(name) and not self.config.adapter_initialized:
            settings.builder, settings.adapter_temperature, settings.adapter_coupling_temperature = "weaver", {}, {}
        return settings

    def _brings_adapter(self, name: str | None) -> bool:
        """Whether a PEFT adapter holds its own copy of Weaver's adapter."""
        return name in getattr(self.adapter, "modules_to_save", ())

    @property
    def has_adapter(self) -> bool:
        """Whether there is an adapter with weights; not one that is only declared."""
        return self.adapter is not None and (self.config.adapter_initialized or self._brings_adapter(self.peft_adapter))

    def declare_adapter(self: Any, config: AdapterConfig) -> "WeaverModel":
        """Say which adapter can be put beside the drafter, so that PEFT finds the module for its weights.

        Raises:
            CheckpointError: it does not fit the drafter, or there is an adapter with weights already.
        """
        if self.has_adapter:
            raise CheckpointError(
                "a Weaver that has an adapter", "one without", "Load the drafter without its adapter."
            )
        before = self.tree_config
        self.tree_config = replace(before)  # `init_adapter` makes "weaver" the builder, which needs weights
        self.init_adapter(config)
        self.tree_config, self.config.adapter_initialized = before, False
        return self

    # ---- transformers' methods for adapters; 5.24's own ask for a newer PEFT than 5.17's -----------------------------

    def load_adapter(
        self: Any, peft_model_id: str | Path, adapter_name: str = "default", is_trainable: bool = False, **hub: Any
    ) -> None:
        """Put the PEFT adapter of a folder or Hub repository beside those that are there, and use it.

        Args:
            peft_model_id: the folder or Hub id.
            adapter_name: the name for `set_adapter`.
            is_trainable: leave its weights trainable.
            hub: `token`, `revision`, `cache_dir`, `local_files_only`, `subfolder` and the like.

        Raises:
            CheckpointError: the name is taken, or the folder and this drafter do not go together: names the tensors.
        """
        from peft import PeftConfig, inject_adapter_in_model
        from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

        if adapter_name in (self.__dict__.get("peft_config") or {}):
            raise CheckpointError(
                f"a second PEFT adapter named {adapter_name!r}", "a name of its own", "Pass another `adapter_name`."
            )
        source = str(peft_model_id)
        config = PeftConfig.from_pretrained(source, **hub)
        config.inference_mode = not is_trainable
        names = [name for name, _ in self.named_modules()]
        homeless = [
            wanted
            for wanted in config.modules_to_save or ()
            if not any(name == wanted or name.endswith(f".{wanted}") for name in names)
        ]
        if homeless:
            raise CheckpointError(
                f"a PEFT folder {source} with its own module {', '.join(map(repr, homeless))}",
                f"modules that the drafter {self.name_or_path or 'it is loaded over'} has or declares",
                "Load it over the drafter that it was trained on, or declare the module first: "
                "`weaver.declare_adapter(AdapterConfig(...))`.",
            )
        weights = load_peft_weights(source, device="cpu", **hub)
        found = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
        with warnings.catch_warnings():  # several adapters are what was asked for
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            inject_adapter_in_model(config, self, adapter_name)
        self._hf_peft_config_loaded = True
        try:
            expected = get_peft_model_state_dict(self, adapter_name=adapter_name, save_embedding_layers=False)
            _compare(
                sorted(set(expected) - set(found)),
                sorted(set(found) - set(expected)),
                sorted(n for n in set(found) & set(expected) if found[n].shape != expected[n].shape),
                source,
            )
            set_peft_model_state_dict(self, found, adapter_name=adapter_name)
        except CheckpointError:
            self.delete_adapter(adapter_name)
            raise
        self.set_adapter(adapter_name)
        self.to(self.device).train(self.training)

    def set_adapter(self: Any, adapter_name: str) -> None:
        """Use the PEFT adapter of this name, with its tree settings.

        Raises:
            CheckpointError: there is none of this name.
        """
        from peft.functional import set_adapter

        loaded = self.__dict__.get("peft_config") or {}
        if adapter_name not in loaded:
            raise CheckpointError(
                f"no PEFT adapter named {adapter_name!r}",
                f"one of {sorted(loaded)}",
                "Load it first: `weaver.load_adapter(folder, adapter_name=...)`.",
            )
        set_adapter(self, adapter_name, inference_mode=loaded[adapter_name].inference_mode)

    def delete_adapter(self: Any, adapter_names: str | list[str]) -> None:
        """Take PEFT adapters out again."""
        from peft.functional import delete_adapter

        for name in [adapter_names] if isinstance(adapter_names, str) else adapter_names:
            prefix = f"{self.peft_config[name].peft_type.value.lower()}_"
            delete_adapter(self, adapter_name=name, prefix=prefix)
            del self.peft_config[name]
            self._trees.pop(name, None)
        if not self.peft_config:
            del self.peft_config
            self._hf_peft_config_loaded = False

    def merge_adapter(self: Any) -> "WeaverModel":
        """Write the PEFT adapter in use into the weights and drop PEFT; what is saved then is a plain artifact."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        name = self.peft_adapter
        if name is None:
            return self
        settings, brought = self.tree_config, self._brings_adapter(name)
        for path, module in list(self.named_modules()):
            parent, _, last = path.rpartition(".")
            if isinstance(module, BaseTunerLayer):
                module.merge(safe_merge=True, adapter_names=[name])
                setattr(self.get_submodule(parent), last, module.get_base_layer())
            elif isinstance(module, AuxiliaryTrainingWrapper):
                plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=[name])
                setattr(self.get_submodule(parent), last, plain)
        del self.peft_config
        self._hf_peft_config_loaded = False
        self._trees = {None: settings}
        self.config.adapter_initialized |= brought
        return self

    def _save_peft(self: Any, folder: str | Path) -> None:
        """Write the PEFT adapter in use as PEFT does, with its tree settings."""
        from peft.utils import get_peft_model_state_dict

        name = self.peft_adapter
        if name is None:
            raise CheckpointError(
                "PEFT adapters that are disabled", "one in use, which is what is saved", "Call `enable_adapters()`."
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Not "auto": it would ask the Hub whether the base has embeddings, which no drafter has.
        tensors = get_peft_model_state_dict(self, adapter_name=name, save_embedding_layers=False)
        plain = {_PREFIX + key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy(self.peft_config[name])
        config.inference_mode = True
        config.base_model_name_or_path = config.base_model_name_or_path or self.name_or_path or None
        config.auto_mapping = {
            "base_model_class": "WeaverModel",
            "parent_library": "weaver_hf",
            "tree_config": asdict(self.tree_config),
        }
        config.save_pretrained(folder)


def _compare(missing: list[str], unknown: list[str], reshaped: list[str], source: str) -> None:
    """Raise where the tensors of a PEFT folder and those of the adapter in the Weaver are not the same."""
    faults = {"missing": missing, "unknown": unknown, "of another shape": reshaped}
    if any(faults.values()):
        raise CheckpointError(
            f"tensors {'; '.join(f'{kind}: {names}' for kind, names in faults.items() if names)} in {source}",
            "exactly those that its adapter_config.json makes of this drafter",
            "Load it over the drafter that it was trained on, with the adapter's shape declared in the config.json.",
        )


def _refuse_partial_load(weaver: nn.Module, loaded: Any) -> None:
    """Called by torch when a state dict has been put into a Weaver, by itself or inside PEFT's wrappers."""
    if not weaver.__dict__.get("peft_config"):
        return
    missing: list[str] = []
    for name in weaver.peft_config:  # type: ignore[union-attr]
        own = [key for key, _ in weaver.named_parameters() if f".{name}." in key]
        lost = [key for key in loaded.missing_keys if f".{name}." in key]
        missing += lost if len(lost) < len(own) else []  # all of them: another adapter's weights came
    _compare(sorted(missing), sorted(loaded.unexpected_keys), [], "the PEFT folder that was loaded")


def load_folder(cls: Any, name: str, base: str | None, kwargs: dict[str, Any]) -> "WeaverModel | None":
    """The Weaver of a PEFT folder or repository over its base; None where `name` is no such folder.

    Args:
        cls: `WeaverModel`.
        name: the folder or Hub id.
        base: of the drafter, where the caller has found it out already.
        kwargs: of `from_pretrained`.

    Raises:
        CheckpointError: it names no base, or does not fit it.
    """
    where = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    hub = {key: kwargs[key] for key in where if kwargs.get(key) is not None}
    described = find_adapter_config_file(name, **hub)
    if described is None:
        return None
    recorded = json.loads(Path(described).read_text(encoding="utf-8"))
    base = base or recorded.get("base_model_name_or_path")
    if base is None:
        raise CheckpointError(
            f"a PEFT folder {name} that names no base",
            "`base_model_name_or_path` in its adapter_config.json",
            "Load the drafter, then call `weaver.load_adapter(folder)`.",
        )
    if kwargs.get("adapter") is not None and "adapter" in (recorded.get("modules_to_save") or ()):
        raise CheckpointError(
            f"adapter={str(kwargs['adapter'])!r} beside {name}, which brings its own adapter",
            "one adapter",
            "Leave `adapter` out.",
        )
    adapter_name = kwargs.pop("adapter_name", "default")
    options = {key: value for key, value in kwargs.items() if key not in ("revision", "subfolder")}
    weaver = cls.from_pretrained(base, revision=recorded.get("revision") or "main", **options)
    weaver.load_adapter(name, adapter_name, **hub)
    return weaver


def weaver_in(assistant: Any) -> Any:
    """The Weaver inside a PEFT wrapper; anything else as it is."""
    peft_model = getattr(assistant, "get_base_model", None)
    inner = peft_model() if peft_model is not None and not isinstance(assistant, PeftWeaver) else assistant
    return inner if isinstance(inner, PeftWeaver) else assistant


# ---- for training ----------------------------------------------------------------------------------------------------


def add_lora(weaver: "WeaverModel", targets: str, rank: int, alpha: float) -> "PeftConfig":
    """LoRA on the linear layers `targets` of a Weaver: new weights that change nothing yet, the only trainable ones."""
    from peft import LoraConfig

    return _add(weaver, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))


def add_adapter_part(weaver: "WeaverModel") -> None:
    """Make Weaver's adapter a module of the PEFT adapter in use, or of a new one: trained whole, saved in its folder.

    Args:
        weaver: with an adapter, declared or with weights.
    """
    from peft import LoraConfig
    from peft.utils.other import set_additional_trainable_modules

    name = weaver.peft_adapter
    if name is None:
        _add(weaver, LoraConfig(target_modules=_NO_LORA, modules_to_save=["adapter"]))
    elif not weaver._brings_adapter(name):
        settings, config = weaver.tree_config, weaver.peft_config[name]
        config.modules_to_save, config.inference_mode = ["adapter"], False
        set_additional_trainable_modules(weaver, config, weaver.config, name)
        cast(Any, weaver.adapter).modules_to_save[name].requires_grad_(True)
        settings.builder, settings.adapter_temperature, settings.adapter_coupling_temperature = "weaver", {}, {}


def _add(weaver: Any, config: Any) -> Any:
    from peft import inject_adapter_in_model

    # Of a base from the Hub its commit, so that it stays the same one; transformers 5.24 does not say it any more.
    config.revision = getattr(weaver.config, "_commit_hash", None)
    config.base_model_name_or_path = weaver.name_or_path or None
    inject_adapter_in_model(config, weaver, "default")
    weaver._hf_peft_config_loaded = True
    weaver.set_adapter("default")
    return config
