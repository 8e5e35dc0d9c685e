"""Sampling through `generate`: one text whatever drafts it, its law, and what a user sees of it."""

import copy
import itertools
import warnings

import pytest
import torch
from support import (
    OracleBuilder,
    adapter_config,
    bench_prompts,
    chi_square_p,
    prompt_ids,
    random_weaver,
    stock_model,
    tiny_random_model,
)
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, set_seed

from weaver_hf.bench import DOMAINS
from weaver_hf.noise import gumbel, row_seeds
from weaver_hf.proposal import BUILDERS
from weaver_hf.target.compat import CACHE_KEY

NEW = 24


def draw(model, weaver, ids=None, seed=7, new=NEW, builder="suffix", budget=9, acceptance=None, **options):
    """A sampled text of the Weaver with these tree settings; budget 0 is plain decoding."""
    weaver.tree_config.builder, weaver.tree_config.budget = builder, budget
    weaver.tree_config.acceptance = acceptance
    ids = prompt_ids() if ids is None else ids
    torch.manual_seed(seed)
    return model.generate(ids, **{"do_sample": True, "max_new_tokens": new, "assistant_model": weaver, **options})


@pytest.fixture
def drafting():
    """A random hybrid and a random drafter and adapter attached to it."""
    model = tiny_random_model()
    return model, random_weaver(adapter=adapter_config("rope")).attach(model)


PROCESSED = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 0},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.1},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    {"repetition_penalty": 1.5, "top_p": 0.9},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [7, 9]], "suppress_tokens": [1, 2]},
    {"sequence_bias": {(3,): 2.0}, "renormalize_logits": True},
    {"guidance_scale": 1.5},
    {"min_new_tokens": 12, "eos_token_id": list(range(20, 60))},
    {"forced_eos_token_id": 11},
]


@pytest.mark.parametrize("options", PROCESSED, ids=lambda o: "+".join(o) or "plain")
def test_every_way_to_draft_draws_the_same_text(drafting, monkeypatch, options):
    plain = draw(*drafting, budget=0, **options)
    assert drafting[1].stats.drafted_nodes == 0
    oracle = OracleBuilder(plain[0].tolist(), nodes=[9, 1, 5], hit=0.8)
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: oracle)
    for builder, acceptance in [
        ("oracle", None), ("suffix", None), ("chain", None), ("chain", "sample"), ("marginal", None),
        ("marginal", "sample"), ("weaver", None), ("weaver", "sample"), ("weaver-paper", None),
    ]:  # fmt: skip
        assert torch.equal(draw(*drafting, builder=builder, acceptance=acceptance, **options), plain), (
            builder,
            acceptance,
        )
        if builder == "oracle" and plain.shape[1] > 20:
            assert drafting[1].stats.accepted_per_step > 0.3


def test_a_sequential_processor_that_does_nothing_changes_nothing(drafting):
    """All nodes at once and one prefix at a time are two ways to the same text."""

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    options = {"temperature": 0.8, "top_p": 0.9, "builder": "marginal"}
    slow = draw(*drafting, logits_processor=LogitsProcessorList([Nothing()]), **options)
    assert torch.equal(draw(*drafting, **options), slow)


def test_processors_see_each_visited_prefix_once_and_in_order(drafting, monkeypatch):
    class Spy(LogitsProcessor):
        prefixes = []

        def __call__(self, input_ids, scores):
            self.prefixes.append(input_ids[0].tolist())
            return scores

    oracle = OracleBuilder(draw(*drafting, budget=0)[0].tolist(), nodes=9, hit=0.8)
    monkeypatch.setitem(BUILDERS, "oracle", lambda budget: oracle)
    text = draw(*drafting, builder="oracle", logits_processor=LogitsProcessorList([Spy()]))[0].tolist()
    assert Spy.prefixes == [text[:n] for n in range(9, len(text))]
    assert drafting[1].stats.accepted_per_step > 0.3


def test_with_one_token_kept_it_is_stocks_greedy_text(drafting):
    stock = tiny_random_model().generate(prompt_ids(), max_new_tokens=NEW, do_sample=False)
    assert torch.equal(draw(*drafting, builder="marginal", top_k=1), stock)


