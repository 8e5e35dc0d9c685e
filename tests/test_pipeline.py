"""What stands around `generate`: pipelines, generation configs from disk, chats over several turns."""

import copy

import pytest
import torch
from support import stock_model
from transformers import DynamicCache, GenerationConfig, pipeline

from weaver_hf import errors
from weaver_hf.target.compat import CACHE_KEY
from weaver_hf.tiny import WEAVER

GREEDY = {"max_new_tokens": 12, "do_sample": False}
CHAT = [{"role": "user", "content": "How are you?"}]


# ---- pipelines -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_pipe(trio):
    return pipeline("text-generation", model=stock_model(), tokenizer=trio[1])


@pytest.mark.parametrize("prompt", ["Once upon a time", CHAT], ids=["text", "chat"])
def test_a_pipeline_with_the_weaver_writes_what_it_writes_without(trio, plain_pipe, prompt):
    model, tokenizer, weaver = trio
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=weaver)
    assert pipe.assistant_tokenizer is None, "its config names the target's vocabulary and special tokens"
    assert pipe(prompt, **GREEDY) == plain_pipe(prompt, **GREEDY)
    assert weaver.stats.tokens_per_step > 1.5


def test_a_pipeline_takes_its_prompts_one_by_one(trio, plain_pipe):
    model, tokenizer, weaver = trio
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=weaver)
    prompts = ["Once upon a time", "2 + 3 = ", "def add(a, b):"]
    assert pipe(prompts, **GREEDY) == plain_pipe(prompts, **GREEDY)


def test_a_pipelines_default_is_sampling(trio):
    model, tokenizer, weaver = trio
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=weaver)
    assert pipe("Once upon a time", max_new_tokens=8)[0]["generated_text"].startswith("Once upon a time")


def test_a_path_as_the_pipelines_assistant_is_refused_by_transformers(trio):
    """It looks for the class among its own alone; `custom_generate` takes a path instead."""
    model, tokenizer, _ = trio
    with pytest.raises(ValueError, match="cannot infer suitable model classes"):
        pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=str(WEAVER))


def test_a_pipeline_decodes_with_a_weaver_by_its_path(trio, plain_pipe, tmp_path):
    _, _, weaver = trio
    weaver.save_pretrained(tmp_path, custom_generate=True)
    expected = plain_pipe("Once upon a time", **GREEDY)
    by_path = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    assert plain_pipe("Once upon a time", **GREEDY, **by_path) == expected


# ---- generation configs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": 12, "repetition_penalty": 1.3, "do_sample": False},
        {"max_length": 15, "sequence_bias": [[[500], 3.0]], "eos_token_id": [2, 11]},
        {"max_new_tokens": 8, "output_logits": True, "output_scores": True, "return_dict_in_generate": True},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_generation_config_from_disk_decides_as_it_does_without_the_assistant(trio, tmp_path, fields):
    model, tokenizer, weaver = trio
    GenerationConfig(**fields).save_pretrained(tmp_path)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    outputs = [
        target.generate(**inputs, generation_config=GenerationConfig.from_pretrained(tmp_path), **assistant)
        for target, assistant in ((stock_model(), {}), (model, {"assistant_model": weaver}))
    ]
    assert torch.equal(*(x if torch.is_tensor(x) else x.sequences for x in outputs))
    if not torch.is_tensor(outputs[0]):
        for name in ("scores", "logits"):
            torch.testing.assert_close(*(torch.cat(getattr(x, name)) for x in outputs), atol=1e-3, rtol=1e-3)


def test_a_generation_config_from_disk_that_is_not_supported_is_refused_by_name(trio, tmp_path):
    model, tokenizer, weaver = trio
    GenerationConfig(num_beams=3, max_new_tokens=4).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    with pytest.raises(errors.UnsupportedOptionError, match="num_beams=3"):
        model.generate(**tokenizer("Once", return_tensors="pt"), generation_config=config, assistant_model=weaver)


def test_the_models_own_generation_config_decides_too(trio, monkeypatch):
    model, tokenizer, weaver = trio
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=9, repetition_penalty=1.4)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    monkeypatch.setattr(model, "generation_config", config)
    text = model.generate(**inputs, assistant_model=weaver)
    assert torch.equal(text, stock_model().generate(**inputs, max_new_tokens=9, repetition_penalty=1.4))
    assert (config.max_new_tokens, config.repetition_penalty) == (9, 1.4), "and is not written to"


# ---- chats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sends", ["the whole text", "the mask of the whole text"])
def test_a_chat_on_a_continued_cache_equals_fresh_calls(trio, sends):
    """Three turns; each is compared with a call on the whole conversation, with the assistant and without."""
    model, tokenizer, weaver = trio
    cache, ids, seen = DynamicCache(config=model.config), torch.zeros(1, 0, dtype=torch.long), ""
    messages = []
    for question in ("How are you?", "What is your name?", "Tell me a story."):
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.startswith(seen)
        added = tokenizer(text[len(seen) :], return_tensors="pt", add_special_tokens=False).input_ids
        ids = torch.cat([ids, added], 1)
        mask = {} if sends == "the whole text" else {"attention_mask": torch.ones_like(ids)}
        turn = model.generate(ids, assistant_model=weaver, **GREEDY, **mask, **{CACHE_KEY: cache})
        assert cache.get_seq_length() == turn.shape[1] - 1
        assert torch.equal(turn, model.generate(ids, assistant_model=weaver, **GREEDY))
        assert torch.equal(turn, stock_model().generate(ids, **GREEDY))
        answer = tokenizer.decode(turn[0, ids.shape[1] :])
        messages.append({"role": "assistant", "content": answer.removesuffix(tokenizer.eos_token)})
        ids, seen = turn, text + answer
    assert len(messages) == 6


def test_the_returned_cache_is_the_next_turns(trio):
    """The same with the cache that `generate` made and returned."""
    model, tokenizer, weaver = trio
    options = {**GREEDY, "return_dict_in_generate": True, "assistant_model": weaver}
    first = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), **options)
    ids = torch.cat([first.sequences, tokenizer(" The end. Once", return_tensors="pt").input_ids], 1)
    second = model.generate(ids, **{CACHE_KEY: getattr(first, CACHE_KEY)}, **options)
    assert torch.equal(second.sequences, stock_model().generate(ids, **GREEDY))
