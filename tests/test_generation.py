"""The loop inside `generate`: every rule of generate that decides a token or ends a text, and what comes back."""

import copy

import pytest
import torch
from support import OracleBuilder, chain_then, path_logits, prompt_ids, tiny_dense_model, tiny_random_model
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from weaver_hf import TokenTree, TreeConfig, WeaverConfig, WeaverModel
from weaver_hf.errors import InvalidTreeError
from weaver_hf.generation import WeaverCandidateGenerator
from weaver_hf.proposal import BUILDERS
from weaver_hf.target.compat import CACHE_KEY
from weaver_hf.tiny import TARGET

NEW = 30


@pytest.fixture
def run(model, weaver, monkeypatch):
    """`run(**options)`: stock and assisted output for the same options, with drafts that are right 70 % of the time."""

    def run(ids=None, seed=0, nodes=9, new=NEW, assisted=None, **options):
        ids = prompt_ids() if ids is None else ids
        options = {"max_new_tokens": new, "do_sample": False, **options}
        stock = tiny_random_model().generate(ids, **copy.deepcopy(options))
        text = stock if torch.is_tensor(stock) else stock.sequences
        builder = OracleBuilder(text[0].tolist(), nodes=nodes, hit=0.7, seed=seed)
        monkeypatch.setitem(BUILDERS, "oracle", lambda budget: builder)
        weaver.tree_config.builder = "oracle"
        return stock, model.generate(ids, assistant_model=weaver, **{**options, **(assisted or {})})

    return run


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1

    @property
    def tokens(self):
        return [token for put in self.puts for token in put]


