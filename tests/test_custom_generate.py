"""Decoding with a Weaver on a model that carries none: through a folder, a repository in the Hub's cache, a callable."""

import copy
import functools
import pickle
import shutil
import threading

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import OracleBuilder, prompt_ids, random_weaver, tiny_dense_model, tiny_random_model
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3_5ForCausalLM,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import weaver_hf.custom_generate
from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.errors import (
    CheckpointError,
    NotAttachedError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from weaver_hf.proposal import BUILDERS
from weaver_hf.target.attach import attachment_of
from weaver_hf.target.compat import CACHE_KEY

NEW = 10
OPTIONS = {"max_new_tokens": NEW, "do_sample": False}
PROMPT = prompt_ids(20, seed=1)


@functools.cache
def stock_text():
    return tiny_random_model().generate(PROMPT, **OPTIONS)


@pytest.fixture(autouse=True)
def oracle(monkeypatch):
    """Drafts the stock continuation of `PROMPT` most of the time."""
    text = stock_text()[0].tolist()
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: OracleBuilder(text, nodes=budget + 1, hit=0.8))


def make_weaver(**fields):
    return WeaverModel(WeaverConfig(vocab_size=128, tree_config={"builder": "oracle", "budget": 8, **fields}))


@pytest.fixture
def folder(tmp_path):
    make_weaver().save_pretrained(tmp_path / "weaver", custom_generate=True)
    return tmp_path / "weaver"


@pytest.fixture(params=["folder", "callable"])
def door(request, folder):
    """Options that open each door: as a user would pass them."""
    if request.param == "folder":
        return {"custom_generate": str(folder), "trust_remote_code": True}
    return {"custom_generate": WeaverModel.from_pretrained(folder).custom_generate}


@pytest.fixture
def loads(monkeypatch):
    """Counts what is loaded from disk."""
    loaded, load = [], WeaverModel.from_pretrained.__func__
    monkeypatch.setattr(
        WeaverModel, "from_pretrained", classmethod(lambda cls, *a, **k: loaded.append(a) or load(cls, *a, **k))
    )
    return loaded


