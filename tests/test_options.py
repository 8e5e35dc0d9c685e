"""Bad input: each refusal says what was found, what was expected and what to do, before any work is done."""

import pytest
import torch
from support import prompt_ids, tiny_random_model
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache, TextStreamer

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.errors import (
    EmptyPromptError,
    NotAttachedError,
    TreeConfigError,
    UnsupportedCacheError,
    UnsupportedOptionError,
    WeaverError,
)
from weaver_hf.target.compat import CACHE_KEY


class NotCopied(LogitsProcessor):
    def __deepcopy__(self, memo):
        raise TypeError("no")


def refused(model, weaver, error, match, ids=None, **options):
    """The call raises before the target has run once."""
    ran = []
    handle = model.model.register_forward_hook(lambda *args: ran.append(1))
    try:
        with pytest.raises(error, match=match) as info:
            defaults = {"assistant_model": weaver, "max_new_tokens": 4}
            model.generate(prompt_ids() if ids is None else ids, **defaults, **options)
    finally:
        handle.remove()
    assert not ran
    assert isinstance(info.value, WeaverError)
    assert all((info.value.found, info.value.expected, info.value.fix))
    assert str(info.value).startswith("Found ")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "generation mode 'beam_search' .num_beams=2."),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 beside a Weaver"),
        ({"use_mtp": True}, "use_mtp=True beside"),
        ({"speculation_type": "dflash"}, "speculation_type='dflash'"),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"synced_gpus": True}, "synced_gpus=True"),
        ({"assistant_tokenizer": object()}, "assistant_tokenizer"),
        ({"num_assistant_tokens": 5}, "num_assistant_tokens=5"),
        ({"assistant_confidence_threshold": 0.9}, "assistant_confidence_threshold=0.9"),
        ({"max_matching_ngram_size": 3}, "max_matching_ngram_size=3"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_unsupported_options_are_refused_by_name(options, match):
    model = tiny_random_model("eager")  # output_attentions needs eager anyway
    refused(model, WeaverModel(WeaverConfig()).attach(model), UnsupportedOptionError, match, **options)


def test_batches_are_refused(model, weaver):
    ids = prompt_ids().repeat(2, 1)
    refused(model, weaver, UnsupportedOptionError, "a batch of 2 sequences", ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"streamer": TextStreamer(None)}, "a streamer for 3 sequences"),
        ({CACHE_KEY: DynamicCache()}, "a cache to be continued by 3 sequences"),
        ({"logits_processor": LogitsProcessorList([NotCopied()])}, "cannot be copied"),
    ],
    ids=["streamer", "cache", "processor"],
)
def test_what_several_returned_sequences_cannot_share_is_refused(model, weaver, options, match):
    options = {"do_sample": True, "num_return_sequences": 3, **options}
    if CACHE_KEY in options:
        options[CACHE_KEY] = DynamicCache(config=model.config)
    refused(model, weaver, UnsupportedOptionError, match, **options)


def test_several_prompts_for_several_sequences_are_refused(model, weaver):
    options = {"do_sample": True, "num_return_sequences": 2, "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    refused(model, weaver, UnsupportedOptionError, "a batch of 2 sequences", prompt_ids().repeat(2, 1), **options)


def test_an_unknown_acceptance_rule_is_refused_on_assignment(weaver):
    with pytest.raises(TreeConfigError, match=r"'greedy'; expected one of \['sample', 'coupled', 'lossy_margin'\]"):
        weaver.tree_config.acceptance = "greedy"
    with pytest.raises(TreeConfigError, match="lossy_margin -1"):
        weaver.tree_config.lossy_margin = -1
    assert weaver.tree_config.acceptance is None


def test_coupled_acceptance_with_a_builder_that_has_no_scores_is_refused(model, weaver):
    weaver.tree_config.acceptance = "coupled"
    refused(model, weaver, TreeConfigError, "coupled.*'suffix'", do_sample=True)


def test_an_empty_prompt_is_refused(model, weaver):
    ids = torch.zeros(1, 0, dtype=torch.long)
    refused(model, weaver, EmptyPromptError, "0 tokens", ids, attention_mask=torch.ones_like(ids))


def test_a_static_cache_is_refused(model, weaver):
    cache = StaticCache(config=model.config, max_cache_len=64)
    refused(model, weaver, UnsupportedCacheError, "StaticCache", **{CACHE_KEY: cache})


@pytest.mark.parametrize("where", ["nowhere", "another model"])
def test_a_weaver_that_is_not_attached_here_is_refused(model, weaver, where):
    other = WeaverModel(WeaverConfig())
    elsewhere = tiny_random_model()  # kept alive while the call runs
    if where == "another model":
        other.attach(elsewhere)
    refused(model, other, NotAttachedError, "no model" if where == "nowhere" else "another model")


def test_an_unknown_builder_is_refused_with_the_list_of_those_there_are(model, weaver):
    weaver.tree_config.builder = "sufix"
    refused(model, weaver, TreeConfigError, r"builder 'sufix'; expected one of .*'suffix'")


@pytest.mark.parametrize("budget", [-1, 2.5, "7", True])
def test_a_budget_below_zero_is_refused_on_assignment(weaver, budget):
    with pytest.raises(TreeConfigError, match="at least 0"):
        weaver.tree_config.budget = budget
    assert weaver.tree_config.budget is None


def test_a_misspelt_tree_setting_is_no_silent_attribute(weaver):
    with pytest.raises(AttributeError):
        weaver.tree_config.bugdet = 7


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(UnsupportedOptionError("a", "b", "C.")))
    assert (error.found, error.expected, error.fix) == ("a", "b", "C.")
