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
        (["train", "drafter", "--data", "x", "--out", "x", "--heads", "3", "--kv-heads", "2"], "3 attention heads"),
        (["doctor", str(WEAVER)], "no causal language model"),
        (["certify", "--text", "/no/such/file"], "/no/such/file"),
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
        "heads",
        "doctor",
        "certify",
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


COMMANDS = [
    *(["demo"], ["bench"], ["convert"], ["doctor"], ["certify"]),
    *(["train", "data"], ["train", "drafter"], ["train", "adapter"]),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(monkeypatch, capsys, command):
    code, printed = inside(monkeypatch, capsys, *command, "--help")
    assert code == 0
    assert "Example:" in printed.out
    assert "--json" in printed.out


def test_certify_replays_what_it_wrote_and_finds_a_changed_token(monkeypatch, capsys, tmp_path):
    saved = tmp_path / "texts.json"
    options = ["--prompt", "Once upon a time", "--max-new-tokens", "6"]
    code, printed = inside(monkeypatch, capsys, "certify", *options, "--json", str(saved))
    assert code == 0, printed.err
    assert "identical" in printed.out
    data = json.loads(saved.read_text())
    data["texts"][0]["output_ids"][3] = 300
    saved.write_text(json.dumps(data))
    code, printed = inside(monkeypatch, capsys, "certify", "--text", str(saved), "--json", "-")
    assert code == 1
    assert json.loads(printed.out)["texts"][0]["first"] == 3
    assert "NOT the target's text" in printed.err


def test_doctor_names_an_artifact_that_does_not_load_and_exits_with_1(monkeypatch, capsys):
    code, printed = inside(monkeypatch, capsys, "doctor", str(TARGET), str(TARGET), "--json", "-")
    assert code == 1
    (finding,) = json.loads(printed.out)["findings"]
    assert (finding["name"], finding["status"]) == ("artifact", "fault")
    assert "model_type" in finding["found"]


@pytest.mark.slow
def test_doctor_says_that_the_embedded_trio_is_healthy(monkeypatch, capsys):
    code, printed = inside(monkeypatch, capsys, "doctor", "--json", "-")
    assert code == 0, printed.err
    data = json.loads(printed.out)
    assert data["healthy"]
    assert {finding["status"] for finding in data["findings"]} == {"ok"}


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
