"""What differs between the supported versions of transformers, as canaries against the installed one."""

import inspect

import pytest
import torch
from packaging.version import Version
from support import prompt_ids, tiny_random_model
from transformers import DynamicCache
from transformers.generation import GenerationMixin
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from weaver_hf.target.compat import CACHE_KEY, MINIMUM_TRANSFORMERS, TRANSFORMERS, cache_argument


def test_the_installed_version_is_supported():
    assert TRANSFORMERS >= MINIMUM_TRANSFORMERS
    assert ("cache" if Version("5.24.0") <= TRANSFORMERS else "past_key_values") == CACHE_KEY


@pytest.mark.parametrize("name", ["cache_params", "cache"])
def test_a_mixers_cache_is_found_under_every_name_and_by_position(name):
    cache = DynamicCache()
    assert cache_argument((), {name: cache}) is cache
    assert cache_argument((cache, None), {}) is cache
    assert cache_argument((), {name: None}) is None


def test_the_decoding_method_and_the_generator_seam_keep_their_names():
    for name in ("_assisted_decoding", "_get_candidate_generator", "_validate_generation_mode", "_prefill"):
        assert callable(getattr(GenerationMixin, name))
    assert "inputs_tensor" in inspect.signature(GenerationMixin._assisted_decoding).parameters


def test_an_unknown_keyword_reaches_every_mixer(monkeypatch):
    seen = []
    original = Qwen3_5GatedDeltaNet.forward

    def spy(self, *args, weaver_tree=None, **kwargs):
        seen.append(weaver_tree)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3_5GatedDeltaNet, "forward", spy)
    with torch.no_grad():
        tiny_random_model()(prompt_ids(), weaver_tree="marker")
    assert seen == ["marker"] * 3


def test_a_dict_of_masks_is_handed_to_the_layers_as_it_is():
    model, masks = tiny_random_model(), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda m, a, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    marker = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    with torch.no_grad():
        model(prompt_ids(), attention_mask={"full_attention": marker, "linear_attention": None})
    assert masks[:3] == [None] * 3
    assert masks[3] is marker
