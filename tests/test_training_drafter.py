"""Data and trainer, end to end on small models."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support import random_weaver, tiny_random_model

from weaver_hf import WeaverModel
from weaver_hf.bench import load_prompts
from weaver_hf.training.data import (
    DataConfig,
    TrainingDataError,
    complete,
    cut_own,
    cut_prompts,
    load_data,
    make_data,
    read_documents,
    tokenizer_fingerprint,
)
from weaver_hf.training.drafter import DrafterTrainConfig, train


class Letters:
    """A tokenizer of single characters."""

    pad_token_id = 126
    chat_template = None

    def __init__(self, shift=0):
        self.shift = shift

    def get_vocab(self):
        return {chr(32 + i): i + self.shift for i in range(96)}

    def __call__(self, text):
        ids = [(ord(c) - 32) % 96 for c in text]
        return type("Encoding", (), {"input_ids": ids})()


TEXT = [" ".join(f"word{i} and {i * 7} more" for i in range(400)), "a short one"]


def small(**kwargs):
    return DataConfig(**{"sequences": 12, "prompt_tokens": (8, 16), "max_new_tokens": 24, "batch_size": 5, **kwargs})


def test_documents_are_read_plain_and_compressed(tmp_path):
    import lzma

    (tmp_path / "a.txt").write_text("one\0two\0  \0")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"three"))
    assert read_documents([tmp_path / "a.txt", tmp_path / "b.txt.xz"]) == ["one", "two", "three"]
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(TrainingDataError, match="no text"):
        read_documents([tmp_path / "c.txt"])


def test_text_shorter_than_a_prompt_is_refused():
    with pytest.raises(TrainingDataError, match="usable prompts"):
        cut_prompts(["short"], Letters(), small())


def test_prompts_that_overlap_with_bench_prompts_are_dropped_and_counted():
    bench = next(p.prompt for p in load_prompts(["prose"]))
    prompts, dropped = cut_prompts([bench * 3, *TEXT], Letters(), small(sequences=30))
    assert dropped > 0
    assert len(prompts) == 30


def test_chats_are_cut_before_the_assistants_turn():
    chat = "<|im_start|>user\nZqxw?Vk<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    (prompt, *_), _ = cut_prompts([chat], Letters(), small(sequences=3, prompt_tokens=(8, 64)))
    assert prompt == Letters()(chat[: chat.index("hello")]).input_ids


def test_completions_are_the_targets_own_whatever_the_padding():
    model = tiny_random_model()
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4]]
    shard = complete(model, prompts, 0.0, 12, pad=126)
    lengths = shard["lengths"].tolist()
    for i, prompt in enumerate(prompts):
        text = shard["tokens"][sum(lengths[:i]) : sum(lengths[: i + 1])].tolist()
        stock = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert text == stock[: len(text)]
        assert len(prompt) < len(text) <= len(stock)


def test_own_prompts_end_where_the_answer_begins_or_the_document_ends():
    assert cut_own([5, 6, 7, 8, 6, 7, 9], pad=0, answer=[6, 7]) == [5, 6, 7, 8, 6, 7]
    assert cut_own([5, 6, 7, 8, 0, 6, 7], pad=0, answer=[6, 7]) == [5, 6, 7]
    assert cut_own([5, 8, 0, 3], pad=0, answer=[6, 7]) == [5, 8]
    assert cut_own([5, 8], pad=0, answer=[]) == [5, 8]


class Chatty(Letters):
    chat_template = "yes"

    def apply_chat_template(self, messages, **kwargs):
        return f"<user>{messages[0]['content']}<assistant>"

    def decode(self, ids, **kwargs):
        return "".join(chr(32 + i) for i in ids)


def test_plain_text_is_asked_as_a_users_turn_at_its_share():
    prompts, _ = cut_prompts(TEXT, Chatty(), small(sequences=200, prompt_tokens=(8, 64), ask_share=0.4))
    asked = [p for p in prompts if Chatty().decode(p).startswith("<user>")]
    assert 50 < len(asked) < 110
    assert all(Chatty().decode(p).endswith("<assistant>") for p in asked)


def test_a_data_set_is_resumed_and_equal_to_one_made_at_once(tmp_path):
    model = tiny_random_model()
    facts = make_data(model, Letters(), TEXT, tmp_path / "a", small())
    assert facts["complete"]
    make_data(model, Letters(), TEXT, tmp_path / "b", small())
    shards = sorted((tmp_path / "b").glob("*.safetensors"))
    assert len(shards) == 3
    kept = shards[0].stat().st_mtime_ns
    shards[1].unlink()
    make_data(model, Letters(), TEXT, tmp_path / "b", small())
    assert shards[0].stat().st_mtime_ns == kept, "what was there is not made again"
    for shard in shards:
        one, two = load_file(shard), load_file(tmp_path / "a" / shard.name)
        assert all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(TrainingDataError, match="other settings"):
        make_data(model, Letters(), TEXT, tmp_path / "b", small(seed=1))


def test_temperatures_have_their_shares(tmp_path):
    make_data(tiny_random_model(), Letters(), TEXT, tmp_path, small(sequences=20, max_new_tokens=16))
    data = load_data([tmp_path], Letters(), 8)
    assert sorted(data.temperatures.tolist()) == pytest.approx([0.0] * 7 + [0.7] * 4 + [1.0] * 9)
    batch = data.batch([3, 1], width=20, pad=126)
    assert batch["input_ids"].shape == (2, 20)
    for row, length in zip(batch["input_ids"], batch["lengths"].tolist()):
        assert (row[length:] == 126).all()


def test_data_of_another_tokenizer_of_the_same_size_is_refused(tmp_path):
    make_data(tiny_random_model(), Letters(), TEXT, tmp_path, small())
    assert tokenizer_fingerprint(Letters()) != tokenizer_fingerprint(Letters(shift=1))
    with pytest.raises(TrainingDataError, match="data of the tokenizer"):
        load_data([tmp_path], Letters(shift=1), 8)


def test_data_shorter_than_a_block_or_missing_is_refused(tmp_path):
    make_data(tiny_random_model(), Letters(), TEXT, tmp_path / "short", small(max_new_tokens=4))
    with pytest.raises(TrainingDataError, match="at least a block of 8"):
        load_data([tmp_path / "short"], Letters(), 8)
    with pytest.raises(TrainingDataError, match="no data set"):
        load_data([tmp_path / "nothing"], Letters(), 8)


@pytest.fixture
def data(tmp_path):
    make_data(tiny_random_model(), Letters(), TEXT, tmp_path / "data", small(sequences=40, max_new_tokens=40))
    return load_data([tmp_path / "data"], Letters(), 8)


def settings(**kwargs):
    return DrafterTrainConfig(
        **{"anchors": 6000, "batch_size": 6, "anchors_per_sequence": 10, "held_out": 4, "learning_rate": 3e-3, **kwargs}
    )


def test_training_lowers_the_loss_and_leaves_an_artifact_with_its_history(tmp_path, data):
    target, weaver = tiny_random_model(), random_weaver()
    before = {name: p.clone() for name, p in target.named_parameters()}
    train(target, weaver, data, tmp_path / "out", settings(evaluate_every=0.0), pad=126)
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["anchors"] >= 6000
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    assert "weaver_hf" in (tmp_path / "out" / "train_command.txt").read_text()
    assert all(torch.equal(p, before[name]) for name, p in target.named_parameters()), "the target is frozen"
    loaded = WeaverModel.from_pretrained(tmp_path / "out")
    assert set(loaded.tree_config.draft_temperature) == {"0.0", "0.7", "1.0"}
    assert all(len(row) == 7 for row in loaded.tree_config.draft_temperature.values())


def test_a_run_is_resumed_where_its_state_was_saved(tmp_path, data):
    weaver = random_weaver()
    train(tiny_random_model(), weaver, data, tmp_path / "out", settings(anchors=600), pad=126)
    middle = weaver.drafter.fc.weight.clone()
    again = random_weaver()
    train(tiny_random_model(), again, data, tmp_path / "out", settings(anchors=1200), pad=126)
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [row["anchors"] for row in rows] == [600, 1200]
    assert not torch.equal(again.drafter.fc.weight, middle)
