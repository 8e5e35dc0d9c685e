"""The loop that both trainers share: rate, optimizers, divergence, and several processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from accelerate import Accelerator

from weaver_hf.training.data import Sequences
from weaver_hf.training.loop import Clock, TrainConfig, TrainingDivergedError, make_optimizers, run, training_batches


def clock_at(anchors=0, seconds=0.0, **settings):
    clock = Clock(TrainConfig(**{"anchors": 1000, "warmup": 0.1, "decay": 0.4, **settings}), Accelerator(cpu=True))
    clock.anchors, clock.seconds = anchors, seconds
    return clock


@pytest.mark.parametrize(
    ("anchors", "rate"), [(0, 1e-3), (50, 0.5), (100, 1.0), (599, 1.0), (800, 0.5), (1000, 0.0), (1200, -0.5)]
)
def test_the_rate_warms_up_stays_and_decays_to_nothing(anchors, rate):
    assert clock_at(anchors).rate() == pytest.approx(rate, abs=1e-3)


def test_time_ends_a_run_that_anchors_would_not():
    assert clock_at(10, seconds=9.0, max_seconds=10.0).rate() == pytest.approx(0.25)
    assert clock_at(10, seconds=11.0, max_seconds=10.0).rate() < 0


def test_muon_takes_the_matrices_and_adamw_the_rest():
    network = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    network[0].weight.requires_grad_(True)
    muon, adamw = make_optimizers(network, TrainConfig())
    assert [p.shape for g in muon.param_groups for p in g["params"]] == [(7, 5)]
    assert [p.shape for g in adamw.param_groups for p in g["params"]] == [(7,)] * 3
    (alone,) = make_optimizers(network, TrainConfig(optimizer="adamw"))
    assert sum(len(g["params"]) for g in alone.param_groups) == 4
    network[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="expected 'muon' or 'adamw'"):
        make_optimizers(network, TrainConfig(optimizer="sgd"))


def sequences(count=23):
    lengths = torch.full((count,), 9)
    return Sequences(
        torch.arange(count * 9) % 50, torch.arange(count) * 9, lengths, torch.full((count,), 3), torch.zeros(count)
    )


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_sequences_without_overlap_and_take_as_many_steps(processes):
    data, config = sequences(), TrainConfig(batch_size=2, width=9)
    seen = []
    for index in range(processes):
        fake = type("Fake", (), {"num_processes": processes, "process_index": index})()
        stream = training_batches(20, data, config, 0, fake, clock_at())
        epoch = 20 // processes // 2
        seen.append(
            [tuple(row) for _ in range(epoch) for row in next(stream)["input_ids"][:, 0].tolist() for row in [[row]]]
        )
    assert len({len(rows) for rows in seen}) == 1
    flat = [row for rows in seen for row in rows]
    assert len(flat) == len(set(flat))


def test_a_loss_that_is_no_number_ends_the_run_before_its_state_is_saved(tmp_path):
    network = nn.Linear(3, 3)
    with pytest.raises(TrainingDivergedError, match=r"a loss of nan after .* anchors"):
        run(
            network,
            lambda net, batch: net(torch.ones(1, 3)).sum() * float("nan"),
            dict,
            sequences(),
            tmp_path,
            TrainConfig(anchors=64, batch_size=2, anchors_per_sequence=4, held_out=3, width=9),
            Accelerator(cpu=True),
            pad=0,
        )
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
@pytest.mark.once
def test_two_processes_train_as_one_run(tmp_path):
    """`accelerate launch` with gloo: one log, one artifact, anchors of both processes counted, no process left behind."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{i} and {i * 7} more" for i in range(3000)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    made = [sys.executable, "-m", "weaver_hf", "train", "data", str(text), "--out", str(tmp_path / "data")]
    subprocess.run(
        [*made, "--sequences", "24", "--max-new-tokens", "32", "--batch-size", "12", "--own-share", "0"],
        env=env, check=True, capture_output=True,
    )  # fmt: skip
    # `accelerate launch --cpu` starts one process unless there is an mpirun; on GPUs these are `--multi_gpu`'s words too.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--main_process_port", "0"]
    command = [
        *launch, "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "weaver_hf", "train", "drafter",
        "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--layers", "1", "--taps", "1", "--taps", "6",
        "--intermediate-size", "64", "--anchors", "112", "--batch-size", "2", "--anchors-per-sequence", "8",
        "--max-seconds", "60", "--optimizer", "adamw",
    ]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["anchors"] % 32 == 0, "a step is 2 processes x 2 sequences x 8 anchors; 112 are 7 of one process"
    assert rows[-1]["anchors"] == 128 or rows[-1]["seconds"] > 55
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not list(Path(tmp_path / "out").glob("*.partial"))
