"""Grammars as logits processors: state that moves with each call, so each visited prefix once, in order, and no other."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from support import OracleBuilder, prompt_ids, tiny_random_model
from transformers import LogitsProcessor, LogitsProcessorList

from weaver_hf import TreeConfig
from weaver_hf.proposal import BUILDERS

EXAMPLE = Path(__file__).parent.parent / "examples" / "structured_output.py"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "alive"],
    "additionalProperties": False,
}
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 5}


class Brackets(LogitsProcessor):
    """A grammar of its own: opened brackets are closed before the text ends. Moves by the last token alone.

    One call too many, too few, out of order or on a prefix that is not kept, and its depth is wrong from there on.
    """

    OPEN, CLOSE, END = range(0, 30), range(30, 60), 127

    def __init__(self):
        self.depth, self.calls = None, 0

    def __call__(self, input_ids, scores):
        last = int(input_ids[0, -1])
        self.calls += 1
        if self.depth is None:  # the prompt does not count
            self.depth = 0
        else:
            self.depth += (last in self.OPEN) - (last in self.CLOSE)
        allowed = [*range(60, 127)]
        allowed += [*self.CLOSE] if self.depth else [self.END]
        allowed += [*self.OPEN] if self.depth < 3 else []
        mask = torch.full_like(scores, -float("inf"))
        mask[:, allowed] = 0
        return scores + mask


def balanced(tokens):
    depth, depths = 0, []
    for token in tokens:
        depth += (token in Brackets.OPEN) - (token in Brackets.CLOSE)
        depths.append(depth)
    return min(depths) >= 0 and max(depths) <= 3


@pytest.mark.parametrize("eos", [None, 127])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_stateful_grammar_writes_what_it_writes_without_the_assistant(model, weaver, monkeypatch, seed, eos):
    ids = prompt_ids(seed=seed)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": eos}
    stock = tiny_random_model().generate(ids, logits_processor=LogitsProcessorList([Brackets()]), **options)
    builder = OracleBuilder(stock[0].tolist(), nodes=12, hit=0.8, seed=seed)
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: builder)
    weaver.tree_config.builder = "oracle"
    grammar = Brackets()
    text = model.generate(ids, logits_processor=[grammar], assistant_model=weaver, **options)
    assert torch.equal(text, stock)
    assert weaver.stats.tokens_per_step > 1.5
    assert grammar.calls == text.shape[1] - ids.shape[1], "one call a token"
    new = text[0, ids.shape[1] :].tolist()
    assert balanced(new)
    assert any(token in Brackets.OPEN for token in new), "the grammar must have had something to do"


@pytest.mark.parametrize(
    ("schema", "builder"),
    [(PERSON, "suffix"), (PERSON, "chain"), (PERSON, "marginal"), (COLOURS, "marginal")],
    ids=["object-suffix", "object-chain", "object-marginal", "array-marginal"],
)
def test_xgrammars_processor_works_unchanged(trio, monkeypatch, schema, builder):
    xgrammar = pytest.importorskip("xgrammar", reason="pip install 'weaver-hf[structured]'")
    model, tokenizer, weaver = trio
    monkeypatch.setattr(weaver, "tree_config", TreeConfig(builder=builder))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
    chat = [{"role": "user", "content": "Answer in JSON."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def run(**assistant):
        processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
        return model.generate(**inputs, logits_processor=[processor], max_new_tokens=80, do_sample=False, **assistant)

    text = run(assistant_model=weaver)
    assert torch.equal(text, run())
    assert text[0, -1] == tokenizer.eos_token_id, "the grammar ended it"
    value = json.loads(tokenizer.decode(text[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    if schema is COLOURS:
        assert 3 <= len(value) <= 5
        assert set(value) <= {"red", "green", "blue"}
    else:
        assert list(value) == ["name", "age", "alive"]
        assert (type(value["name"]), type(value["age"]), type(value["alive"])) == (str, int, bool)
    assert weaver.stats.tokens_per_step > 1


def test_the_example_prints_what_it_says(capsys):
    pytest.importorskip("xgrammar", reason="pip install 'weaver-hf[structured]'")
    said = runpy.run_path(str(EXAMPLE))["__doc__"]
    printed = capsys.readouterr().out.strip().splitlines()
    assert len(printed) == 2
    assert f"    {printed[0]}\n" in said
    assert printed[1].endswith("the same as without the Weaver: True")