class Spy(LogitsProcessor):
    """Forbids what the last token was, and keeps the prefixes it was asked about."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        scores[:, input_ids[0, -1]] = -float("inf")  # in place, as many processors do
        return scores


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 9]]},
        {"sequence_bias": {(3,): 4.0}},
        {"suppress_tokens": [1, 2, 3]},
        {"forced_eos_token_id": 11},
        {"min_new_tokens": 12, "eos_token_id": 17},
        {"exponential_decay_length_penalty": (5, 1.1), "eos_token_id": 17},
        {"renormalize_logits": True},
        {"guidance_scale": 1.5},
        {"encoder_repetition_penalty": 1.2},
        {"prefill_chunk_size": 4},
        {"token_healing": False, "max_length": 21, "max_new_tokens": None},
    ],
    ids=lambda o: next(iter(o), "plain"),
)
def test_greedy_output_equals_stock_under_every_rule(run, weaver, options, seed):
    stock, assisted = run(prompt_ids(seed=seed), seed=seed, **options)
    assert torch.equal(stock, assisted)
    assert weaver.stats.new_tokens == stock.shape[1] - 9


def test_custom_processors_see_each_visited_prefix_once_and_in_order(run):
    spies = [Spy(), Spy()]
    stock, assisted = run(
        logits_processor=LogitsProcessorList([spies[0]]), assisted={"logits_processor": LogitsProcessorList([spies[1]])}
    )
    assert torch.equal(stock, assisted)
    text = assisted[0].tolist()
    assert spies[1].prefixes == [text[:n] for n in range(9, len(text))]


@pytest.mark.parametrize("limit", range(1, 20))
def test_length_limits_are_never_overshot(run, weaver, limit):
    stock, assisted = run(new=limit)
    assert assisted.shape[1] == 9 + limit
    assert torch.equal(stock, assisted)
    assert weaver.stats.last_cut == (limit > 1)


def test_max_length_counts_the_prompt(run):
    _, assisted = run(new=None, max_length=14)
    assert assisted.shape[1] == 14


@pytest.mark.parametrize("position", range(2, 16))
def test_eos_inside_an_accepted_path_ends_the_text_there(run, weaver, position):
    text = tiny_random_model().generate(prompt_ids(), max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    eos = text[position]
    stock, assisted = run(eos_token_id=eos, return_dict_in_generate=True)
    assert torch.equal(stock.sequences, assisted.sequences)
    assert assisted.sequences[0, -1] == eos
    assert getattr(assisted, CACHE_KEY).get_seq_length() == assisted.sequences.shape[1] - 1
    assert not weaver.stats.last_cut


def test_several_eos_tokens(run):
    text = tiny_random_model().generate(prompt_ids(), max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    stock, assisted = run(eos_token_id=[text[7], text[4]])
    assert torch.equal(stock, assisted)


class StopAfter(StoppingCriteria):
    """Stops on a token, anywhere but in the prompt; keeps the lengths it was asked about."""

    def __init__(self, token):
        self.token, self.lengths = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_custom_criteria_are_asked_after_every_token_and_stop_inside_a_path(run, weaver):
    text = tiny_random_model().generate(prompt_ids(), max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    ours = StopAfter(text[6])
    stock, assisted = run(
        stopping_criteria=StoppingCriteriaList([StopAfter(text[6])]),
        assisted={"stopping_criteria": StoppingCriteriaList([ours]), "return_dict_in_generate": True},
    )
    assert torch.equal(stock, assisted.sequences)
    assert ours.lengths == list(range(10, stock.shape[1] + 1))
    assert getattr(assisted, CACHE_KEY).get_seq_length() == stock.shape[1] - 1


def test_max_time_stops_inside_a_path_and_before_the_second_step(run, monkeypatch):
    import transformers.generation.stopping_criteria as criteria

    class Clock:
        ticks = 0

        @classmethod
        def time(cls):
            cls.ticks += 1
            return cls.ticks

    monkeypatch.setattr(criteria, "time", Clock)
    stock, _ = run(new=12)
    Clock.ticks = 0  # one tick when the criterion is made, then one a token
    _, assisted = run(new=12, assisted={"max_time": 5.5})
    assert assisted.shape[1] == 9 + 6
    assert torch.equal(assisted, stock[:, : 9 + 6])


def test_stop_strings_end_the_text_where_stock_ends_it(trio, monkeypatch):
    model, tokenizer, weaver = trio
    inputs = tokenizer("<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    options = {
        "max_new_tokens": 40,
        "do_sample": False,
        "stop_strings": ["doing well", "am fine"],
        "tokenizer": tokenizer,
    }
    stock = model.generate(**inputs, **options)
    text = stock[0].tolist() + [5] * 20
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: OracleBuilder(text, nodes=12, hit=1.0, vocab=8192))
    monkeypatch.setattr(weaver, "tree_config", TreeConfig(builder="oracle"))
    assisted = model.generate(**inputs, assistant_model=weaver, **options)
    assert torch.equal(stock, assisted)
    assert 0 < assisted.shape[1] - inputs.input_ids.shape[1] < 40, "the stop string must be what ended it"


def test_a_streamer_gets_the_prompt_then_every_run_and_one_end(run, weaver):
    recorder = Recorder()
    _, assisted = run(assisted={"streamer": recorder})
    assert recorder.tokens == assisted[0].tolist()
    assert recorder.ends == 1
    assert [len(put) for put in recorder.puts] == [9, 1, *weaver.stats.runs]


def test_a_text_iterator_streams_what_decoding_gives(trio):
    model, tokenizer, weaver = trio
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=weaver, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, inputs.input_ids.shape[1] :])


def test_scores_and_logits_equal_stock(run):
    stock, assisted = run(
        return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3, min_new_tokens=5
    )
    assert len(assisted.scores) == len(assisted.logits) == NEW
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(assisted, name), getattr(stock, name)):
            assert mine.shape == (1, 128)
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def test_scores_are_logits_where_nothing_processes_them(run):
    _, assisted = run(return_dict_in_generate=True, output_scores=True)
    assert assisted.logits is None
    assert [int(s.argmax()) for s in assisted.scores] == assisted.sequences[0, 9:].tolist()


def test_the_returned_object_and_the_weaver_carry_the_stats(run, weaver):
    _, assisted = run(return_dict_in_generate=True)
    assert assisted.stats is weaver.stats
    assert sum(assisted.stats.runs) + 1 == NEW
    assert set(assisted.stats.seconds) == {"prefill", "draft", "commit", "verify", "accept"}
    assert assisted.stats.best_tree.accepted.sum() == max(assisted.stats.runs)


@pytest.mark.parametrize("length", range(1, 17))
def test_the_returned_cache_continues_in_stock_code_after_a_path_of_any_length(model, weaver, monkeypatch, length):
    """The last step accepts a path of `length` nodes; the cache then continues as a fresh prefill of the text would."""
    stock = tiny_random_model()
    text = stock.generate(prompt_ids(), max_new_tokens=40, do_sample=False)[0].tolist()
    monkeypatch.setitem(BUILDERS, "chains", lambda budget: chain_then(text, [3, 1, length]))
    weaver.tree_config.builder = "chains"
    new = 1 + 3 + 1 + length
    out = model.generate(
        prompt_ids(), max_new_tokens=new, do_sample=False, assistant_model=weaver, return_dict_in_generate=True
    )
    assert weaver.stats.runs == [3, 1, length]
    assert out.sequences[0].tolist() == text[: 9 + new]
    cache = getattr(out, CACHE_KEY)
    assert type(cache) is DynamicCache
    assert cache.get_seq_length() == 9 + new - 1
    mine, _ = path_logits(stock, cache, [text[9 + new - 1]])
    with torch.no_grad():
        fresh = stock(out.sequences).logits[0, -1]
    assert (mine - fresh).abs().max() < 1e-5 * fresh.abs().max()


def test_a_second_turn_continues_the_users_cache(model, weaver):
    stock, first, second = tiny_random_model(), prompt_ids(), prompt_ids(5, seed=4)
    texts = []
    for target, assistant in ((stock, {}), (model, {"assistant_model": weaver})):
        cache = DynamicCache(config=target.config)
        options = {"do_sample": False, CACHE_KEY: cache, **assistant}
        turn = target.generate(first, max_new_tokens=10, **options)
        turn = target.generate(torch.cat([turn, second], 1), max_new_tokens=10, **options)
        assert cache.get_seq_length() == turn.shape[1] - 1
        texts.append(turn)
    assert torch.equal(*texts)


@pytest.mark.parametrize("planes", [3, 4])
def test_position_ids_with_planes_equal_stock(model, weaver, planes):
    ids = prompt_ids()
    positions = torch.arange(9).expand(planes, 1, -1) // torch.tensor([1, 2, 1, 1])[:planes, None, None]
    options = {"max_new_tokens": 12, "do_sample": False, "position_ids": positions}
    assert torch.equal(
        model.generate(ids, assistant_model=weaver, **options), tiny_random_model().generate(ids, **options)
    )


def test_a_builder_can_cost_speed_but_never_change_a_token(model, weaver, monkeypatch):
    stock = tiny_random_model().generate(prompt_ids(), max_new_tokens=NEW, do_sample=False)
    broken = lambda context: TokenTree.from_lists([[3, 4]], [[-1, 0]])  # noqa: E731 - not rooted at the text
    monkeypatch.setitem(BUILDERS, "broken", lambda budget: broken)
    weaver.tree_config.builder = "broken"
    options = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": weaver}
    assert torch.equal(model.generate(prompt_ids(), **options), stock)
    monkeypatch.setitem(BUILDERS, "broken", lambda budget: lambda context: TokenTree.from_lists([[3]] * 2, [[-1]] * 2))
    with pytest.raises(InvalidTreeError, match="2 trees from builder 'broken'"):
        model.generate(prompt_ids(), **options)


def test_what_a_failed_prefill_reports(model, weaver):
    class Raises(LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise RuntimeError("processor")

    with pytest.raises(RuntimeError, match="processor"):
        model.generate(
            prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=weaver, logits_processor=[Raises()]
        )
    assert (weaver.stats.new_tokens, weaver.stats.as_dict()["target_passes"]) == (0, 0)


def test_a_left_padded_prompt_and_inputs_embeds(run, model, weaver):
    ids = torch.cat([torch.full((1, 3), 126), prompt_ids()], 1)
    mask = torch.tensor([[0] * 3 + [1] * 9])
    stock, assisted = run(ids, attention_mask=mask)
    assert torch.equal(stock, assisted)
    embeds = tiny_random_model().get_input_embeddings()(prompt_ids()).detach()
    options = {"inputs_embeds": embeds, "max_new_tokens": 12, "do_sample": False}
    weaver.tree_config.builder = "suffix"
    assert torch.equal(tiny_random_model().generate(**options), model.generate(assistant_model=weaver, **options))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_targets_attention_implementation_is_put_back(attention, monkeypatch):
    model = tiny_random_model(attention)
    weaver = WeaverModel(WeaverConfig()).attach(model)
    stock = tiny_random_model(attention).generate(prompt_ids(), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(model.generate(prompt_ids(), max_new_tokens=NEW, do_sample=False, assistant_model=weaver), stock)
    assert model.config._attn_implementation == attention

    def broken(context):
        raise RuntimeError("broken builder")

    monkeypatch.setitem(BUILDERS, "broken", lambda budget: broken)
    weaver.tree_config.builder = "broken"
    with pytest.raises(RuntimeError, match="broken builder"):
        model.generate(prompt_ids(), max_new_tokens=NEW, do_sample=False, assistant_model=weaver)
    assert model.config._attn_implementation == attention


def test_an_exception_in_a_streamer_leaves_model_and_cache_usable(model, weaver, monkeypatch):
    stock = tiny_random_model()
    text = stock.generate(prompt_ids(), max_new_tokens=NEW, do_sample=False)
    monkeypatch.setitem(BUILDERS, "chains", lambda budget: chain_then(text[0].tolist(), [4] * 9))
    weaver.tree_config.builder = "chains"

    class Leaves(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 4:
                raise KeyboardInterrupt

    streamer, cache = Leaves(), DynamicCache(config=model.config)
    options = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": weaver}
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt_ids(), streamer=streamer, **{CACHE_KEY: cache}, **options)
    emitted = streamer.tokens
    assert emitted == text[0, : len(emitted)].tolist()
    assert cache.get_seq_length() == len(emitted) - 1
    mine, _ = path_logits(stock, cache, emitted[-1:])
    assert int(mine.argmax()) == text[0, len(emitted)]
    assert torch.equal(model.generate(prompt_ids(), **options), text)


def test_tree_config_is_copied_at_the_start_of_a_call(model, weaver):
    generator = WeaverCandidateGenerator(weaver, model.generation_config, model.device)
    weaver.tree_config.budget = 3
    assert generator.tree_config.budget is None
    assert generator.budget == 15


def test_on_a_dense_target_the_stock_loop_takes_the_best_chain():
    """The candidate generator is a real one: transformers' own assisted decoding runs with it."""
    dense = tiny_dense_model(vocab_size=64, eos_token_id=63, pad_token_id=62)
    weaver, used = WeaverModel(WeaverConfig(vocab_size=64)), []

    class Counting(WeaverCandidateGenerator):
        def get_candidates(self, input_ids, **kwargs):
            candidates = super().get_candidates(input_ids, **kwargs)
            used.append(candidates[0].shape[1] - input_ids.shape[1])
            return candidates

    class Dense(Qwen3ForCausalLM):
        def _get_candidate_generator(self, generation_config, **kwargs):
            return Counting(weaver, generation_config, self.device)

    ids = torch.tensor([[3, 9, 4, 3, 9, 4, 3, 9]])
    stock = dense.generate(ids, max_new_tokens=40, do_sample=False)
    dense.__class__ = Dense
    assert torch.equal(dense.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=weaver), stock)
    assert max(used) > 1
    assert len(used) < 40, "some candidates must have been accepted"