def test_scores_are_those_of_stock_processors_after_the_same_prefixes(drafting):
    out = draw(*drafting, builder="marginal", temperature=0.7, top_p=0.9, return_dict_in_generate=True,
               output_scores=True, output_logits=True)  # fmt: skip
    with torch.no_grad():
        logits = tiny_random_model()(out.sequences).logits[0, 8:-1]
    config = copy.deepcopy(drafting[0].generation_config)
    config.do_sample, config.temperature, config.top_p, config.top_k = True, 0.7, 0.9, 50
    expected = drafting[0]._get_logits_processor(config)(out.sequences, logits)
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(out.scores), expected, atol=2e-5, rtol=1e-4)


def test_set_seed_reproduces_a_text_and_other_seeds_give_others(drafting):
    set_seed(3)
    first = draw(*drafting, seed=3)
    assert torch.equal(draw(*drafting, seed=3), first)
    texts = {tuple(draw(*drafting, seed=seed)[0].tolist()) for seed in range(5)}
    assert len(texts) == 5
    torch.manual_seed(3)
    options = {"do_sample": True, "max_new_tokens": NEW, "assistant_model": drafting[1]}
    one, two = (drafting[0].generate(prompt_ids(), **options) for _ in range(2))
    assert torch.equal(one, first)
    assert not torch.equal(one, two), "the second call of a process draws anew"


def test_greedy_decoding_leaves_torchs_generator_alone(drafting):
    state = torch.get_rng_state()
    draw(*drafting, seed=0, do_sample=False)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state())
    torch.set_rng_state(state)
    drafting[0].generate(prompt_ids(), do_sample=False, max_new_tokens=4, assistant_model=drafting[1])
    assert torch.equal(torch.get_rng_state(), state)


# ---- the position of a token is its place in the text without padding ----


def test_a_text_can_be_resumed_anywhere_with_the_same_seed(drafting):
    whole = draw(*drafting, builder="marginal")
    for cut in (10, 17, 30):
        assert torch.equal(draw(*drafting, whole[:, :cut], builder="chain", new=9 + NEW - cut), whole)


def test_left_padding_embeddings_and_a_continued_cache_move_no_noise(drafting):
    model = drafting[0]
    text = draw(*drafting)
    padded = torch.cat([torch.full((1, 3), 126), prompt_ids()], 1)
    mask = torch.tensor([[0] * 3 + [1] * 9])
    assert torch.equal(draw(*drafting, padded, attention_mask=mask)[:, 3:], text)
    embeds = model.get_input_embeddings()(prompt_ids()).detach()
    torch.manual_seed(7)
    options = {"do_sample": True, "max_new_tokens": NEW, "assistant_model": drafting[1]}
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), text[:, 9:])
    cache = DynamicCache(config=model.config)
    first = draw(*drafting, new=8, **{CACHE_KEY: cache})
    assert torch.equal(draw(*drafting, first, new=NEW - 8, **{CACHE_KEY: cache}), text)


# ---- several sequences ----


def test_each_returned_sequence_is_the_same_however_many_there_are(drafting):
    eos = {"eos_token_id": list(range(0, 120, 9)), "pad_token_id": 126}
    three = draw(*drafting, builder="marginal", num_return_sequences=3, **eos)
    five = draw(*drafting, builder="suffix", num_return_sequences=5, **eos)
    one = draw(*drafting, builder="chain", **eos)
    assert (three.shape[0], five.shape[0]) == (3, 5)
    width = min(three.shape[1], five.shape[1])
    assert torch.equal(three[:, :width], five[:3, :width])
    assert torch.equal(three[0, : one.shape[1]], one[0])
    rows = [row[9:].tolist() for row in five]
    assert len({tuple(row) for row in rows}) == 5
    for row in rows:
        ends = [i for i, token in enumerate(row) if token in eos["eos_token_id"]]
        if ends:
            assert set(row[ends[0] + 1 :]) <= {126}, "filled up with the padding token"
    assert len({len([t for t in row if t != 126]) for row in rows}) > 1


def test_the_output_of_several_sequences_has_a_row_for_each(drafting):
    model, weaver = drafting
    out = draw(model, weaver, builder="marginal", num_return_sequences=3, return_dict_in_generate=True,
               output_scores=True, output_logits=True, eos_token_id=list(range(0, 120, 9)), pad_token_id=126)  # fmt: skip
    tokens = out.sequences[:, 9:]
    assert len(out.scores) == len(out.logits) == tokens.shape[1]
    assert all(x.shape == (3, 128) for x in (*out.scores, *out.logits))
    gains = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert gains.isfinite().all(), "also behind the end of a text"
    assert getattr(out, CACHE_KEY) is None
    assert out.stats is weaver.stats
    assert out.stats.new_tokens == int((tokens != 126).sum())
    assert out.stats.target_passes == out.stats.steps + 1, "one prefill for all"


