"""One training pass of a block drafter: anchors, labels, losses, and the acceptance that a loss stands for.

The recipe is DFlash's (arXiv 2602.06036): blocks at random anchors of the target's own text, all slots at once, each
block seeing the context strictly before its anchor and itself alone. Slot `k` of the block at anchor `a` is labelled
with token `a + k`: the same position, never shifted.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from ..acceptance import follow
from ..adapter import head_product
from ..drafter import BlockDrafter, DraftBlock
from ..modeling_weaver import WeaverModel
from ..proposal.chain import ChainBuilder
from ..proposal.marginal import MarginalBuilder
from ..target.taps import TapSink, TapStates
from ..tree import TokenTree

__all__ = [
    "BlockBatch",
    "BlockNetwork",
    "DraftPass",
    "LossConfig",
    "accepted_along",
    "accepted_tokens",
    "adapter_logits",
    "block_loss",
    "draft_pass",
    "make_blocks",
    "run_blocks",
    "sample_anchors",
]


@dataclass
class LossConfig:
    """How slots are weighted and what they are trained towards.

    Attributes:
        weighting: `"decay"`: `exp(-(k - 1) / gamma)` for slot `k`; `"dpace"`: by the probability that the slot is
        reached
            under the drafter itself (D-PACE, arXiv 2605.18810).
        gamma: of the decay.
        alpha: smoothing of D-PACE.
        soft: share of the loss towards the target's whole distribution at the sequence's temperature; the rest is
            towards the token it drew. At temperature 0 both are the same.
    """

    weighting: str = "decay"
    gamma: float = 7.0
    alpha: float = 0.5
    soft: float = 1.0


class BlockBatch(NamedTuple):
    """Blocks of a batch of sequences.

    Attributes:
        anchors: int64 `[B, A]`, positions in the sequence.
        labels: int64 `[B, A, D]`, the tokens after each anchor.
        weights: fp32 `[B, A, D]`, 0 where there is no label or no block.
    """

    anchors: Tensor
    labels: Tensor
    weights: Tensor


def sample_anchors(
    lengths: Tensor, prompt_lengths: Tensor, count: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """`count` random anchors a sequence among generated tokens that have a token after them: positions and validity.

    The first anchor that decoding ever uses is the first generated token, at `prompt_lengths`.
    """
    span = (lengths - 1 - prompt_lengths).clamp(min=0)  # anchors from prompt_length to length - 2
    draws = torch.rand(len(lengths), count, generator=generator, device=lengths.device)
    anchors = prompt_lengths[:, None] + (draws * span[:, None]).long()
    valid = span[:, None].expand_as(anchors) > 0
    return torch.where(valid, anchors, 0), valid


def make_blocks(ids: Tensor, lengths: Tensor, anchors: Tensor, valid: Tensor, depths: int) -> BlockBatch:
    """Labels and their validity for blocks at `anchors` of `ids [B, S]`."""
    slots = anchors[..., None] + 1 + torch.arange(depths, device=ids.device)  # [B, A, D]
    inside = (slots < lengths[:, None, None]) & valid[..., None]
    labels = ids.gather(1, slots.clamp(max=ids.shape[1] - 1).flatten(1)).view_as(slots)
    return BlockBatch(anchors, labels, inside.float())


class BlockNetwork(nn.Module):
    """A drafter as one forward from features to hidden states, so that accelerate can wrap it for several processes."""

    def __init__(self, drafter: BlockDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, features: Tensor, noise: Tensor, places: Tensor, positions: Tensor) -> Tensor:
        return self.drafter(noise, self.drafter.context_rows(features, places), places, positions)


def run_blocks(
    network: nn.Module,
    embedding: nn.Module,
    mask_token_id: int,
    features: Tensor,
    ids: Tensor,
    anchors: Tensor,
    depths: int,
) -> Tensor:
    """The drafter's final hidden states of slots 1..D of every block, `[B, A, D, H]`.

    Args:
        network: a `BlockNetwork`, wrapped or not.
        features: tap features of the whole sequences, `[B, S, n * H]`.
        ids: int64 `[B, S]`.
        anchors: int64 `[B, A]`.
    """
    batch, length = ids.shape
    places = torch.arange(length, device=ids.device).expand(batch, -1)
    positions = anchors[..., None] + torch.arange(depths + 1, device=ids.device)
    noise_ids = torch.full_like(positions, mask_token_id)
    noise_ids[..., 0] = ids.gather(1, anchors)
    noise = embedding(noise_ids).to(features.dtype)
    return network(features, noise, places, positions)[:, :, 1:]


def target_pass(target: Any, sink: TapSink, ids: Tensor) -> tuple[TapStates, Tensor]:
    """Tap states (fp32) and logits of the frozen target for whole sequences."""
    with torch.no_grad(), sink.listening():
        logits = target(ids, use_cache=False).logits
    return TapStates(*(states.float() for states in sink.take())), logits


class DraftPass(NamedTuple):
    """What target and drafter say of the blocks of a batch.

    Attributes:
        blocks: anchors, labels, weights.
        hidden: the drafter's final states, `[B, A, D, H]`.
        logits: the drafter's, `[B, A, D, V]`, by the target's head.
        target_logits: the target's for whole sequences, `[B, S, V]`.
        states: the target's final states of the rows that chose the anchors, `[B, A, H]`.
        tokens: int64 `[B, A, D]`, the anchor and the labels before each depth.
    """

    blocks: BlockBatch
    hidden: Tensor
    logits: Tensor
    target_logits: Tensor
    states: Tensor
    tokens: Tensor


def draft_pass(
    target: Any,
    weaver: WeaverModel,
    sink: TapSink,
    batch: dict[str, Tensor],
    anchors: Tensor,
    valid: Tensor,
    network: nn.Module | None = None,
) -> DraftPass:
    """One pass of the frozen target over a batch, and of the drafter over the blocks at `anchors [B, A]`.

    Args:
        network: the drafter's `BlockNetwork` where a wrapped one is trained.
    """
    ids, config = batch["input_ids"], weaver.config
    depths = config.block_size - 1
    if network is None:
        assert weaver.drafter is not None
        network = BlockNetwork(weaver.drafter)
    taps, target_logits = target_pass(target, sink, ids)
    blocks = make_blocks(ids, batch["lengths"], anchors, valid, depths)
    embedding = target.get_input_embeddings()
    hidden = run_blocks(network, embedding, config.mask_token_id, taps.features, ids, anchors, depths)
    logits = target.get_output_embeddings()(hidden.to(target.dtype))
    tokens = torch.cat([ids.gather(1, anchors)[..., None], blocks.labels[..., :-1]], -1)
    return DraftPass(blocks, hidden, logits, target_logits, states_before(taps, anchors), tokens)


def adapter_logits(
    target: Any,
    network: nn.Module,
    states: Tensor,
    hidden: Tensor,
    tokens: Tensor,
    raw: Tensor,
    ids: Tensor,
) -> Tensor:
    """The adapter's logits of candidates `ids [..., D, K]` along known tokens, fp32.

    By the target's whole head: rows gathered for every slot of many blocks would take more memory than the product.

    Args:
        network: a `TopKAdapter`, wrapped or not.
        states, hidden, tokens: as in `DraftPass`.
        raw: the drafter's logits of the candidates.
    """
    queries = network(states, hidden, target.get_input_embeddings()(tokens).to(hidden.dtype))
    product = head_product(target.get_output_embeddings(), queries.to(target.dtype))
    return raw.float() + product.gather(-1, ids).float()


def rows_before(blocks: BlockBatch, length: int) -> Tensor:
    """Positions of the target's rows that chose each label, int64 `[B, A, D]`: its logits there are the label's law."""
    depths = blocks.labels.shape[-1]
    before = blocks.anchors[..., None] + torch.arange(depths, device=blocks.anchors.device)
    return before.clamp(max=length - 1)


def states_before(taps: TapStates, anchors: Tensor) -> Tensor:
    """The target's final states of the rows that chose the anchors `[B, A]`: `[B, A, H]`."""
    final = taps.final_hidden
    return final.gather(1, (anchors - 1).clamp(min=0)[..., None].expand(-1, -1, final.shape[-1]))