def test_candidates_end_at_eos_and_leave_room_for_the_bonus_token(model, weaver):
    config = copy.deepcopy(model.generation_config)
    config.max_length = 12
    ids = torch.tensor([[1, 2, 3, 4, 5, 1, 2]])
    generator = WeaverCandidateGenerator(weaver, config, model.device)
    assert generator.get_candidates(ids)[0].tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1]]
    config._eos_token_tensor = torch.tensor([4])
    generator = WeaverCandidateGenerator(weaver, config, model.device)
    candidates, logits = generator.get_candidates(ids)
    assert candidates.tolist() == [[1, 2, 3, 4, 5, 1, 2, 3, 4]]
    assert logits is None
    generator = WeaverCandidateGenerator(weaver, config, model.device)
    assert generator.get_candidates(torch.tensor([[1, 2, 3]]))[0].tolist() == [[1, 2, 3]], "no match, no candidates"


def test_the_embedded_trio_writes_text_in_fewer_passes(trio):
    model, tokenizer, weaver = trio
    assert AutoTokenizer.from_pretrained(TARGET).get_vocab() == tokenizer.get_vocab()
    prompt = "<|im_start|>user\nHello, how are you?<|im_end|>\n<|im_start|>assistant\n"
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=48, do_sample=False, assistant_model=weaver)
    text = tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert len(text.split()) > 5
    assert weaver.stats.steps + 1 < weaver.stats.new_tokens