def assert_stock(model):
    assert type(model) is Qwen3_5ForCausalLM
    assert attachment_of(model) is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 6, "eos_token_id": 17},
        {"bad_words_ids": [[99]], "return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        {"prefill_chunk_size": 4},
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 6]])},
        {"prefix_allowed_tokens_fn": lambda batch, ids: range(20)},
    ],
    ids=lambda o: next(iter(o), "plain"),
)
def test_every_door_writes_what_stock_writes_and_leaves_the_model_stock(model, door, options):
    stock = tiny_random_model().generate(PROMPT, **OPTIONS, **options)
    mine = model.generate(PROMPT, **door, **OPTIONS, **options)
    if not torch.is_tensor(stock):
        assert mine.stats.tokens_per_step > 1
        torch.testing.assert_close(torch.cat(mine.scores), torch.cat(stock.scores), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(torch.cat(mine.logits), torch.cat(stock.logits), atol=2e-5, rtol=1e-4)
        stock, mine = stock.sequences, mine.sequences
    assert torch.equal(stock, mine)
    assert_stock(model)


def test_trees_are_what_decodes_behind_the_door(trio, tmp_path):
    """The embedded model with its trained drafter, by name alone: fewer passes, the same text."""
    embedded, tokenizer, weaver = trio
    weaver.save_pretrained(tmp_path, custom_generate=True)
    model = copy.deepcopy(embedded)  # a stock model: copies are not attached
    assert_stock(model)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    options = {**inputs, **OPTIONS, "return_dict_in_generate": True}
    out = model.generate(custom_generate=str(tmp_path), trust_remote_code=True, **options)
    assert torch.equal(out.sequences, model.generate(**inputs, **OPTIONS))
    assert out.stats.tokens_per_step > 1.5
    assert_stock(model)


def test_the_written_files_load_as_transformers_wants_them(folder):
    assert sorted(p.name for p in (folder / "custom_generate").iterdir()) == ["generate.py", "requirements.txt"]
    requirements = (folder / "custom_generate" / "requirements.txt").read_text().split()
    assert requirements == [f"weaver-hf>={weaver_hf.__version__}"]
    loaded = tiny_random_model().load_custom_generate(str(folder), trust_remote_code=True)
    assert loaded is weaver_hf.custom_generate.generate


def test_no_door_is_written_unasked(tmp_path):
    WeaverModel(WeaverConfig()).save_pretrained(tmp_path)
    assert not (tmp_path / "custom_generate").exists()


def test_a_folder_runs_no_code_without_trust(model, folder):
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(prompt_ids(), custom_generate=str(folder), trust_remote_code=False, **OPTIONS)


def test_a_moved_folder_is_its_own_weaver(model, folder, tmp_path):
    """Two folders with the same `generate.py` hold different Weavers; the one that was named decodes."""
    moved = tmp_path / "moved" / "weaver"
    shutil.copytree(folder, moved)
    random_weaver().save_pretrained(folder, custom_generate=True)
    for place, drafted in ((folder, True), (moved, False)):
        model.generate(prompt_ids(), custom_generate=str(place), trust_remote_code=True, **OPTIONS)
        ((_, weaver),) = [
            kept for key, kept in weaver_hf.custom_generate._loaded[model].items() if key[0] == str(place)
        ]
        assert (weaver.drafter is not None) == drafted


def test_a_folder_is_read_once_a_model_and_again_when_it_changes(model, folder, loads):
    def call(target):
        return target.generate(
            PROMPT,
            custom_generate=str(folder),
            trust_remote_code=True,
            return_dict_in_generate=True,
            **OPTIONS,
        )

    call(model), call(model)
    assert len(loads) == 1
    call(tiny_random_model())
    assert len(loads) == 2
    make_weaver(budget=2).save_pretrained(folder, custom_generate=True)
    assert call(model).stats.best_tree.num_nodes == 3
    assert len(loads) == 3


def test_loaded_weavers_do_not_outlive_their_model(folder):
    model = tiny_random_model()
    model.generate(prompt_ids(), custom_generate=str(folder), trust_remote_code=True, **OPTIONS)
    before = len(weaver_hf.custom_generate._loaded)
    del model
    assert len(weaver_hf.custom_generate._loaded) == before - 1


def test_a_repository_id_is_read_from_the_hubs_cache(model, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repo, commit = tmp_path / "cache" / "models--org--weaver", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    hub = {"cache_dir": str(tmp_path / "cache"), "local_files_only": True}
    text = model.generate(prompt_ids(), custom_generate="org/weaver", trust_remote_code=True, **hub, **OPTIONS)
    assert torch.equal(text, tiny_random_model().generate(prompt_ids(), **OPTIONS))
    assert_stock(model)


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens, self.ends = [], 0

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ends += 1


def test_streamers_get_every_token_and_the_end(model, door):
    recorder = Recorder()
    text = model.generate(PROMPT, streamer=recorder, **door, **OPTIONS)
    assert recorder.tokens == text[0].tolist()
    assert recorder.ends == 1


def test_a_partial_decodes(model):
    partial = functools.partial(make_weaver().custom_generate)
    text = model.generate(PROMPT, custom_generate=partial, **OPTIONS)
    assert torch.equal(text, stock_text())
    assert_stock(model)


def test_a_text_iterator_beside_a_callable_ends_in_its_thread(trio):
    """transformers drops a streamer beside a callable, and its reader would wait for ever."""
    model, tokenizer, _ = trio
    stock = copy.deepcopy(model)
    weaver = WeaverModel(WeaverConfig())
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    call = {**inputs, **OPTIONS, "streamer": streamer, "custom_generate": weaver.custom_generate}
    thread = threading.Thread(target=stock.generate, kwargs=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    out = stock.generate(**inputs, **OPTIONS)
    assert text == tokenizer.decode(out[0, inputs.input_ids.shape[1] :])


def test_a_second_turn_continues_the_cache(model, door):
    texts = []
    for target, options in ((tiny_random_model(), {}), (model, door)):
        cache = DynamicCache(config=target.config)
        options = {**OPTIONS, **options, CACHE_KEY: cache}
        turn = target.generate(PROMPT, **options)
        turn = target.generate(torch.cat([turn, prompt_ids(5, seed=4)], 1), **options)
        assert cache.get_seq_length() == turn.shape[1] - 1
        texts.append(turn)
    assert torch.equal(*texts)


def test_the_drafters_context_goes_from_turn_to_turn(model, tmp_path):
    random_weaver().save_pretrained(tmp_path, custom_generate=True)
    cache = DynamicCache(config=model.config)
    options = {"custom_generate": str(tmp_path), "trust_remote_code": True, **OPTIONS, CACHE_KEY: cache}
    turn = model.generate(prompt_ids(), **options)
    assert cache._weaver_context[1].cache_length == turn.shape[1] - 1
    turn = model.generate(torch.cat([turn, prompt_ids(5, seed=4)], 1), **options)
    assert cache._weaver_context[1].length == turn.shape[1] - 1, "read from the first row on"


def test_embeddings_and_padding_go_through(model, door):
    embeds = model.get_input_embeddings()(PROMPT).detach()
    for options in (
        {"inputs_embeds": embeds},
        {
            "input_ids": torch.cat([torch.full((1, 3), 126), PROMPT], 1),
            "attention_mask": torch.tensor([[0] * 3 + [1] * 20]),
        },
    ):
        stock = tiny_random_model().generate(**OPTIONS, **options)
        assert torch.equal(model.generate(**door, **OPTIONS, **options), stock)


def test_a_peft_wrapped_model_decodes(model, door):
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "in_proj_qkv"], task_type="CAUSAL_LM"))
    text = wrapped.generate(input_ids=PROMPT, **door, **OPTIONS)
    assert torch.equal(text, wrapped.generate(input_ids=PROMPT, **OPTIONS))
    assert_stock(model)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens=3"),
        ({"synced_gpus": True}, "synced_gpus"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals_are_those_of_an_attached_weaver_and_leave_the_model_stock(model, door, options, match):
    with pytest.raises(UnsupportedOptionError, match=match):
        model.generate(prompt_ids(), **{**OPTIONS, **door, **options})
    assert_stock(model)
    assert torch.equal(model.generate(prompt_ids(), **OPTIONS), tiny_random_model().generate(prompt_ids(), **OPTIONS))


def test_sampling_through_a_door_is_that_of_an_attached_weaver(model, door):
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.3}
    attached = tiny_random_model()
    weaver = make_weaver().attach(attached)
    texts = []
    for target, way in ((attached, {"assistant_model": weaver}), (model, door)):
        torch.manual_seed(7)
        texts.append(target.generate(PROMPT, **way, **options))
    assert torch.equal(*texts)


