"""Timing: planted acceptance, what it takes, and reports, on small models without a GPU."""

import json

import pytest
import torch
from support import random_tree
from typer.testing import CliRunner

from weaver_hf.acceptance import follow, plant
from weaver_hf.bench.shapes import SHAPES, random_pair
from weaver_hf.bench.speed import Method, Row, acceptance_for, measure, weight_bytes
from weaver_hf.cli import app
from weaver_hf.cli_speed import draw

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@pytest.mark.parametrize(("probability", "expected"), [(0.0, 1), (1.0, 9)])
def test_a_planted_acceptance_follows_the_best_children(probability: float, expected: int) -> None:
    tree = random_tree(9, "chain")
    never = torch.full((1, 9), 10**6)
    assert follow(tree, plant(tree, never, probability)).lengths.tolist() == [expected]


def test_a_planted_acceptance_accepts_as_often_as_it_says() -> None:
    torch.manual_seed(0)
    tree, never = random_tree(16, "chain"), torch.full((1, 16), 10**6)
    lengths = torch.stack([follow(tree, plant(tree, never, acceptance_for(6.0, 15))).lengths for _ in range(600)])
    assert abs(float(lengths.float().mean()) - 6.0) < 0.5


@pytest.mark.parametrize("tokens", [1.0, 4.0, 8.07, 15.9])
def test_the_probability_that_is_planted_gives_the_tokens_that_were_asked_for(tokens: float) -> None:
    p = acceptance_for(tokens, 15)
    assert abs(1 + sum(p**d for d in range(1, 16)) - tokens) < 1e-6


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_shape_decodes_plain_and_with_planted_trees(shape: str) -> None:
    changes = dict(SMALL)
    if SHAPES[shape].experts:
        changes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        changes |= {"shared_expert_intermediate_size": 32, "intermediate_size": 96}
    model, weaver = random_pair(shape, "cpu", torch.float32, **changes)
    ids = torch.arange(2, 12)[None]
    methods = [Method("plain", "chain", 0), Method("weaver 7", "weaver", 7, planted=1.0)]
    plain, planted = measure(model, weaver, {"ten": [ids]}, methods, new_tokens=12)
    assert plain.steps == 11
    assert planted.steps < 11
    assert planted.synthetic
    assert not plain.synthetic
    assert weaver.planted_acceptance is None
    stock = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=weaver), stock)
    assert not weaver.stats.lossy


def test_the_floor_counts_every_weight_that_a_pass_reads() -> None:
    model, _ = random_pair("9b", "cpu", torch.float32, **SMALL)
    everything = sum(p.numel() for p in model.parameters())
    assert weight_bytes(model) == 4 * (everything - 512 * 64)


def test_a_report_of_the_embedded_trio(tmp_path) -> None:
    path = tmp_path / "speed.json"
    arguments = ["bench", "--speed", "--domain", "math", "--prompts", "1", "--max-new-tokens", "8", "--no-stock"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == ["AR captured", "chain 7", "chain 15", "marginal 63", "weaver 63"]
    assert all(row["tokens_per_second"] > 0 and not row["synthetic"] for row in rows)


def test_a_picture_of_a_report(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    rows = [Row(m, g, 1, 9, 4, 2.0, 1.0, 0.0, {}, m == "b") for m in ("a", "b") for g in ("x", "y")]
    draw(rows, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "arguments", [["--shape", "9b"], ["--shape", "5b", "--random-weights"], ["--context", "100"], ["--levers"]]
)
def test_timing_options_that_say_nothing_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 2