def target_probabilities(target_logits: Tensor, blocks: BlockBatch, temperatures: Tensor) -> Tensor:
    """The target's distribution of each label `[B, A, D, V]` at its sequence's temperature `[B]` (0: its choice)."""
    rows = torch.arange(len(target_logits), device=target_logits.device)[:, None, None]
    logits = target_logits[rows, rows_before(blocks, target_logits.shape[1])].float()
    return (logits / temperatures.clamp(min=1e-3)[:, None, None, None]).softmax(-1)


def block_loss(
    logits: Tensor, target_logits: Tensor, blocks: BlockBatch, temperatures: Tensor, config: LossConfig
) -> Tensor:
    """Weighted mean over slots of the cross entropy towards the target.

    Args:
        logits: the drafter's, `[B, A, D, V]`.
        target_logits: the target's for whole sequences, `[B, S, V]`.
        temperatures: at which each sequence was drawn, `[B]`.
    """
    log_q = logits.float().log_softmax(-1)
    hard = -log_q.gather(-1, blocks.labels[..., None])[..., 0]  # [B, A, D]
    loss = hard
    if config.soft:
        p = target_probabilities(target_logits, blocks, temperatures)
        soft = -(p * log_q).sum(-1)
        drawn = (temperatures > 0)[:, None, None]
        loss = torch.where(drawn, config.soft * soft + (1 - config.soft) * hard, hard)
    weights = blocks.weights * slot_weights(hard.detach(), blocks.weights, config)
    return (weights * loss).sum() / weights.sum().clamp(min=1e-6)


