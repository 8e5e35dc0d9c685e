"""What the adapter's inputs are worth: three short trainings from scratch, and what their trees then accept.

    python examples/ablate_adapter.py DATA --anchors 2000000 --json ablation.json

One is the adapter as it is; one sees no drafter states in its prefix (the target's own state is left); one scores
without the drafter's raw logits. The same data, seed, drafter and number of blocks; accepted drafted tokens of 63 nodes
on the held-out end of the data, for each temperature in it, beside the marginals'.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from weaver_hf import WeaverModel, load_tiny
from weaver_hf.adapter import KeyValue, TopKAdapter
from weaver_hf.training import adapter as training
from weaver_hf.training.adapter import pool_of
from weaver_hf.training.blocks import DraftPass
from weaver_hf.training.data import load_data

NAMES = ("as it is", "without the drafter's states", "without the drafter's raw logits")


class WithoutStates(TopKAdapter):
    """Its prefix holds zeros where the drafter's states would be."""

    def prefix(self, target_hidden: Tensor, hidden: Tensor) -> list[KeyValue]:
        return super().prefix(target_hidden, torch.zeros_like(hidden))


def without_logits(weaver: WeaverModel, passed: DraftPass) -> training.Pool:
    """The same candidates, their logits 0."""
    pool = pool_of(weaver, passed)
    return pool._replace(logits=torch.zeros_like(pool.logits))


def main(
    data: Annotated[Path, typer.Argument(help="Sequences of `weaver-hf train data`.")],
    anchors: Annotated[int, typer.Option(help="Blocks of each training.")] = 2_000_000,
    only: Annotated[int | None, typer.Option(help="Train this one alone, 0 to 2.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences a step.")] = 64,
    seed: int = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the step (worth it on a GPU).")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Train the three and print a line each."""
    results = {}
    for name in NAMES if only is None else NAMES[only : only + 1]:
        torch.manual_seed(seed)
        model, tokenizer, weaver = load_tiny()
        weaver.detach()
        assert weaver.adapter is not None
        sequences = load_data([data], tokenizer, weaver.config.block_size)
        weaver.init_adapter(weaver.adapter.config)
        if name == "without the drafter's states":
            weaver.adapter.__class__ = WithoutStates
        config = training.AdapterTrainConfig(
            anchors=anchors, seed=seed, compile=compiled, width=384, batch_size=batch_size,
            loss=training.PoolLossConfig("kl"),
        )  # fmt: skip
        try:
            if name == "without the drafter's raw logits":
                # Loss and evaluation take their candidates from here.
                training.pool_of = without_logits
            with tempfile.TemporaryDirectory() as folder:
                pad = tokenizer.pad_token_id
                results[name] = training.train(model, weaver, sequences, Path(folder), config, pad)
        finally:
            training.pool_of = pool_of
        print(name, {key: value for key, value in results[name].items() if "T=" in key}, flush=True)
    if json_path:
        json_path.write_text(json.dumps({"anchors": anchors, "seed": seed, "results": results}), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