def test_returned_sequences_have_processors_of_their_own(drafting):
    """One that remembers what it has seen must start anew with every text."""

    class Follows(LogitsProcessor):
        length = None

        def __call__(self, input_ids, scores):
            assert input_ids.shape[1] == (9 if self.length is None else self.length + 1)
            self.length = input_ids.shape[1]
            return scores

    three = draw(*drafting, num_return_sequences=3, logits_processor=LogitsProcessorList([Follows()]))
    assert torch.equal(three, draw(*drafting, num_return_sequences=3, builder="marginal"))
    guided = draw(*drafting, num_return_sequences=2, guidance_scale=1.5)  # keeps a cache of its own, and the model
    assert torch.equal(guided[:1], draw(*drafting, guidance_scale=1.5, builder="marginal"))


# ---- rules ----


def test_a_lossy_text_says_so(drafting):
    plain = draw(*drafting, builder="marginal")
    assert not drafting[1].stats.lossy
    drafting[1].tree_config.lossy_margin = 3.0
    lossy = draw(*drafting, builder="marginal", acceptance="lossy_margin")
    assert drafting[1].stats.lossy
    assert drafting[1].stats.as_dict()["lossy"]
    assert not torch.equal(lossy, plain)
    drafting[1].tree_config.lossy_margin = 0.0
    assert torch.equal(draw(*drafting, builder="marginal", acceptance="lossy_margin"), plain)


def test_coupled_drafts_guess_more_of_the_draws(trio, monkeypatch):
    model, _, weaver = trio
    monkeypatch.setattr(weaver, "tree_config", copy.copy(weaver.tree_config))
    accepted = {"sample": [], "coupled": []}
    for index, rule in itertools.product((0, 60, 150), accepted):
        draw(model, weaver, bench_prompts()[index][1], new=32, builder="marginal", budget=15, acceptance=rule, top_k=0)
        accepted[rule] += weaver.stats.whole_runs
    mean = {rule: sum(runs) / len(runs) - 1 for rule, runs in accepted.items()}
    assert mean["coupled"] > 1.1 * mean["sample"]


def test_budget_0_decodes_token_by_token_without_the_drafter(drafting, monkeypatch):
    model, weaver = drafting
    greedy = tiny_random_model().generate(prompt_ids(), max_new_tokens=NEW, do_sample=False)
    monkeypatch.setattr(weaver, "draft", None)
    assert torch.equal(draw(model, weaver, builder="marginal", budget=0, do_sample=False), greedy)
    assert weaver.stats.runs == [1] * (NEW - 1)
    monkeypatch.undo()
    cache = DynamicCache(config=model.config)  # the drafter has read the text all the same
    first = draw(model, weaver, builder="marginal", budget=0, do_sample=False, new=8, **{CACHE_KEY: cache})
    draw(model, weaver, first, builder="marginal", do_sample=False, new=NEW - 8, **{CACHE_KEY: cache})
    continued = weaver.stats.runs
    draw(model, weaver, first, builder="marginal", do_sample=False, new=NEW - 8)
    assert weaver.stats.runs == continued


# ---- the law ----


@pytest.mark.parametrize(
    "texts", [pytest.param(150, id="150"), pytest.param(5000, id="5000", marks=[pytest.mark.slow, pytest.mark.once])]
)
def test_texts_of_four_tokens_have_the_targets_law(texts):
    """Coupled trees of three nodes, so that most texts need a commit and some end inside an accepted path."""
    shape = {"vocab_size": 8, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
             "eos_token_id": None, "pad_token_id": 0}  # fmt: skip
    options = {"top_k": 0, "top_p": 0.95, "temperature": 0.8}
    mask = torch.ones(1, 9, dtype=torch.long)  # `generate` would take the prompt's zeros for padding
    model = tiny_random_model(**shape)
    weaver = random_weaver(vocab_size=8, mask_token_id=7, block_size=5, target_layer_ids=[0]).attach(model)
    ids = prompt_ids(vocab=8)
    drawn = draw(model, weaver, ids, new=4, builder="marginal", budget=3, num_return_sequences=texts,
                 attention_mask=mask, **options)  # fmt: skip
    ends = set(itertools.accumulate(weaver.stats.runs))
    steps = [sum(3 * i < end <= 3 * i + 3 for end in ends) for i in range(texts)]
    assert sum(count > 1 for count in steps) > texts / 2, "most cross a commit"
    assert sum(count < 3 for count in steps) > texts / 10, "and many accept something"

    every = torch.tensor(list(itertools.product(range(8), repeat=4)))
    with torch.no_grad():
        logits = tiny_random_model(**shape)(torch.cat([ids.expand(len(every), -1), every], 1)).logits[:, 8:-1]
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=True, **options)
    scores = model._get_logits_processor(config)(ids, logits.reshape(-1, 8)).double().softmax(-1)
    law = scores.view(-1, 4, 8).gather(-1, every[..., None]).prod(1)[:, 0]
    cells = (drawn[:, 9:] * torch.tensor([512, 64, 8, 1])).sum(-1)
    assert chi_square_p(torch.bincount(cells, minlength=8**4), law / law.sum()) > 1e-3 / 2
    if texts == 5000:  # it can fail: of a law at a temperature of 0.64 it would not have been convinced
        steeper = law**1.25 / (law**1.25).sum()
        assert chi_square_p(torch.bincount(cells, minlength=8**4), steeper) < 1e-6


