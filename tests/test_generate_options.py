"""Each option of `generate`, with and without the assistant: the same output, or a refusal by name. None is ignored.

The tables name every field of `GenerationConfig`, every argument of `generate` and every input of the model; one that a
newer transformers adds fails here until somebody has decided what it does.
"""

import copy
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import OracleBuilder, prompt_ids, stock_model, tiny_random_model
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3_5ForCausalLM,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import EosTokenCriteria
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.generation.streamers import BaseStreamer

from weaver_hf import TreeConfig, WeaverConfig, WeaverModel, errors
from weaver_hf.errors import UnsupportedOptionError
from weaver_hf.proposal import BUILDERS
from weaver_hf.target.compat import CACHE_KEY

NEW = 10
PROMPT = prompt_ids()
PLAIN = {"max_new_tokens": NEW, "do_sample": False}
CHAT = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"


@functools.cache
def stock():
    return tiny_random_model()


@functools.cache
def plain_text() -> list[int]:
    """What greedy decoding appends to PROMPT."""
    return stock().generate(PROMPT, **PLAIN)[0, PROMPT.shape[1] :].tolist()


def token(index: int) -> int:
    """The token that plain greedy decoding writes there, for options that need one that occurs."""
    return plain_text()[index]


# ---- what a row of the tables says -----------------------------------------------------------------------------------


@dataclass
class Same:
    """Greedy output and scores equal stock's; and unless told otherwise, differ from those without the option.

    Args:
        options: of the row, or a function that makes them (late: some need the plain text).
        base: other options that the one under test needs to matter, kept in the comparison without it; or a function.
        prompt: int64 `[1, L]`; None where the options bring the input; text for the embedded model and its tokenizer.
        matters: the output with the option differs from that without it.
    """

    options: Any
    base: Any = field(default_factory=dict)
    prompt: torch.Tensor | str | None = PROMPT
    matters: bool = True


@dataclass
class NoEffect:
    """Accepted and without effect, in stock greedy decoding too; `why` says for whom the option is."""

    options: dict[str, Any]
    why: str


@dataclass
class Refused:
    """Our refusal, by name, before the target has run."""

    options: dict[str, Any]
    match: str
    runs_in_stock: bool = True


@dataclass
class StockRefuses:
    """transformers refuses it before we are asked, with the assistant as without."""

    options: dict[str, Any]
    match: str


@dataclass
class Sampled:
    """Read under `do_sample=True` alone. Greedy: without effect. Sampling: every token lies in stock's support."""

    options: dict[str, Any]


