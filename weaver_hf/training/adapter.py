"""`weaver-hf train adapter`: trains Weaver's adapter for a frozen target and drafter; chosen by tree acceptance.

All depths of a block in one pass, along the target's own text (arXiv 2607.06763). What the adapter learns is the
target's distribution at the temperature of use, *not* renormalised to the pool: a candidate's share of the whole is
what a tree wants to know. Its own distribution lives on the pool alone, so tokens outside of it cannot be learned; how
many there are is logged.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from accelerate import Accelerator
from torch import Tensor

from ..acceptance import follow
from ..adapter import AdapterScorer, head_product
from ..drafter import DraftBlock
from ..modeling_weaver import WeaverModel
from ..proposal.conditional import WeaverBuilder, grow
from ..scoring import DraftRule
from ..target.attach import unwrap
from ..target.families import family_of
from ..target.taps import TapSink
from .blocks import (
    BlockBatch,
    BlockNetwork,
    LossConfig,
    accepted_tokens,
    make_blocks,
    rows_before,
    run_blocks,
    sample_anchors,
    slot_weights,
    states_before,
    target_pass,
)
from .coupling import fit_adapter_coupling
from .data import Sequences
from .drafter import DEV_ANCHORS, FITTED_AT, fit_depths
from .loop import Batch, TrainConfig, plot, run

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


class PoolBatch(NamedTuple):
    """What the frozen target and drafter say of a batch of blocks.

    Attributes:
        blocks: anchors, labels, weights.
        target_hidden: `[B, A, H]`, the target's final state before each anchor.
        draft: candidates of each depth: `hidden [B, A, D, H]`, `token_ids` and `logits` `[B, A, D, K]`.
        tokens: int64 `[B, A, D]`, the anchor and the labels before each depth.
        target_probs: `[B, A, D, K]`, the target's probabilities of the candidates, or None.
    """

    blocks: BlockBatch
    target_hidden: Tensor
    draft: DraftBlock
    tokens: Tensor
    target_probs: Tensor | None


def train(
    target: Any, weaver: WeaverModel, data: Sequences, folder: Path, config: AdapterTrainConfig, pad: int
) -> dict[str, Any]:
    """Train `weaver.adapter` in place and save the Weaver, the temperatures fitted; returns the last evaluation.

    A folder that holds the state of an earlier run of the same settings is continued.
    """
    config = replace(config, held_out=min(config.held_out, max(len(data) // 10, 1)))
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision, dynamo_backend="inductor" if config.compile else "no"
    )
    target = unwrap(target).to(accelerator.device).eval().requires_grad_(False)
    weaver.config.check_target(target.config)
    weaver.to(accelerator.device, torch.float32).train()
    assert weaver.drafter is not None
    assert weaver.adapter is not None
    weaver.drafter.requires_grad_(False)
    sink = TapSink(family_of(target).decoder_of(target), weaver.config.target_layer_ids, accelerator.device)
    loss_function = torch.compile(pool_loss) if config.compile else pool_loss
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()

    def loss_of(network: nn.Module, batch: Batch) -> Tensor:
        with accelerator.autocast():
            anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], config.anchors_per_sequence)
            part = pools(target, weaver, sink, batch, anchors, valid)
            queries = network(part.target_hidden, part.draft.hidden, embedding(part.tokens).to(part.draft.hidden.dtype))
            residual = head_product(head, queries.to(target.dtype)).gather(-1, part.draft.token_ids)
        assert part.target_probs is not None
        logits = part.draft.logits + residual.float()
        return loss_function(logits, part.target_probs, part.draft.token_ids, part.blocks, config.loss)

    def evaluation() -> dict[str, Any]:
        return evaluate(target, weaver, data, config, pad, sink)

    last = run(weaver.adapter, loss_of, evaluation, data, folder, config, accelerator, pad)
    if accelerator.is_main_process:
        given = (target, weaver.eval(), data, config, pad, sink)
        weaver.tree_config.adapter_temperature = fit_temperatures(*given)
        weaver.tree_config.adapter_coupling_temperature = fit_adapter_coupling(*given)
        weaver.to(target.dtype).save_pretrained(folder)
        plot(folder)
    accelerator.wait_for_everyone()
    return last


@torch.no_grad()
def pools(
    target: Any, weaver: WeaverModel, sink: TapSink, batch: Batch, anchors: Tensor, valid: Tensor, law: bool = True
) -> PoolBatch:
    """Target and drafter on blocks at `anchors [B, A]`; `law`: also the target's probabilities of the candidates."""
    assert weaver.adapter is not None
    assert weaver.drafter is not None
    ids, config = batch["input_ids"], weaver.config
    depths = config.block_size - 1
    taps, target_logits = target_pass(target, sink, ids)
    blocks = make_blocks(ids, batch["lengths"], anchors, valid, depths)
    hidden = run_blocks(
        BlockNetwork(weaver.drafter),
        target.get_input_embeddings(),
        config.mask_token_id,
        taps.features,
        ids,
        anchors,
        depths,
    )
    logits = target.get_output_embeddings()(hidden.to(target.dtype))
    top, token_ids = logits.topk(weaver.adapter.config.pool_size, -1)
    tokens = torch.cat([ids.gather(1, anchors)[..., None], blocks.labels[..., :-1]], -1)
    probs = candidate_probabilities(target_logits, blocks, token_ids, batch["temperatures"]) if law else None
    draft = DraftBlock(hidden, token_ids, top.float(), top.float())
    return PoolBatch(blocks, states_before(taps, anchors), draft, tokens, probs)


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
def held_out_pools(
    target: Any, weaver: WeaverModel, data: Sequences, config: TrainConfig, pad: int, sink: TapSink
) -> Iterator[tuple[PoolBatch, Tensor]]:
    """Pools and temperatures of the held-out sequences, in fp32, at fixed anchors."""
    generator = torch.Generator().manual_seed(0)
    indices = range(len(data) - config.held_out, len(data))
    for start in range(0, len(indices), config.batch_size):
        batch = data.batch(indices[start : start + config.batch_size], config.width, pad)
        anchors, valid = sample_anchors(batch["lengths"], batch["prompt_lengths"], DEV_ANCHORS, generator)
        batch = {name: tensor.to(target.device) for name, tensor in batch.items()}
        part = pools(target, weaver, sink, batch, anchors.to(target.device), valid.to(target.device), law=False)
        yield part, batch["temperatures"]