def test_a_second_assistant_is_refused(model, door):
    error = UnsupportedOptionError if isinstance(door["custom_generate"], str) else ValueError  # stock's, before ours
    with pytest.raises(error, match=r"one kind of assistance|not supported with stateful models"):
        model.generate(prompt_ids(), assistant_model=WeaverModel(WeaverConfig()), **door, **OPTIONS)
    assert_stock(model)


def test_stop_strings_work_by_name_and_fail_loudly_with_a_callable(trio, tmp_path):
    embedded, tokenizer, weaver = trio
    model = copy.deepcopy(embedded)
    weaver.save_pretrained(tmp_path, custom_generate=True)
    inputs = tokenizer("<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    options = {
        **inputs,
        "max_new_tokens": 40,
        "do_sample": False,
        "tokenizer": tokenizer,
        "stop_strings": ["doing well"],
    }
    stock = model.generate(**options)
    assert stock.shape[1] < inputs.input_ids.shape[1] + 40
    assert torch.equal(model.generate(custom_generate=str(tmp_path), trust_remote_code=True, **options), stock)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(custom_generate=WeaverModel(WeaverConfig()).custom_generate, **options)


def test_an_attached_weaver_stays_attached(model, weaver, folder):
    stock = stock_text()
    assert torch.equal(model.generate(PROMPT, custom_generate=weaver.custom_generate, **OPTIONS), stock)
    assert torch.equal(model.generate(PROMPT, custom_generate=str(folder), trust_remote_code=True, **OPTIONS), stock)
    assert attachment_of(model).weavers == [weaver]
    assert weaver.target is model


