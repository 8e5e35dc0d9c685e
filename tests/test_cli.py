"""`weaver-hf`, as a user runs it: in a process of its own, in a pipe."""

import io
import json
import os
import subprocess
import sys

import huggingface_hub
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from weaver_hf.cli import RunStreamer, app, main
from weaver_hf.tiny import TARGET, WEAVER


def run(*arguments, input=None, **env):
    return subprocess.run(
        [sys.executable, "-m", "weaver_hf", *arguments],
        capture_output=True,
        text=True,
        input=input,
        timeout=300,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **env},
    )


def inside(monkeypatch, capsys, *arguments):
    """The same in this process, for commands that end before any work: exit code and what was printed."""
    monkeypatch.setattr(sys, "argv", ["weaver-hf", *arguments])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr()


def test_demo_shows_both_texts_the_passes_and_a_tree_without_colour_in_a_pipe():
    result = run("demo", "--max-new-tokens", "32")
    assert result.returncode == 0, result.stderr
    assert "\x1b[" not in result.stdout
    assert "identical: yes" in result.stdout
    for part in ("plain", "with the Weaver", "target passes", "tokens a pass", "longest accepted path"):
        assert part in result.stdout
    passes = [
        int(line.split("│")[2])
        for line in result.stdout.splitlines()
        if line.startswith(("│ plain", "│ with the W")) and line.count("│") > 5
    ]
    assert passes[1] < passes[0]


def test_demo_takes_prompts_until_an_empty_one():
    result = run(
        "demo", "--interactive", "--raw", "--max-new-tokens", "6", "--budget", "3", input="def f(x):\nimport os\n\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("identical: yes") == 2


def test_bench_writes_a_table_and_json(tmp_path):
    output = tmp_path / "bench.json"
    result = run(
        "bench", "--domain", "math", "--prompts", "1", "--budget", "7", "--max-new-tokens", "12",
        "--threads", "1", "--json", str(output),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "suffix" in result.stdout
    assert "1/1" in result.stdout
    data = json.loads(output.read_text())
    assert data["settings"]["budgets"] == [7]
    assert data["environment"]["threads"] == 1
    assert data["results"][0]["identical"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--weaver", str(TARGET)], "model_type 'weaver'"),
        (["demo", "--target", "/no/such/[bold]folder"], "/no/such/[bold]folder"),
        (["demo", "--target", str(WEAVER)], "no causal language model"),
        (["demo", "--prompt", "", "--raw"], "a prompt of 0 tokens"),
        (["demo", "--budget", "-1"], "at least 0"),
        (["bench", "--domain", "poetry"], "poetry"),
        (["convert", str(TARGET), "/no/such/folder"], "model_type 'weaver'"),
        (["bench", "--builder", "oak", "--prompts", "1", "--domain", "math", "--max-new-tokens", "2"], "builder 'oak'"),
        (
            [
                "bench",
                "--temperature",
                "1",
                "--acceptance",
                "oak",
                "--prompts",
                "1",
                "--domain",
                "math",
                "--max-new-tokens",
                "2",
            ],
            "unknown rules ['oak']",
        ),
    ],
    ids=[
        "target-as-weaver",
        "no-folder",
        "weaver-as-target",
        "empty-prompt",
        "budget",
        "domain",
        "convert-a-target",
        "builder",
        "acceptance",
    ],
)
def test_a_users_error_is_a_message_and_no_traceback(monkeypatch, capsys, arguments, message):
    code, printed = inside(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("command", [[], ["demo"], ["bench"], ["convert"]])
def test_help_has_an_example(monkeypatch, capsys, command):
    code, printed = inside(monkeypatch, capsys, *command, "--help")
    assert code == 0
    assert not command or "Example:" in printed.out


def test_the_streamer_colours_runs_and_waits_for_whole_characters(trio):
    _, tokenizer, _ = trio
    console = Console(record=True, force_terminal=True, width=200, color_system="truecolor", file=io.StringIO())
    streamer = RunStreamer(tokenizer, console)
    streamer.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in tokenizer("naïve – 漢字").input_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert console.export_text(clear=False).strip() == "naïve – 漢字"
    assert console.export_text(styles=True).count("\x1b[") > 3


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        (["bench"], "--acceptance", "copuled"),
        (["train", "drafter", "--data", "x", "--out", "x"], "--optimizer", "moun"),
        (["train", "drafter", "--data", "x", "--out", "x"], "--weighting", "even"),
        (["train", "adapter", "--drafter", "x", "--data", "x", "--out", "x"], "--loss", "lkk"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_choice_is_refused_before_anything_is_loaded(command, option, value):
    result = CliRunner().invoke(app, [*command, option, value], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert option in result.output
    assert value in result.output