FIELDS = {
    # length and stopping
    "max_length": Same({"max_length": 14, "max_new_tokens": None}),
    "max_new_tokens": Same({"max_new_tokens": 5}),
    "min_length": Same(lambda: {"min_length": 17}, base=lambda: {"eos_token_id": token(3)}),
    "min_new_tokens": Same(lambda: {"min_new_tokens": 7}, base=lambda: {"eos_token_id": token(3)}),
    "max_time": Same({"max_time": 1e-9}),
    "stop_strings": Same({"stop_strings": ["doing", "fine"]}, prompt=CHAT),
    "early_stopping": NoEffect({"early_stopping": True}, "beam search"),
    # the way to decode
    "do_sample": Sampled({}),
    "num_beams": Refused({"num_beams": 2}, "num_beams=2"),
    "num_return_sequences": StockRefuses({"num_return_sequences": 2}, "num_return_sequences"),
    "length_penalty": NoEffect({"length_penalty": 2.0}, "beam search"),
    "num_beam_groups": NoEffect({"num_beam_groups": 2}, "beam search"),
    "diversity_penalty": NoEffect({"diversity_penalty": 0.5}, "beam search"),
    "constraints": StockRefuses({"constraints": [1]}, "trust_remote_code"),
    "force_words_ids": StockRefuses({"force_words_ids": [[1]]}, "trust_remote_code"),
    "penalty_alpha": StockRefuses({"penalty_alpha": 0.5, "top_k": 4}, "trust_remote_code"),
    "low_memory": NoEffect({"low_memory": True}, "contrastive search"),
    "dola_layers": Refused({"dola_layers": "low"}, "dola_layers='low' beside a Weaver", runs_in_stock=False),
    # other assistants
    "use_mtp": Refused({"use_mtp": True}, "use_mtp=True", runs_in_stock=False),
    "prompt_lookup_num_tokens": Refused({"prompt_lookup_num_tokens": 3}, "tokens=3", runs_in_stock=False),
    "assistant_early_exit": Refused({"assistant_early_exit": 2}, "early_exit=2", runs_in_stock=False),
    "speculation_type": Refused({"speculation_type": "dflash"}, "speculation_type='dflash'"),
    "assistant_ensemble_weight": Refused({"assistant_ensemble_weight": 0.5}, "weight=0.5"),
    "is_assistant": Refused({"is_assistant": True}, "is_assistant=True", runs_in_stock=False),
    "num_assistant_tokens": Refused({"num_assistant_tokens": 5}, "num_assistant_tokens=5"),
    "num_assistant_tokens_schedule": Refused({"num_assistant_tokens_schedule": "heuristic"}, "schedule='heuristic'"),
    "assistant_confidence_threshold": Refused({"assistant_confidence_threshold": 0.9}, "threshold=0.9"),
    "max_matching_ngram_size": Refused({"max_matching_ngram_size": 3}, "ngram_size=3"),
    "assistant_lookbehind": Refused({"assistant_lookbehind": 3}, "assistant_lookbehind=3"),
    "target_lookbehind": Refused({"target_lookbehind": 3}, "target_lookbehind=3"),
    # the cache and the compiler
    "use_cache": Refused({"use_cache": False}, "use_cache=False"),
    "cache_implementation": Same({"cache_implementation": "dynamic"}, matters=False),
    "cache_config": Refused({"cache_config": {"nbits": 4}}, "cache_config="),
    "max_cache_len": NoEffect({"max_cache_len": 100}, "static caches; transformers warns"),
    "prefill_chunk_size": Same({"prefill_chunk_size": 4}, matters=False),
    "compile_config": Refused({"compile_config": CompileConfig()}, "compile_config="),
    "disable_compile": NoEffect({"disable_compile": True}, "compiled steps; none is"),
    "continuous_batching_config": NoEffect(
        {"continuous_batching_config": ContinuousBatchingConfig()}, "generate_batch and the paged cache"
    ),
    # sampling
    "temperature": Sampled({"temperature": 0.3}),
    "top_k": Sampled({"top_k": 3}),
    "top_p": Sampled({"top_p": 0.4}),
    "min_p": Sampled({"min_p": 0.3}),
    "top_h": Sampled({"top_h": 0.3}),
    "typical_p": Sampled({"typical_p": 0.3}),
    "epsilon_cutoff": Sampled({"epsilon_cutoff": 0.05}),
    "eta_cutoff": Sampled({"eta_cutoff": 0.05}),
    # logits processors
    "repetition_penalty": Same({"repetition_penalty": 3.0}),
    "encoder_repetition_penalty": Same({"encoder_repetition_penalty": 3.0}),
    "no_repeat_ngram_size": Same({"no_repeat_ngram_size": 1}),
    "encoder_no_repeat_ngram_size": Same({"encoder_no_repeat_ngram_size": 1}),
    "bad_words_ids": Same(lambda: {"bad_words_ids": [[token(4)], [token(7), token(8)]]}),
    "renormalize_logits": Same({"renormalize_logits": True}),
    "forced_bos_token_id": Same({"forced_bos_token_id": 11}, prompt=PROMPT[:, :1]),
    "forced_eos_token_id": Same({"forced_eos_token_id": [11, 12]}),
    "remove_invalid_values": Same({"remove_invalid_values": True}, base={"sequence_bias": {(5,): float("inf")}}),
    "exponential_decay_length_penalty": Same(
        {"exponential_decay_length_penalty": (2, 1.6)}, base={"eos_token_id": 17}
    ),
    "suppress_tokens": Same(lambda: {"suppress_tokens": [token(2), token(5)]}),
    "begin_suppress_tokens": Same(lambda: {"begin_suppress_tokens": [token(0)]}),
    "sequence_bias": Same(lambda: {"sequence_bias": {(3,): 4.0, (token(1), 9): 40.0}}),
    "token_healing": Same({"token_healing": True}, prompt="Once upon a ti"),
    "guidance_scale": Same({"guidance_scale": 3.0}),
    "watermarking_config": Same({"watermarking_config": WatermarkingConfig(bias=9.0, seeding_scheme="selfhash")}),
    # what comes back
    "output_scores": Same({"output_scores": True}, matters=False),
    "output_logits": Same({"output_logits": True}, matters=False),
    "return_dict_in_generate": Same({"return_dict_in_generate": False}, matters=False),
    "output_attentions": Refused({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "output_hidden_states": Refused({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden_states"),
    # special tokens
    "pad_token_id": Same({"pad_token_id": 5}, prompt=torch.cat([torch.tensor([[5, 5]]), PROMPT], 1)),
    "bos_token_id": Same({"bos_token_id": 7}, prompt=None, base={"bos_token_id": 8}),
    "eos_token_id": Same(lambda: {"eos_token_id": [token(6), token(4), 127]}),
    "decoder_start_token_id": NoEffect({"decoder_start_token_id": 3}, "encoder-decoder models"),
}  # fmt: skip

# What `to_dict` holds beside options.
METADATA = {"_from_model_config", "transformers_version", "_commit_hash"}


class Forbid(LogitsProcessor):
    """Forbids the last token, in place."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -1]] = -float("inf")
        return scores


class Silent(BaseStreamer):
    """Makes no sound; what streamers receive is tested in `test_generate_streams.py`."""

    def put(self, value): ...

    def end(self): ...


ARGUMENTS = {
    "inputs": Same({"inputs": PROMPT[:, 2:]}, prompt=None, base={"inputs": PROMPT}),
    "generation_config": Same({"generation_config": GenerationConfig(repetition_penalty=3.0)}),
    "logits_processor": Same(lambda: {"logits_processor": LogitsProcessorList([Forbid()])}),
    "stopping_criteria": Same(lambda: {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(token(5))])}),
    "prefix_allowed_tokens_fn": Same({"prefix_allowed_tokens_fn": lambda batch, ids: range(ids.shape[0] % 7, 40)}),
    "synced_gpus": Refused({"synced_gpus": True}, "synced_gpus=True", runs_in_stock=False),
    "streamer": Same({"streamer": Silent()}, matters=False),
    "negative_prompt_ids": Same({"negative_prompt_ids": torch.tensor([[4, 8]])}, base={"guidance_scale": 3.0}),
    "negative_prompt_attention_mask": Same(
        {"negative_prompt_attention_mask": torch.tensor([[0, 1, 1]])},
        base={"guidance_scale": 3.0, "negative_prompt_ids": torch.tensor([[9, 4, 8]])},
    ),
    "tokenizer": Same({"stop_strings": "How"}, prompt=CHAT, matters=False),
    "assistant_tokenizer": Refused({"assistant_tokenizer": object()}, "assistant_tokenizer"),
    "trust_remote_code": Same({"trust_remote_code": True}, matters=False),
}
# Not options of a call with a Weaver: the Weaver itself; another door with its own tests; everything above and below.
NOT_OPTIONS = {"self", "assistant_model", "custom_generate", "kwargs"}

MODEL_INPUTS = {
    "input_ids": Same({"input_ids": PROMPT[:, 2:]}, prompt=None, base={"input_ids": PROMPT}),
    "attention_mask": Same({"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])}),
    "position_ids": Same({"position_ids": torch.arange(9)[None] * 3}),
    "inputs_embeds": Same(
        lambda: {"inputs_embeds": stock().get_input_embeddings()(PROMPT[:, 2:]).detach()},
        prompt=None,
        base=lambda: {"inputs_embeds": stock().get_input_embeddings()(PROMPT).detach()},
    ),
    "past_key_values": Same(lambda: {CACHE_KEY: continued(6)}, matters=False),
    "logits_to_keep": Same({"logits_to_keep": 3}, matters=False),
    "labels": Same({"labels": PROMPT}, matters=False),
    "use_cache": Refused({"use_cache": False}, "use_cache=False"),
    "token_type_ids": StockRefuses({"token_type_ids": torch.zeros_like(PROMPT)}, "not used by the model"),
    "misspelt_option": StockRefuses({"misspelt_option": 1}, "not used by the model"),
    "return_legacy_cache": StockRefuses({"return_legacy_cache": True}, "not used by the model"),
}
MODEL_INPUTS["cache"] = MODEL_INPUTS["past_key_values"]  # its name from transformers 5.24 on


def continued(length: int):
    """A cache that holds the first tokens of PROMPT."""
    out = stock().generate(PROMPT[:, :length], max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
    return getattr(out, CACHE_KEY)


# Values of the same options that take another way through transformers.
VARIANTS = {
    "watermarking_config, SynthID": Same(  # its processor keeps state from call to call
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836])}
    ),
    "encoder_repetition_penalty, below 1": Same({"encoder_repetition_penalty": 0.3}),
    "min_new_tokens, several eos": Same({"min_new_tokens": 6}, base=lambda: {"eos_token_id": [token(2), token(4)]}),
    "forced_eos_token_id, also suppressed": StockRefuses(
        {"forced_eos_token_id": 11, "suppress_tokens": [11]}, "suppress_tokens"
    ),
    "max_new_tokens, 0": StockRefuses({"max_new_tokens": 0}, "max_new_tokens"),
}

TABLE = {**FIELDS, **ARGUMENTS, **MODEL_INPUTS, **VARIANTS}


def rows(kind):
    names = [name for name, row in TABLE.items() if isinstance(row, kind)]
    present = set(GenerationConfig().to_dict()) | set(ARGUMENTS) | set(MODEL_INPUTS) | set(VARIANTS)
    return [name for name in names if name in present and name not in ("cache",)]


# ---- the tables are complete -----------------------------------------------------------------------------------------


def test_every_field_of_the_generation_config_is_classified():
    config = GenerationConfig()
    assert set(config.to_dict()) | set(vars(config)) <= set(FIELDS) | METADATA


def test_every_argument_of_generate_is_classified():
    assert set(inspect.signature(GenerationMixin.generate).parameters) <= set(ARGUMENTS) | NOT_OPTIONS


def test_every_input_of_the_model_is_classified():
    assert set(inspect.signature(Qwen3_5ForCausalLM.forward).parameters) <= set(MODEL_INPUTS) | {"self", "kwargs"}


# ---- each row --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """A model and the Weaver attached to it, for the tests of this file."""
    model = tiny_random_model()
    weaver = WeaverModel(WeaverConfig()).attach(model)
    yield model, weaver
    weaver.detach()


@pytest.fixture(scope="module")
def eager():
    """A stock model and an attached one that give attentions."""
    models = [tiny_random_model("eager") for _ in range(2)]
    weaver = WeaverModel(WeaverConfig()).attach(models[1])
    yield models
    assert weaver.stats is None, "nothing was assisted"
    weaver.detach()


def made(options: Any) -> dict[str, Any]:
    """The options of a row, fresh: processors, caches and configs keep state."""
    return options() if callable(options) else copy.deepcopy(options)


def assisted(model, weaver, monkeypatch, stock_sequences, **options):
    """The output with the assistant, with drafts that hold stock's next token 70 % of the time."""
    builder = OracleBuilder(stock_sequences[0].tolist(), nodes=8, hit=0.7, vocab=model.config.vocab_size)
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: builder)
    monkeypatch.setattr(weaver, "tree_config", TreeConfig(builder="oracle"))
    return model.generate(assistant_model=weaver, **options)


def assert_same(mine, theirs):
    if torch.is_tensor(theirs):
        assert torch.equal(mine, theirs)
        return
    assert torch.equal(mine.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        assert (getattr(mine, name) is None) == (getattr(theirs, name) is None)
        for a, b in zip(getattr(mine, name) or (), getattr(theirs, name) or (), strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    assert getattr(mine, CACHE_KEY).get_seq_length() == getattr(theirs, CACHE_KEY).get_seq_length()


@pytest.mark.parametrize("name", rows(Same))
def test_the_output_is_stocks(pair, trio, monkeypatch, name):
    row = TABLE[name]
    model, weaver = pair
    target, common = stock(), {} if row.prompt is None else {"inputs": row.prompt}
    if isinstance(row.prompt, str):
        model, tokenizer, weaver = trio
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.bos_token = tokenizer.pad_token  # token healing needs one
        target = stock_model()
        common = {**tokenizer(row.prompt, return_tensors="pt"), "tokenizer": tokenizer}
    outputs = {"return_dict_in_generate": True, "output_scores": True}
    common = {**common, **PLAIN, **outputs}
    theirs = target.generate(**{**common, **made(row.base), **made(row.options)})
    text = theirs if torch.is_tensor(theirs) else theirs.sequences
    mine = assisted(model, weaver, monkeypatch, text, **{**common, **made(row.base), **made(row.options)})
    assert_same(mine, theirs)
    if row.matters:
        without = target.generate(**{**common, **made(row.base)})
        same_text = torch.equal(without.sequences, theirs.sequences)
        assert not same_text or any(not torch.equal(a, b) for a, b in zip(without.scores, theirs.scores)), "a vain test"


@pytest.mark.parametrize("name", [*rows(NoEffect), *rows(Sampled)])
def test_what_greedy_decoding_does_not_read_changes_nothing(pair, monkeypatch, name):
    model, weaver = pair
    options = {"inputs": PROMPT, **PLAIN, **made(TABLE[name].options)}
    theirs = stock().generate(**made(options))
    assert theirs[0, PROMPT.shape[1] :].tolist() == plain_text(), "it has an effect: give it another row"
    assert torch.equal(assisted(model, weaver, monkeypatch, theirs, **options), theirs)


@pytest.mark.parametrize("name", rows(Refused))
def test_a_refusal_names_the_option_before_the_target_has_run(pair, name):
    model, weaver = pair
    row, ran = TABLE[name], []
    handle = model.model.register_forward_hook(lambda *args: ran.append(1))
    try:
        with pytest.raises(UnsupportedOptionError, match=row.match):
            model.generate(PROMPT, assistant_model=weaver, **{**PLAIN, **made(row.options)})
    finally:
        handle.remove()
    assert not ran


@pytest.mark.parametrize("name", [n for n in rows(Refused) if TABLE[n].runs_in_stock])
def test_what_is_refused_with_the_assistant_works_without(eager, name):
    outputs = [model.generate(PROMPT, **{**PLAIN, "max_new_tokens": 4, **made(TABLE[name].options)}) for model in eager]
    assert torch.equal(*(x if torch.is_tensor(x) else x.sequences for x in outputs))


@pytest.mark.parametrize("name", rows(StockRefuses))
def test_what_transformers_refuses_it_refuses_with_the_assistant_too(pair, name):
    model, weaver = pair
    for target, assistant in ((stock(), {}), (model, {"assistant_model": weaver})):
        with pytest.raises(ValueError, match=TABLE[name].match):
            target.generate(PROMPT, **assistant, **{**PLAIN, **made(TABLE[name].options)})


# transformers takes "hybrid" for "dynamic"; "paged" leaves `generate` for another loop before we are asked.
@pytest.mark.parametrize("name", sorted({*ALL_CACHE_IMPLEMENTATIONS} - {"dynamic", "hybrid"}))
def test_every_cache_but_the_dynamic_one_is_refused(pair, name):
    model, weaver = pair
    with pytest.raises(UnsupportedOptionError, match=f"cache_implementation='{name}'"):
        model.generate(PROMPT, assistant_model=weaver, cache_implementation=name, **PLAIN)


def test_the_paged_cache_is_refused_by_transformers_or_by_us(pair):
    model, weaver = pair
    with pytest.raises(NotImplementedError, match="assistant_model is not supported"):
        model.generate(PROMPT, assistant_model=weaver, cache_implementation="paged", **PLAIN)
    config = GenerationConfig(cache_implementation="paged", **PLAIN)
    with pytest.raises(UnsupportedOptionError, match="cache_implementation='paged'"):
        model.generate(PROMPT, assistant_model=weaver, generation_config=config)


def test_a_model_without_a_pad_token_decodes(monkeypatch):
    models = [tiny_random_model(pad_token_id=None) for _ in range(2)]
    options = {**PLAIN, "eos_token_id": [token(7), 127]}
    theirs = models[0].generate(PROMPT, **options)
    weaver = WeaverModel(WeaverConfig()).attach(models[1])
    assert models[1].generation_config.pad_token_id is None
    assert torch.equal(assisted(models[1], weaver, monkeypatch, theirs, inputs=PROMPT, **options), theirs)


# ---- sampling --------------------------------------------------------------------------------------------------------

SAMPLING = {name: TABLE[name].options for name in rows(Sampled)}
# Options of other tables that must hold under sampling too.
SAMPLING |= {
    "with a repetition penalty": {"repetition_penalty": 3.0, "top_k": 5},
    "with suppressed tokens": {"suppress_tokens": list(range(40)), "top_p": 0.8},
    "with forced tokens": {"forced_eos_token_id": 11},
    "with prefixes": {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1]) // 2, 3, 77]},
    "with everything": {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_tokens_lie_in_stocks_support(pair, monkeypatch, name):
    model, weaver = pair
    options = {**PLAIN, **SAMPLING[name], "do_sample": True}
    drafts = torch.cat([PROMPT, torch.tensor([plain_text()])], 1)
    out = assisted(
        model, weaver, monkeypatch, drafts, inputs=PROMPT, output_scores=True, return_dict_in_generate=True, **options
    )
    text = out.sequences
    assert text.shape[1] == PROMPT.shape[1] + NEW
    for i, scores in enumerate(out.scores):
        prefix = text[:, : PROMPT.shape[1] + i]
        # One token of stock decoding from the same prefix; the length rules are told the whole length.
        stock_options = {**options, "max_new_tokens": 1}
        if "forced_eos_token_id" in options and i < NEW - 1:
            stock_options.pop("forced_eos_token_id")
        theirs = stock().generate(prefix, output_scores=True, return_dict_in_generate=True, **stock_options).scores[0]
        assert torch.equal(scores.isfinite(), theirs.isfinite())
        assert scores[0, text[0, PROMPT.shape[1] + i]].isfinite()


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"max_new_tokens": 5}, 5),
        ({"max_length": 13, "max_new_tokens": None}, 4),
        ({"min_new_tokens": 4, "eos_token_id": list(range(1, 128))}, 5),
        ({"eos_token_id": list(range(128))}, 1),
        ({"max_time": 1e-9}, 1),
    ],
    ids=str,
)
def test_length_rules_hold_under_sampling(pair, monkeypatch, options, length):
    model, weaver = pair
    drafts = torch.cat([PROMPT, torch.tensor([plain_text()])], 1)
    call = {"inputs": PROMPT, **PLAIN, "temperature": 0.2, **options, "do_sample": True}
    assert assisted(model, weaver, monkeypatch, drafts, **call).shape[1] == PROMPT.shape[1] + length


def test_token_healing_that_changes_the_length_of_the_prompt_is_refused(trio):
    """It drops special tokens and leaves the mask as it was; stock decodes with a mask that is not the text's."""
    model, tokenizer, weaver = trio
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.bos_token = tokenizer.pad_token
    inputs = tokenizer(CHAT, return_tensors="pt")
    with pytest.raises(errors.UnsupportedModelError, match="`token_healing` of a prompt with special tokens"):
        model.generate(**inputs, **PLAIN, token_healing=True, tokenizer=tokenizer, assistant_model=weaver)