# ---- the embedded model ----


class InTurn:
    """Another builder at every step."""

    needs_block = needs_adapter = True

    def __init__(self, budget):
        self.builders = itertools.cycle([BUILDERS[name](budget) for name in ("marginal", "chain", "suffix", "weaver")])

    def __call__(self, context):
        return next(self.builders)(context)


def drawn_from_stock(ids, length, seed, temperature):
    """What stock logits and the noise give after each prefix of a text, and how far the runner-up is behind."""
    torch.manual_seed(seed)
    row = row_seeds(int(torch.randint(2**63 - 1, ())), 1)
    with torch.no_grad():
        logits = stock_model()(ids).logits[:, length - 1 : -1]
    sums = logits / temperature + gumbel(row, torch.arange(length, ids.shape[1])[None], logits.shape[-1])
    top = sums.topk(2)
    return top.indices[0, :, 0].tolist(), (top.values[0, :, 0] - top.values[0, :, 1]).tolist()


def cases():
    for index, temperature in itertools.product(range(30 * len(DOMAINS)), (0.7, 1.0)):
        domain, number = DOMAINS[index // 30], index % 30
        fast = (domain, number, temperature) in (("math", 0, 0.7), ("humaneval", 0, 1.0), ("chat", 0, 1.0))
        ways = ("plain", "suffix", "chain", "marginal", "marginal-sample", "weaver", "weaver-sample")
        ways = ways if fast else ("in-turn",) if number % 2 else ("in-turn-sample",)
        if not fast and number % 8 not in ((0, 3) if temperature == 0.7 else (4, 7)):
            continue  # half of the prompts, each at one of them, each way to accept at both
        marks = [] if fast else [pytest.mark.slow, pytest.mark.once]
        yield pytest.param(index, temperature, ways, id=f"{domain}-{number:02d}-T{temperature}", marks=marks)


@pytest.mark.parametrize(("index", "temperature", "ways"), list(cases()))
def test_sampled_text_of_the_embedded_model_is_what_stock_logits_and_the_noise_give(
    trio, monkeypatch, index, temperature, ways
):
    """In fp32, with one seed: the text of every builder, and of plain decoding, token for token, from all of its law.

    A difference counts unless two sums of score and noise are closer than 1e-4 there.
    """
    model, _, weaver = trio
    monkeypatch.setattr(weaver, "tree_config", copy.copy(weaver.tree_config))
    monkeypatch.setitem(BUILDERS, "in-turn", InTurn)
    domain, ids = bench_prompts()[index]
    length = ids.shape[1]
    for way in ways:
        builder = way.removesuffix("-sample")
        tree = {"builder": builder, "budget": 15, "acceptance": None if way == builder else "sample"}
        tree = {"budget": 0} if way == "plain" else tree
        text = draw(
            model, weaver, ids, seed=index, new=64 if len(ways) > 1 else 32, temperature=temperature, top_k=0, **tree
        )
        expected, gaps = drawn_from_stock(text, length, index, temperature)
        wrong = [i for i, (a, b) in enumerate(zip(text[0, length:].tolist(), expected)) if a != b]
        if wrong:
            assert gaps[wrong[0]] < 1e-4, f"{domain}, {way}: token {wrong[0]} differs at a gap of {gaps[wrong[0]]:.2e}"
            warnings.warn(f"near tie: {domain} prompt {index}, token {wrong[0]}", stacklevel=1)
        assert len(set(text[0, length:].tolist())) > 1
