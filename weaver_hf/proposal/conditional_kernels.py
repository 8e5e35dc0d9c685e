"""Builder `weaver` on a GPU: the rounds of `conditional.grow` in a few launches each, without a host sync.

A round on a folded adapter of one block is its four matrices, attention, and one launch that scores the candidates,
moves the frontier and makes the next nodes. Nothing here depends on values, so all of it can be captured.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from transformers.generation import logits_process as stock

from weaver_kernels.adapter_step import adapter_attention, adapter_linear
from weaver_kernels.growth import Growth, Pool, expand, expand_scored, keep_best, start

from ..adapter import AdapterScorer, FoldedTables, TopKAdapter, is_plain
from ..drafter import DraftBlock, rope_at
from ..scoring import DraftRule
from ..tree import TokenTree
from .protocol import Scorer

__all__ = ["grow_adapter", "grow_scored"]

# The filters that the kernel knows, in their stock order, with the field that says how much they keep.
_FILTERS = ((stock.TopKLogitsWarper, "top_k"), (stock.TopPLogitsWarper, "top_p"), (stock.MinPLogitsWarper, "min_p"))


@torch.no_grad()
def grow_adapter(
    adapter: TopKAdapter,
    embedding: Callable[[Tensor], Tensor],
    head: nn.Module,
    block: DraftBlock,
    target_hidden: Tensor,
    rule: DraftRule,
    anchors: Tensor,
    budget: int,
    widths: Sequence[int],
    children: int,
    tables: FoldedTables | None = None,
) -> TokenTree:
    """The trees of `WeaverBuilder.grow` with an `AdapterScorer` of the same arguments.

    A head whose rows cannot be gathered, without folded tables, and filters other than top-k, top-p and min-p are
    scored by the `AdapterScorer`; the frontier is the kernels' in any case.

    Args:
        adapter, embedding, head, block, target_hidden, rule, tables: see `AdapterScorer`.
        anchors: int64 `[B, 1]`.
        budget, widths, children: see `conditional.grow`, with `prune=True`.

    Returns:
        Trees of at most `1 + budget` nodes, at a static width.
    """
    filters = _known_filters(rule)
    if filters is None or (tables is None and not is_plain(head)):
        score = AdapterScorer(adapter, embedding, head, block, target_hidden, rule, tables)
        return grow_scored(block.token_ids, anchors, score, budget, widths, children)
    ids = block.token_ids.contiguous()
    depths, pool_size = ids.shape[1:]
    gumbels = None if block.gumbels is None else block.gumbels.contiguous()
    pool = Pool(ids, block.logits.contiguous(), rule.scales(depths, ids.device), gumbels, **filters)
    growth = start(anchors, sum(widths), depths, min(children, pool_size))
    step = _AdapterStep(adapter, embedding, block, target_hidden, growth, tables)

    x, first = step.enter(anchors), 0
    for width, following in zip(widths, [*widths[1:], 0], strict=True):
        states = step(x, first)
        out_norm: Any = adapter.out_norm
        norm = (out_norm.weight, out_norm.bias)
        if tables is not None:
            entering = expand(
                growth, pool, states, tables.rows, first, following, norm=norm, inputs=tables.inputs,
                positions=step.positions,
            )  # fmt: skip
        else:
            weight: Any = head.weight
            query = adapter_linear(states, adapter.lm_head_query_in.weight, norm=norm)
            entering = expand(growth, pool, query.to(weight.dtype), weight, first, following)
        first += width
        if following:
            x = step.enter(growth.nodes[0, :, first : first + following], first) if entering is None else entering
    return _tree(growth, ids, budget)


@torch.no_grad()
def grow_scored(
    token_ids: Tensor, anchors: Tensor, score: Scorer, budget: int, widths: Sequence[int], children: int
) -> TokenTree:
    """`conditional.grow(..., prune=True)`, with the frontier in one launch a round: for scores of any kind."""
    ids = token_ids.contiguous()
    _, depths, pool = ids.shape
    growth = start(anchors, sum(widths), depths, min(children, pool))
    first = 0
    for width, following in zip(widths, [*widths[1:], 0], strict=True):
        nodes = slice(first, first + width)
        depth = growth.nodes[2, :, nodes]
        log_probs = score(growth.nodes[0, :, nodes], depth, _ancestors(growth, first, width), first)
        expand_scored(growth, ids, log_probs.float().contiguous(), first, following)
        first += width
    return _tree(growth, ids, budget)


class _AdapterStep:
    """States of a round's nodes: `TopKAdapter.step` in one launch a matrix and one for the attention of a block."""

    def __init__(
        self,
        adapter: TopKAdapter,
        embedding: Callable[[Tensor], Tensor],
        block: DraftBlock,
        target_hidden: Tensor,
        growth: Growth,
        tables: FoldedTables | None,
    ) -> None:
        self._adapter, self._embedding, self._growth, self._tables = adapter, embedding, growth, tables
        self._depths = growth.paths.shape[2]
        prefix = adapter.prefix(target_hidden, block.hidden)
        self._table = adapter.table(prefix, growth.paths.shape[1])
        config = adapter.config
        self.positions: Tensor | None = adapter.pos_emb if config.generation == "learned" else None
        self._rope = None
        if config.generation == "rope":
            rows = torch.arange(self._depths + 1, device=target_hidden.device)
            cos, sin = rope_at(rows, config.rank // config.num_heads, config.rope_base, torch.float32)
            self._rope = cos[0], sin[0]

    def enter(self, tokens: Tensor, first: int = 0) -> Tensor:
        """What nodes `first..` with `tokens [B, W]` enter the first block as, `[B, W, r]`."""
        depth = self._growth.nodes[2, :, first : first + tokens.shape[1]]
        if self._tables is not None:
            x = nn.functional.embedding(tokens, self._tables.inputs)
            return x if self.positions is None else x + self.positions[depth]
        adapter = self._adapter
        weight = adapter.token_in.weight
        return adapter_linear(
            self._embedding(tokens).to(weight.dtype), weight, adapter.token_in.bias,
            norm=(adapter.embed_norm.weight, adapter.embed_norm.bias), residual=self.positions,
            residual_index=None if self.positions is None else depth,
        )  # fmt: skip

    def __call__(self, x: Tensor, first: int) -> Tensor:
        """States of nodes `first..` before the adapter's last norm, `[B, W, r]`."""
        blocks: Iterable[Any] = self._adapter.blocks
        growth = self._growth
        for block, (keys, values) in zip(blocks, self._table, strict=True):
            norm = (block.norm_attn.weight, block.norm_attn.bias)
            q, k, v = adapter_linear(x, block.qkv_proj.weight, norm=norm).chunk(3, -1)
            mixed = adapter_attention(q, k, v, keys, values, growth.nodes, growth.paths, first, self._rope)
            x = adapter_linear(mixed, block.o_proj.weight, residual=x)
            into, out = (block.gate_up_proj, block.down_proj) if block.gated else (block.fc1, block.fc2)
            norm = (block.norm_mlp.weight, block.norm_mlp.bias)
            inner = adapter_linear(x, into.weight, into.bias, norm=norm, activation="swiglu" if block.gated else "gelu")
            x = adapter_linear(inner, out.weight, out.bias, residual=x)
        return x


def _known_filters(rule: DraftRule) -> dict[str, Any] | None:
    """The arguments of `Pool` for a rule's filters; None where the kernel does not know one, or their order."""
    known, place = {}, 0
    for processor in rule.filters:
        places = [i for i, (kind, _) in enumerate(_FILTERS) if type(processor) is kind and i >= place]
        stock_form = processor.filter_value == float("-inf") and getattr(processor, "min_tokens_to_keep", 1) == 1
        if not places or not stock_form:
            return None
        place, name = places[0] + 1, _FILTERS[places[0]][1]
        known[name] = getattr(processor, name)
    return known


def _ancestors(growth: Growth, first: int, width: int) -> Tensor:
    """Bool `[B, W, M]`: the slots of each node's ancestors and its own."""
    slots, depths = growth.paths.shape[1:]
    nodes = slice(first, first + width)
    slot = torch.arange(slots, device=growth.paths.device)
    above = torch.arange(depths, device=slot.device) < growth.nodes[2, :, nodes, None]  # [B, W, D]
    on_path = (growth.paths[:, nodes, :, None] == slot) & above[..., None]
    return on_path.any(2) | (slot == slot[nodes, None])


def _tree(growth: Growth, token_ids: Tensor, budget: int) -> TokenTree:
    tokens, parents, log_probs, sizes = keep_best(growth, token_ids, budget)
    return TokenTree(tokens, parents, log_probs, sizes, max_depth=min(token_ids.shape[1], budget))