def evaluate(
    target: Any, weaver: WeaverModel, data: Sequences, config: TrainConfig, pad: int, sink: TapSink
) -> dict[str, Any]:
    """Accepted drafted tokens of Weaver's tree, the marginal tree and the pools' ceiling, by temperature; coverage.

    Trees of 63 nodes at draft temperature 1, along the held-out text. The ceiling at temperature 0 is the text as far
    as the pools have it, which is what an oracle that knows the target would accept.
    """
    weaver.eval()
    sums: dict[str, list[Tensor]] = {}
    for part, temperatures in held_out_pools(target, weaver, data, config, pad, sink):
        full = (part.blocks.weights > 0).all(-1)  # [B, A]
        for temperature in temperatures.unique().tolist():
            chosen = full & (temperatures == temperature)[:, None]
            if not chosen.any():
                continue
            labels = part.blocks.labels[chosen]
            covered = (part.draft.token_ids[chosen] == labels[..., None]).any(-1)
            name = f"T={temperature:.1f}"
            sums.setdefault(f"pools {name}", []).append(covered.cumprod(-1).sum(-1).float())
            sums.setdefault(f"weaver {name}", []).append(weaver_accepted(target, weaver, part, chosen).float())
            raw = target.get_output_embeddings()(part.draft.hidden[chosen].to(target.dtype))
            blocks = BlockBatch(labels[:, 0], labels, torch.ones_like(labels, dtype=torch.float32))
            sums.setdefault(f"marginal {name}", []).append(accepted_tokens(raw, blocks, DEV_BUDGET)[0].float())
            sums.setdefault("coverage", []).append(covered.float().flatten())
    weaver.train()
    return {name: round(float(torch.cat(rows).mean()), 4) for name, rows in sorted(sums.items())}


def weaver_accepted(target: Any, weaver: WeaverModel, part: PoolBatch, chosen: Tensor) -> Tensor:
    """Drafted tokens that the text accepts from Weaver's trees at the blocks `chosen [B, A]`: `[X]`."""
    draft = DraftBlock(*(x[chosen] for x in part.draft if x is not None))
    labels, anchors = part.blocks.labels[chosen], part.tokens[chosen][:, :1]
    depths = labels.shape[-1]
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    assert weaver.adapter is not None
    scorer = AdapterScorer(
        weaver.adapter, embedding, head, draft, part.target_hidden[chosen], DraftRule([1.0] * depths)
    )
    builder = WeaverBuilder(DEV_BUDGET)
    tree = grow(draft.token_ids, anchors, scorer, DEV_BUDGET, builder.widths, builder.children, prune=True)
    padded = torch.cat([labels, labels.new_full((len(labels), 1), -1)], 1)
    return follow(tree, padded.gather(1, tree.depths.clamp(max=depths))).lengths - 1


@torch.no_grad()
def fit_temperatures(
    target: Any, weaver: WeaverModel, data: Sequences, config: TrainConfig, pad: int, sink: TapSink
) -> dict[str, list[float]]:
    """Temperatures of the adapter's scores by depth, for each temperature of the target, as the drafter's are fitted.

    A token outside the pool has probability 0 whatever the temperature: such slots say nothing and end their block.
    """
    grid = torch.linspace(math.log(0.3), math.log(3.0), 47).exp()
    adapter = weaver.adapter
    assert adapter is not None
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    golds: dict[float, list[Tensor]] = {temperature: [] for temperature in FITTED_AT}
    for part, temperatures in held_out_pools(target, weaver, data, config, pad, sink):
        hidden = part.draft.hidden
        queries = adapter(part.target_hidden, hidden, embedding(part.tokens).to(hidden.dtype))
        residual = head_product(head, queries.to(target.dtype)).gather(-1, part.draft.token_ids)
        logits = part.draft.logits + residual.float()
        gold = part.draft.token_ids == part.blocks.labels[..., None]
        seen = gold.any(-1) & (part.blocks.weights > 0)
        place = gold.float().argmax(-1, keepdim=True)
        rows = [(logits / tau).log_softmax(-1).gather(-1, place)[..., 0] for tau in grid.tolist()]
        table = torch.stack(rows, -1).masked_fill(~seen[..., None], math.nan).cpu()
        for temperature in FITTED_AT:
            golds[temperature].append(table[(temperatures - temperature).abs().cpu() < 0.05].flatten(0, 1))
    tables = {temperature: torch.cat(parts) for temperature, parts in golds.items()}
    return {
        f"{temperature:.1f}": fit_depths(table, grid) for temperature, table in tables.items() if table.isfinite().any()
    }