def slot_weights(negative_log_q: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    """Weight of each slot `[..., D]` by `LossConfig.weighting`; invalid slots count as certain in D-PACE's products."""
    depths = negative_log_q.shape[-1]
    if config.weighting == "decay":
        return torch.exp(-torch.arange(depths, device=negative_log_q.device) / config.gamma).expand_as(negative_log_q)
    if config.weighting != "dpace":
        raise ValueError(f"Found weighting {config.weighting!r}; expected 'decay' or 'dpace'.")
    smooth = (1 - config.alpha) * (-negative_log_q).exp() + config.alpha
    reach = torch.where(valid > 0, smooth, 1.0).cumprod(-1) * (valid > 0)
    return reach.flip(-1).cumsum(-1).flip(-1)


@torch.no_grad()
def accepted_tokens(
    logits: Tensor, blocks: BlockBatch, budget: int | None, temperatures: list[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Drafted tokens that the text itself accepts, and what the trees expect: `[blocks with all labels]` each.

    The labels are the target's own choices, so this is acceptance along its text: of the chain (`budget` None) or of
    the marginal tree of `budget` nodes.
    """
    full = (blocks.weights > 0).all(-1)
    logits, labels = logits[full].float(), blocks.labels[full]  # [X, D, V], [X, D]
    depths = labels.shape[-1]
    scale = torch.tensor(temperatures or [1.0] * depths, device=logits.device)[:, None]
    log_probs, token_ids = (logits / scale).log_softmax(-1).topk(min(budget or 1, logits.shape[-1]), -1)
    block = DraftBlock(logits[..., :1], token_ids, logits.gather(-1, token_ids), log_probs)
    builder = ChainBuilder(depths) if budget is None else MarginalBuilder(budget)
    anchors = torch.zeros(len(labels), 1, dtype=torch.long, device=labels.device)
    tree = builder.grow(block, anchors)
    expected = (tree.log_probs.exp() * tree.is_node)[:, 1:].sum(1)
    return accepted_along(tree, labels), expected


def accepted_along(tree: TokenTree, labels: Tensor) -> Tensor:
    """Drafted tokens of trees that texts with these labels `[X, D]` behind their anchors accept: `[X]`."""
    depths = labels.shape[-1]
    padded = torch.cat([labels, labels.new_full((len(labels), 1), -1)], 1)
    choices = padded.gather(1, tree.depths.clamp(max=depths))  # what the text holds after a node of that depth
    return follow(tree, choices).lengths - 1