def test_a_weaver_attached_elsewhere_is_refused(model, weaver):
    other = tiny_random_model()
    with pytest.raises(NotAttachedError, match="attached to another model"):
        other.generate(prompt_ids(), custom_generate=weaver.custom_generate, **OPTIONS)
    assert weaver.target is model


def test_a_model_of_another_family_is_refused(door):
    model = tiny_dense_model()
    with pytest.raises(UnsupportedModelError, match="Qwen3ForCausalLM"):
        model.generate(prompt_ids(), **door, **OPTIONS)


def test_a_weaver_of_another_target_is_refused(model, tmp_path):
    WeaverModel(WeaverConfig(vocab_size=4096)).save_pretrained(tmp_path, custom_generate=True)
    with pytest.raises(CheckpointError, match="vocab_size 4096"):
        model.generate(prompt_ids(), custom_generate=str(tmp_path), trust_remote_code=True, **OPTIONS)
    assert_stock(model)


def test_a_call_that_names_no_repository_is_refused(model):
    with pytest.raises(CheckpointError, match="names no repository"):
        weaver_hf.custom_generate.generate(model, inputs=prompt_ids(), **OPTIONS)


def test_a_model_repository_with_a_door_names_the_way_out(folder):
    """transformers replaces the `generate` of a model that it loads with trust from a folder with a door in it."""
    tiny_random_model().save_pretrained(folder)  # over the Weaver's files
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(CheckpointError, match="Load the model without"):
        model.generate(inputs=prompt_ids(), **OPTIONS)


def test_concurrent_calls_take_turns_and_leave_the_model_stock(model, door):
    stock, texts = stock_text(), []
    threads = [
        threading.Thread(target=lambda: texts.append(model.generate(PROMPT, **door, **OPTIONS))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert all(torch.equal(text, stock) for text in texts)
    assert_stock(model)


def test_a_call_inside_a_call_runs(model, door):
    inner = []

    class Asks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if not inner:
                inner.append(None)
                inner[0] = model.generate(prompt_ids(), **door, **OPTIONS)
            return scores

    outer = model.generate(PROMPT, logits_processor=LogitsProcessorList([Asks()]), **door, **OPTIONS)
    assert torch.equal(outer, stock_text())
    assert torch.equal(inner[0], tiny_random_model().generate(prompt_ids(), **OPTIONS))
    assert_stock(model)


def test_an_error_inside_leaves_the_model_stock(model, door):
    class Raises(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise RuntimeError("processor")

    with pytest.raises(RuntimeError, match="processor"):
        model.generate(PROMPT, logits_processor=LogitsProcessorList([Raises()]), **door, **OPTIONS)
    assert_stock(model)


def test_a_weaver_that_decoded_through_its_door_saves_and_pickles(model, folder, tmp_path):
    weaver = WeaverModel.from_pretrained(folder)
    model.generate(PROMPT, custom_generate=weaver.custom_generate, **OPTIONS)
    assert weaver.stats.new_tokens == NEW
    assert pickle.loads(pickle.dumps(weaver)).target is None
    weaver.save_pretrained(tmp_path / "again", custom_generate=True)
    assert torch.equal(
        model.generate(PROMPT, custom_generate=str(tmp_path / "again"), trust_remote_code=True, **OPTIONS),
        stock_text(),
    )
