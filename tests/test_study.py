"""The study of acceptance: its replay of known texts, its oracle, its counts and its intervals."""

import json
import math
from dataclasses import replace

import pytest
import torch
from study_acceptance import Bootstrap, Counts, as_json, depth_table, from_json, run_study, tables_of
from study_oracle import CommittedTexts, TargetScorer
from study_replay import Recording, Setting, by_depth, oracle_trees, replay, walk, write_text
from support import prompt_ids

from weaver_hf.bench import load_prompts
from weaver_hf.proposal.conditional import grow


def texts_of(trio, settings, temperature, new_tokens, domains=("gsm8k", "chat")):
    model, tokenizer, weaver = trio
    prompts = load_prompts(domains, 1)
    return [
        write_text(model, tokenizer, weaver, p, s, temperature=temperature, new_tokens=new_tokens, seed=i)
        for i, (p, s) in enumerate(zip(prompts, settings))
    ]


@pytest.mark.parametrize(
    ("temperature", "settings"),
    [
        (0.0, [Setting("weaver", 15, "greedy"), Setting("suffix", 7, "greedy")]),
        (0.0, [Setting("marginal", 17, "greedy"), Setting("chain", 7, "greedy")]),
        (1.0, [Setting("weaver", 15, "sample", pool=40, rounds=5, children=3), Setting("marginal", 5, "coupled")]),
        (0.7, [Setting("weaver-paper", 17, "coupled"), Setting("weaver", 7, "coupled")]),
    ],
)
def test_a_replay_gives_the_runs_of_generate(trio, temperature, settings):
    model, _, weaver = trio
    texts = texts_of(trio, settings, temperature, 18)
    recording = Recording(model, weaver, texts)
    for i, setting in enumerate(settings):
        assert replay(recording, setting)[i] == texts[i].runs, setting
    assert all(sum(text.runs) == len(text.ids) - text.prompt_length - 1 for text in texts)


def test_the_oracle_scores_by_what_stock_decoding_would_give_along_each_path(model, weaver):
    texts = [prompt_ids(9).tolist()[0], prompt_ids(14, seed=1).tolist()[0]]
    target = CommittedTexts(model, texts, [4, 6])
    target.move([1], [8])  # the other stays
    target.move([0, 1], [6, 10])
    assert target.places == [6, 10]
    pools = torch.rand(2, 4, 120, generator=torch.Generator().manual_seed(3)).topk(11, -1).indices
    asked = []

    class Checked(TargetScorer):
        def __call__(self, token_ids, depths, ancestors, first):
            out = super().__call__(token_ids, depths, ancestors, first)
            for row, text in enumerate(texts):
                for i in range(token_ids.shape[1]):
                    path = self._tokens[row][ancestors[row, i, : self._tokens.shape[1]]].tolist()
                    whole = torch.tensor([text[: target.places[row]] + path])
                    with torch.no_grad():
                        law = (model(whole).logits[0, -1] / 0.8).log_softmax(-1)
                    expected = law[pools[row, min(int(depths[row, i]), 3)]]
                    torch.testing.assert_close(out[row, i], expected, rtol=1e-4, atol=1e-4)
                    asked.append(len(path))
            return out

    anchors = torch.tensor([[text[place]] for text, place in zip(texts, target.places)])
    grow(pools, anchors, Checked(target, pools, 0.8), 9, [1, 3, 3], 4, prune=True)
    assert len(asked) == 14
    assert max(asked) > 2


def test_where_the_choice_is_known_the_oracle_accepts_the_text_inside_the_pools(trio):
    """As the temperature falls the target's own tree becomes the path of its choices."""
    model, _, weaver = trio
    texts = texts_of(trio, [Setting("chain", 7, "greedy")] * 2, 0.0, 14)
    recording = Recording(model, weaver, texts)
    setting = Setting("oracle", 4, "greedy")
    gold = replay(recording, setting)
    assert max(max(runs) for runs in gold) == 5, "the budget bounds a step"
    recording.temperature = 1e-3
    assert walk(texts, oracle_trees(recording, setting)) == gold
    assert all(sum(small) == sum(large) and len(small) >= len(large)
               for small, large in zip(gold, replay(recording, Setting("oracle", 15, "greedy"))))  # fmt: skip


def test_a_text_that_ends_at_once_has_no_steps(trio):
    model, _, weaver = trio
    texts = texts_of(trio, [Setting("chain", 3, "sample")] * 2, 1.0, 6)
    texts[1] = replace(texts[1], ids=texts[1].ids[: texts[1].prompt_length + 1], ended=True)
    assert [text.has_steps for text in texts] == [True, False]
    for order in (texts, texts[::-1]):  # nothing of it shifts the others' rows
        recording = Recording(model, weaver, order)
        for builder in ("suffix", "marginal", "weaver", "oracle"):
            runs = replay(recording, Setting(builder, 2, "sample"))
            assert [sum(row) for row in runs] == [5 if text.has_steps else 0 for text in order]
        assert by_depth(recording, loop_free=False)["tokens"].tolist() == [5, 4, 3, 2, 1] + [0] * 10


