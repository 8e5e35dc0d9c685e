"""`weaver-hf train adapter`: trains Weaver's adapter for a frozen target and drafter; chosen by tree acceptance.

All depths of a block in one pass, along the target's own text (arXiv 2607.06763). What the adapter learns is the
target's distribution at the temperature of use, *not* renormalised to the pool: a candidate's share of the whole is
what a tree wants to know. Its own distribution lives on the pool alone, so tokens outside of it cannot be learned; how
many there are is logged.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from accelerate import Accelerator
from torch import Tensor

from ..adapter import AdapterScorer
from ..drafter import DraftBlock
from ..modeling_weaver import WeaverModel
from ..proposal import WeaverBuilder
from ..scoring import DraftRule
from .blocks import (
    BlockBatch,
    DraftPass,
    LossConfig,
    accepted_along,
    accepted_tokens,
    adapter_logits,
    draft_pass,
    rows_before,
    sample_anchors,
    slot_weights,
)
from .coupling import fit_adapter_coupling
from .data import Sequences
from .held_out import HeldOut, calibrate
from .loop import Batch, TrainConfig
from .part import train_part

__all__ = ["AdapterTrainConfig", "PoolLossConfig", "evaluate", "fit_temperatures", "pool_loss", "train"]

LOSSES = ("lk", "alpha", "kl", "ce")
DEV_BUDGET = 63


@dataclass
class PoolLossConfig:
    """What the adapter is trained towards.

    Attributes:
        kind: with p the target's and q the adapter's distribution, and α = Σ min(p, q) over the pool: `"lk"`:
            λ KL(p, q) + (1 - λ)(1 - α) with λ = exp(-η α), α held fixed in λ (LK loss, arXiv 2602.23881); `"alpha"`:
            -log α; `"kl"`: KL(p, q); `"ce"`: cross entropy of the drawn token where the pool has it.
        eta: of the LK loss.
        smoothing: a slot weighs as much as it is likely to be reached under the adapter, mixed with 1 at this share (as
            D-PACE, arXiv 2605.18810, does for block drafters).
    """

    kind: str = "lk"
    eta: float = 3.0
    smoothing: float = 0.5


@dataclass
class AdapterTrainConfig(TrainConfig):
    """Settings of an adapter's run: the loop's, and the loss."""

    loss: PoolLossConfig = field(default_factory=PoolLossConfig)


class Pool(NamedTuple):
    """The drafter's candidates of every slot.

    Attributes:
        token_ids: int64 `[B, A, D, K]`.
        logits: raw, fp32 `[B, A, D, K]`.
    """

    token_ids: Tensor
    logits: Tensor


def train(
    target: Any, weaver: WeaverModel, data: Sequences, folder: Path, config: AdapterTrainConfig, pad: int
) -> dict[str, Any]:
    """Train `weaver.adapter` in place and save the Weaver, the temperatures fitted; returns the last evaluation.

    A folder that holds the state of an earlier run of the same settings is continued.
    """
    assert weaver.drafter is not None
    assert weaver.adapter is not None
    weaver.drafter.requires_grad_(False)
    loss_function = torch.compile(pool_loss) if config.compile else pool_loss

    def loss_of(network: nn.Module, batch: Batch, held_out: HeldOut, accelerator: Accelerator) -> Tensor:
        target = held_out.target
        with accelerator.autocast():
            anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], config.anchors_per_sequence)
            with torch.no_grad():
                passed = draft_pass(target, weaver, held_out.sink, batch, anchors, valid)
                ids, raw = pool_of(weaver, passed)
                blocks, states, hidden, tokens = passed.blocks, passed.states, passed.hidden, passed.tokens
                probs = candidate_probabilities(passed.target_logits, blocks, ids, batch["temperatures"])
                del passed  # logits over the vocabulary, and the adapter's are about to be made
            logits = adapter_logits(target, network, states, hidden, tokens, raw, ids)
        return loss_function(logits, probs, ids, blocks, config.loss)

    fits = {"adapter_temperature": fit_temperatures, "adapter_coupling_temperature": fit_adapter_coupling}
    return train_part(weaver.adapter, loss_of, evaluate, fits, target, weaver, data, folder, config, pad)


def pool_of(weaver: WeaverModel, passed: DraftPass) -> Pool:
    """The candidates that the adapter is trained on."""
    assert weaver.adapter is not None
    logits, token_ids = passed.logits.topk(weaver.adapter.config.pool_size, -1)
    return Pool(token_ids, logits.float())


def candidate_probabilities(
    target_logits: Tensor, blocks: BlockBatch, token_ids: Tensor, temperatures: Tensor
) -> Tensor:
    """The target's probabilities of candidates `[B, A, D, K]` in its whole vocabulary, at the sequence's temperature.

    The same numbers as `target_probabilities`, without a row of the vocabulary for each depth of each block.
    """
    warm = temperatures.clamp(min=1e-3)[:, None, None]
    scaled = target_logits.float() / warm  # [B, S, V]
    rows = torch.arange(len(scaled), device=scaled.device)[:, None, None]
    places = rows_before(blocks, scaled.shape[1])  # [B, A, D]
    chosen = scaled[rows[..., None], places[..., None], token_ids]
    return (chosen - scaled.logsumexp(-1)[rows, places][..., None]).exp()


def pool_loss(
    logits: Tensor, target_probs: Tensor, token_ids: Tensor, blocks: BlockBatch, config: PoolLossConfig
) -> Tensor:
    """Weighted mean over slots of a loss between the target and the adapter's distribution over the pool.

    Args:
        logits: the adapter's, `[B, A, D, K]`.
        target_probs: the target's probabilities of the candidates, `[B, A, D, K]`; they sum to at most 1.
        token_ids: int64 `[B, A, D, K]`.
        blocks: labels and validity.
    """
    log_q = logits.log_softmax(-1)
    q, p = log_q.exp(), target_probs
    gold = token_ids == blocks.labels[..., None]
    covered = gold.any(-1)
    ce = -(log_q.masked_fill(~gold, 0.0)).sum(-1)  # 0 where the pool lacks the token
    alpha = torch.minimum(p, q).sum(-1)
    kl = (p * (p.clamp(min=1e-12).log() - log_q)).sum(-1)
    valid = blocks.weights
    if config.kind == "lk":
        mixing = (-config.eta * alpha.detach()).exp()
        loss = mixing * kl + (1 - mixing) * (1 - alpha)
    elif config.kind == "alpha":
        loss = -alpha.clamp(min=1e-6).log()
    elif config.kind == "kl":
        loss = kl
    elif config.kind == "ce":
        loss = ce
    else:
        raise ValueError(f"Found loss {config.kind!r}; expected one of {LOSSES}.")
    valid = valid * (p.sum(-1) > 1e-6)  # nothing can be learned where the pool misses all that the target would say
    lost = torch.where(covered, ce.detach(), math.inf)
    weights = valid * slot_weights(lost, blocks.weights, LossConfig("dpace", alpha=config.smoothing))
    return (weights * loss).sum() / weights.sum().clamp(min=1e-6)


# ---- the held-out text -----------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(held_out: HeldOut) -> dict[str, Any]:
    """Accepted drafted tokens of Weaver's tree, the marginal tree and the pools' ceiling, by temperature; coverage.

    Trees of 63 nodes at draft temperature 1, along the held-out text. The ceiling at temperature 0 is the text as far
    as the pools have it, which is what an oracle that knows the target would accept.
    """
    sums: dict[str, list[Tensor]] = {}
    for passed, temperatures in held_out.passes():
        pool = pool_of(held_out.weaver, passed)
        full = (passed.blocks.weights > 0).all(-1)  # [B, A]
        for temperature in temperatures.unique().tolist():
            chosen = full & (temperatures == temperature)[:, None]
            if not chosen.any():
                continue
            labels = passed.blocks.labels[chosen]
            covered = (pool.token_ids[chosen] == labels[..., None]).any(-1)
            marginal, _ = accepted_tokens(
                passed.logits, passed.blocks._replace(weights=passed.blocks.weights * chosen[..., None]), DEV_BUDGET
            )
            name = f"T={temperature:.1f}"
            sums.setdefault(f"pools {name}", []).append(covered.cumprod(-1).sum(-1).float())
            sums.setdefault(f"weaver {name}", []).append(weaver_accepted(held_out, passed, pool, chosen).float())
            sums.setdefault(f"marginal {name}", []).append(marginal.float())
            sums.setdefault("coverage", []).append(covered.float().flatten())
    return {name: round(float(torch.cat(rows).mean()), 4) for name, rows in sorted(sums.items())}


def weaver_accepted(held_out: HeldOut, passed: DraftPass, pool: Pool, chosen: Tensor) -> Tensor:
    """Drafted tokens that the text accepts from Weaver's trees at the blocks `chosen [B, A]`: `[X]`."""
    target, adapter = held_out.target, held_out.weaver.adapter
    assert adapter is not None
    logits, labels = pool.logits[chosen], passed.blocks.labels[chosen]
    block = DraftBlock(passed.hidden[chosen], pool.token_ids[chosen], logits, logits)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    rule = DraftRule([1.0] * labels.shape[-1])
    score = AdapterScorer(adapter, embedding, head, block, passed.states[chosen], rule)
    tree = WeaverBuilder(DEV_BUDGET).grow(block.token_ids, passed.tokens[chosen][:, :1], score)
    return accepted_along(tree, labels)


@torch.no_grad()
def fit_temperatures(held_out: HeldOut) -> dict[str, list[float]]:
    """Temperatures of the adapter's scores by depth, for each temperature of the target; see `calibrate`.

    A token outside the pool has probability 0 whatever the temperature: such slots say nothing and end their block.
    """
    return calibrate(scored_labels(held_out))


def scored_labels(held_out: HeldOut) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The adapter's logits on the held-out text, and where the labels stand among them, for `calibrate`."""
    adapter = held_out.weaver.adapter
    assert adapter is not None
    for passed, temperatures in held_out.passes():
        ids, raw = pool_of(held_out.weaver, passed)
        logits = adapter_logits(held_out.target, adapter, passed.states, passed.hidden, passed.tokens, raw, ids)
        gold = ids == passed.blocks.labels[..., None]
        seen = gold.any(-1) & (passed.blocks.weights > 0)
        yield logits, gold.float().argmax(-1, keepdim=True), seen, temperatures