def test_counts_by_depth_are_those_of_a_loop_over_the_text(trio):
    model, _, weaver = trio
    texts = texts_of(trio, [Setting("suffix", 3, "greedy")] * 2, 0.0, 10)
    texts[1].onset = 4
    recording = Recording(model, weaver, texts)
    counts = by_depth(recording, loop_free=True)
    block = recording.blocks(coupled=False)
    expected = {name: [0] * 15 for name in ("tokens", "pool 32", "spine", "spine marginals", "sibling")}
    row = 0
    for text in texts:
        output = text.ids[text.prompt_length :]
        for place in range(len(output) - 1):
            ids = block.token_ids[row].tolist()
            on_spine = reached = last = True
            for depth, token in enumerate(output[place + 1 : place + 16]):
                if place + 1 + depth < text.onset:
                    expected["tokens"][depth] += 1
                    expected["pool 32"][depth] += token in ids[depth][:32]
                    expected["spine"][depth] += on_spine
                    expected["spine marginals"][depth] += on_spine and token == ids[depth][0]
                    expected["sibling"][depth] += reached and not last
                last = token == ids[depth][0]
                on_spine, reached = on_spine and last, reached and token in ids[depth]
            row += 1
    for name, count in expected.items():
        assert counts[name].tolist() == count, name
    assert counts["spine target"].tolist() == counts["spine"].tolist(), "greedy text is the target's first choice"
    assert int(counts["spine"].sum()) > 0
    assert int(counts["sibling"].sum()) > 0
    assert len(depth_table("T = 0", counts).header) == 16


def runs(accepted):
    return [[a + 1 for a in row] for row in accepted]


DOMAINS = ["math", "math", "chat", "chat", "chat"]
MARGINAL = Counts.of(runs([[1, 1], [1], [2, 0], [1, 1, 1], []]))
WEAVER = Counts.of(runs([[2, 2], [2], [4, 0], [2, 2, 2], []]))
ORACLE = Counts.of(runs([[3], [3], [3], [3, 3], []]))


def test_the_gap_is_the_share_of_what_the_oracle_adds():
    bootstrap = Bootstrap(DOMAINS)
    assert bootstrap.gap(WEAVER, MARGINAL, ORACLE).value == pytest.approx(0.5)
    assert bootstrap.gap(ORACLE, MARGINAL, ORACLE) == pytest.approx((1, 1, 1))
    assert bootstrap.gap(MARGINAL, MARGINAL, ORACLE) == pytest.approx((0, 0, 0))
    ratio = bootstrap.ratio(WEAVER, MARGINAL)
    assert ratio == pytest.approx((2, 2, 2))
    four_and_one = Counts.of(runs([[4], [4], [1], [1], [1]]))
    assert bootstrap.ratio(four_and_one, Counts.of(runs([[1]] * 5))).value == pytest.approx(2), (
        "geometric, a domain each"
    )
    assert str(bootstrap.mean(MARGINAL, "math")) == "1.00 [1.00, 1.00]"


def test_intervals_come_from_prompts_drawn_within_their_domains():
    bootstrap = Bootstrap(DOMAINS, seed=1)
    assert bootstrap.draws.shape == (2000, 5)
    assert bootstrap.draws[:, :2].max() == 1
    assert bootstrap.draws[:, 2:].min() == 2
    assert bootstrap.draws.unique(dim=0).shape[0] == 2**2 * 3**3
    spread = Counts.of(runs([[0], [4], [1], [1], [1]]))
    low, high = bootstrap.mean(spread, "math")[1:]
    assert (low, high) == (0, 4)
    assert str(bootstrap.mean(Counts.of([[]] * 5))) == "", "nothing was counted"
    assert math.isnan(bootstrap.mean(Counts.of([[]] * 5)).value)


def test_a_small_study_from_prompts_to_tables_in_two_parts(trio, tmp_path):
    model, tokenizer, weaver = trio
    before = weaver.tree_config
    paths = []
    for domain in ("math", "chat"):
        results = run_study(model, tokenizer, weaver, load_prompts([domain], 1), budgets=[3], new_tokens=7)
        assert (results.replayed, results.different) == (2, 0)
        about = {"environment": {}, "settings": {"temperature": 1.0}, "seconds": 1.0, "replayed": 2, "different": 0}
        paths.append(tmp_path / f"{domain}.json")
        paths[-1].write_text(json.dumps(as_json(results, [], about)))
    assert weaver.tree_config is before
    whole, about = from_json(paths)
    assert whole.domains == ["math", "chat"]
    assert about["replayed"] == 4
    assert all(len(rows) == 2 for rows in whole.runs.values())
    assert len(whole.runs) == 6 + 5 + 6 + 6, "every builder in every column; suffix cannot be coupled"
    tables = tables_of(whole, [3], 3, ablated=False, seed=0)
    assert len(tables) == 4 + 4 + 3
    assert [row[0] for row in tables[0].rows][:6] == ["suffix", "chain", "marginal", "weaver-paper", "weaver", "oracle"]
    assert all(len(row) == len(table.header) for table in tables for row in table.rows)
    assert tables[0].markdown().count("\n| ") == 2 + len(tables[0].rows)
    other = json.loads(paths[1].read_text())
    other["settings"]["temperature"] = 0.5
    paths[1].write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"chat\.json"):
        from_json(paths)
