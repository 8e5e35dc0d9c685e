"""`TopKAdapter`: Weaver's adapter (arXiv 2607.06763), which scores a drafter's candidates given the path before them.

Tensor names and arithmetic are those of the released checkpoint, in both generations: learned positions with GELU, and
rotary positions with SwiGLU. The prefix is what is known before a tree is grown: the target's final hidden state whose
logits chose the anchor (slot 0), then the drafter's final hidden states of depths 1..D. A node at depth `d` (the anchor
has depth 0) is its token's embedding at the position of prefix slot `d + 1`; it sees the prefix, its ancestors and
itself, and scores the drafter's candidates of its children's depth:

    score = the drafter's raw logit + lm_head row of the candidate · query of the node
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .configuration_weaver import AdapterConfig
from .drafter import DraftBlock, rope_at, rotate
from .scoring import DraftRule

__all__ = ["AdapterScorer", "FoldedTables", "TopKAdapter", "is_plain", "residual"]

KeyValue = tuple[Tensor, Tensor]

EPS = 1e-6  # no checkpoint says it: all published code has this constant
FOLD_CHUNK = 8192  # rows of the vocabulary folded at a time


class AdapterNorm(nn.Module):
    """Root-mean-square norm with weight and bias, all of it in fp32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return (self.weight.float() * normed + self.bias.float()).to(x.dtype)


class AdapterBlock(nn.Module):
    """One pre-norm block; plain multi-head attention, whose keys and values the caller puts together."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        rank, mlp_dim = config.rank, config.mlp_dim
        self.heads = config.num_heads
        self.norm_attn = AdapterNorm(rank)
        self.qkv_proj = nn.Linear(rank, 3 * rank, bias=False)  # rows: all of q, all of k, all of v
        self.o_proj = nn.Linear(rank, rank, bias=False)
        self.norm_mlp = AdapterNorm(rank)
        self.gated = config.generation == "rope"
        if self.gated:
            self.gate_up_proj = nn.Linear(rank, 2 * mlp_dim)  # rows: the gate, then the values
            self.down_proj = nn.Linear(mlp_dim, rank)
        else:
            self.fc1 = nn.Linear(rank, mlp_dim)
            self.fc2 = nn.Linear(mlp_dim, rank)

    def qkv(self, x: Tensor, rope: KeyValue | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows `[B, R, r]`, `[B, heads, R, r / heads]` each."""
        parts = self.qkv_proj(self.norm_attn(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        if rope is not None:
            q, k = rotate(q.float(), rope).to(x.dtype), rotate(k.float(), rope).to(x.dtype)
        return q, k, v

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Rows `x [B, R, r]` after attention over `k, v [B, heads, S, hd]` where `visible [.., R, S]`, and the MLP."""
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_mlp(x)
        if self.gated:
            gate, values = self.gate_up_proj(normed).chunk(2, -1)
            return x + self.down_proj(F.silu(gate) * values)
        return x + self.fc2(F.gelu(self.fc1(normed)))


class TopKAdapter(nn.Module):
    """The adapter's network. It has neither embedding nor head: both are the target's.

    Args:
        hidden_size: of the target: of its states and embeddings, and of the drafter's states.
        config: the adapter's own geometry.
    """

    def __init__(self, hidden_size: int, config: AdapterConfig) -> None:
        super().__init__()
        rank = config.rank
        self.config = config
        self.output_norm = AdapterNorm(hidden_size)
        self.proposal_in = nn.Linear(hidden_size, rank)
        self.embed_norm = AdapterNorm(hidden_size)
        self.token_in = nn.Linear(hidden_size, rank)
        if config.generation == "learned":
            self.pos_emb = nn.Parameter(torch.zeros(config.max_depth, rank))
        self.blocks = nn.ModuleList(AdapterBlock(config) for _ in range(config.num_layers))
        self.out_norm = AdapterNorm(rank)
        self.lm_head_query_in = nn.Linear(rank, hidden_size, bias=False)

    # ---- the parts of an evaluation ----------------------------------------------------------------------------------

    def prefix(self, target_hidden: Tensor, hidden: Tensor) -> list[KeyValue]:
        """Keys and values of the prefix in every block.

        Args:
            target_hidden: `[B, H]`, the target's state after its final norm, of the row whose logits chose the anchor.
            hidden: `[B, D, H]`, the drafter's final states of depths 1..D; `D` at most `max_depth`.

        Returns:
            A (keys, values) pair a block, `[B, heads, D + 1, hd]` each.
        """
        states = torch.cat([target_hidden[:, None], hidden], 1)
        x = self.proposal_in(self.output_norm(states))
        rows = x.shape[1]
        if self.config.generation == "learned":
            x = x + F.pad(self.pos_emb[: rows - 1], (0, 0, 1, 0))  # slot 0 has no position
        rope = self._rope(torch.arange(rows, device=x.device))
        causal = torch.ones(rows, rows, dtype=torch.bool, device=x.device).tril()
        out = []
        blocks: list[Any] = list(self.blocks)
        for index, block in enumerate(blocks):
            q, k, v = block.qkv(x, rope)
            out.append((k, v))
            if index + 1 < len(blocks):  # nobody reads the last block's own output
                x = block(x, q, k, v, causal)
        return out

    def token_inputs(self, embeddings: Tensor) -> Tensor:
        """What the target's embeddings `[..., H]` of tokens enter as, before positions: `[..., r]`."""
        return self.token_in(self.embed_norm(embeddings))

    def nodes(
        self, inputs: Tensor, depths: Tensor, memory: list[KeyValue], visible: Tensor, first: int | None = None
    ) -> Tensor:
        """States of nodes, from which queries are made.

        Args:
            inputs: `[B, W, r]`, from `token_inputs`.
            depths: int64 `[B, W]` or `[W]`, 0 at the anchor, below `max_depth`.
            memory: of every block, keys and values `[B, heads, S, hd]`. The nodes' own are written at rows `first..`
                of it, or, where `first` is None, put behind it.
            visible: bool `[B, W, S']` or `[W, S']`, the rows that each node sees, itself included.

        Returns:
            `[B, W, r]`.
        """
        x = inputs
        if self.config.generation == "learned":
            x = x + self.pos_emb[depths]
        rope = self._rope(depths + 1)
        mask = visible if visible.ndim == 2 else visible[:, None]
        blocks: Iterable[Any] = self.blocks
        for block, (keys, values) in zip(blocks, memory, strict=True):
            q, k, v = block.qkv(x, rope)
            if first is None:
                keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            else:
                keys[:, :, first : first + k.shape[2]] = k
                values[:, :, first : first + k.shape[2]] = v
            x = block(x, q, keys, values, mask)
        return self.out_norm(x)

    def query(self, states: Tensor) -> Tensor:
        """Queries `[..., H]` of node states `[..., r]`."""
        return self.lm_head_query_in(states)

    def _rope(self, positions: Tensor) -> KeyValue | None:
        """Cosine and sine at `positions [..., R]`, fp32 `[..., 1, R, hd / 2]`; None with learned positions."""
        if self.config.generation == "learned":
            return None
        return rope_at(positions, self.config.rank // self.config.num_heads, self.config.rope_base, torch.float32)

    # ---- the two ways to evaluate it ---------------------------------------------------------------------------------

    def forward(self, target_hidden: Tensor, hidden: Tensor, token_embeddings: Tensor) -> Tensor:
        """Queries of all depths of many blocks in one pass, along known tokens; what a trainer calls.

        Args:
            target_hidden: `[..., H]`, the target's final state before each anchor (whose logits chose the anchor).
            hidden: `[..., D, H]`, the drafter's final states of depths 1..D.
            token_embeddings: `[..., D, H]`, the target's embeddings of the anchor and of the `D - 1` tokens after it.

        Returns:
            `[..., D, H]`: row `d` scores the candidates of depth `d + 1`, whose label is the token `d + 1` behind the
            anchor.
        """
        lead, (depths, width) = hidden.shape[:-2], hidden.shape[-2:]
        memory = self.prefix(target_hidden.reshape(-1, width), hidden.reshape(-1, depths, width))
        inputs = self.token_inputs(token_embeddings.reshape(-1, depths, token_embeddings.shape[-1]))
        depth = torch.arange(depths, device=inputs.device)
        visible = torch.ones(depths, 2 * depths + 1, dtype=torch.bool, device=inputs.device).tril(depths + 1)
        states = self.nodes(inputs, depth, memory, visible)
        return self.query(states).view(*lead, depths, width)

    def step(self, inputs: Tensor, depths: Tensor, table: list[KeyValue], ancestors: Tensor, first: int) -> Tensor:
        """States of `W` nodes of a tree, whose keys and values go into a table that their descendants read.

        Args:
            inputs: `[B, W, r]`, from `token_inputs`.
            depths: int64 `[B, W]`.
            table: the prefix with room for `M` nodes behind it, from `table`.
            ancestors: bool `[B, W, M]`, the slots of each node's ancestors and its own.
            first: slot of the first of these nodes; they take `first..first + W - 1`.

        Returns:
            `[B, W, r]`.
        """
        before = table[0][0].shape[2] - ancestors.shape[-1]  # the prefix, which every node sees
        return self.nodes(inputs, depths, table, F.pad(ancestors, (before, 0), value=True), before + first)

    def table(self, prefix: list[KeyValue], slots: int) -> list[KeyValue]:
        """The prefix with `slots` empty rows behind it."""
        return [(F.pad(k, (0, 0, 0, slots)), F.pad(v, (0, 0, 0, slots))) for k, v in prefix]


# ---- scoring the nodes of a tree -------------------------------------------------------------------------------------


@dataclass
class FoldedTables:
    """Both exact foldings over the vocabulary, in the adapter's dtype: memory for time.

    Attributes:
        inputs: `[V, r]`, `token_inputs` of every token's embedding.
        rows: `[V, r]`, the target's head after `lm_head_query_in`: a candidate's row · a node's state is its residual.
    """

    inputs: Tensor
    rows: Tensor

    @classmethod
    @torch.no_grad()
    def build(cls, adapter: TopKAdapter, embedding: nn.Module, head: nn.Module) -> "FoldedTables":
        """From the target's embedding and head, called as modules: quantized and LoRA-wrapped ones are right too."""
        weight = adapter.lm_head_query_in.weight  # [H, r]
        rows = head_product(head, weight.t().contiguous()).t().to(weight.dtype).contiguous()
        tokens = torch.arange(len(rows), device=weight.device).split(FOLD_CHUNK)
        inputs = [adapter.token_inputs(embedding(chunk).to(weight)) for chunk in tokens]
        return cls(torch.cat(inputs), rows)


def head_product(head: nn.Module, x: Tensor) -> Tensor:
    """`x [..., H]` · every row of the head, `[..., V]`, without the head's bias; the head is called as a module."""
    product = head(x)
    # A bias has been counted in the drafter's logit already.
    return product - head(torch.zeros_like(x[..., :1, :])) if has_bias(head) else product


def residual(head: nn.Module, query: Tensor, ids: Tensor) -> Tensor:
    """Rows of the head at `ids [..., K]` · `query [..., H]`, fp32 `[..., K]`; differentiable."""
    if is_plain(head):
        weight: Any = head.weight
        return dot(weight, query, ids)
    whole = head_product(head, query)  # exact too, at the price of the whole vocabulary
    return whole.to(ids.device).gather(-1, ids).float()


def dot(rows: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """`rows [V, n]` at `ids [..., K]` · `x [..., n]`, in the dtype of the rows; fp32 `[..., K]`."""
    return (F.embedding(ids, rows) @ x.to(rows)[..., None])[..., 0].float()


def has_bias(head: nn.Module) -> bool:
    return getattr(head, "bias", None) is not None


def is_plain(head: nn.Module) -> bool:
    """Whether the head's rows can be gathered from its weight: neither quantized, wrapped nor offloaded."""
    weight = getattr(head, "weight", None)
    return (
        type(head) is nn.Linear
        and type(weight) is nn.Parameter
        and type(weight.data) is Tensor
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        and weight.device.type != "meta"
    )


class AdapterScorer:
    """Conditional log-probabilities of a block's candidates: the `Scorer` that builder `"weaver"` grows trees with.

    Made for each step. Every scored node's keys and values stay in a table, so nothing is computed twice along a path.

    Args:
        adapter: its weights are on the block's device.
        embedding, head: the target's modules.
        block: candidates and raw logits `[B, D, K]`, and the drafter's states.
        target_hidden: `[B, H]`, the target's final state whose logits chose the anchor.
        rule: how the scores of a pool become log-probabilities over it.
        tables: foldings to read instead of embedding and head.
    """

    def __init__(
        self,
        adapter: TopKAdapter,
        embedding: Callable[[Tensor], Tensor],
        head: nn.Module,
        block: DraftBlock,
        target_hidden: Tensor,
        rule: DraftRule,
        tables: FoldedTables | None = None,
    ) -> None:
        self._adapter, self._embedding, self._head, self._tables = adapter, embedding, head, tables
        self._block, self._rule, self._target_hidden = block, rule, target_hidden
        self._table: list[KeyValue] = []

    @property
    def parts(self) -> dict[str, Any]:
        """What it was made of, for a growth that scores by kernels of its own."""
        return {
            "adapter": self._adapter,
            "embedding": self._embedding,
            "head": self._head,
            "block": self._block,
            "target_hidden": self._target_hidden,
            "rule": self._rule,
            "tables": self._tables,
        }

    def __call__(self, token_ids: Tensor, depths: Tensor, ancestors: Tensor, first: int) -> Tensor:
        """See `Scorer`."""
        adapter = self._adapter
        if not self._table:
            self._table = adapter.table(adapter.prefix(self._target_hidden, self._block.hidden), ancestors.shape[-1])
        if self._tables is not None:
            inputs = F.embedding(token_ids, self._tables.inputs)
        else:
            inputs = adapter.token_inputs(self._embedding(token_ids).to(self._table[0][0]))
        depth = depths.clamp(max=self._block.token_ids.shape[1] - 1)
        states = adapter.step(inputs, depth, self._table, ancestors, first)
        pool = depth[..., None].expand(-1, -1, self._block.token_ids.shape[-1])
        ids = self._block.token_ids.gather(1, pool)
        logits = self._block.logits.gather(1, pool) + self._residual(states, ids)
        gumbels = self._block.gumbels
        return self._rule.log_probs(logits, None if gumbels is None else gumbels.gather(1, pool), depth)

    def _residual(self, states: Tensor, ids: Tensor) -> Tensor:
        """What the nodes' `states [B, W, r]` add to the logits of candidates `ids [B, W, K]`, fp32."""
        if self._tables is not None:
            return dot(self._tables.rows, states, ids)
        return residual(self._head, self._adapter.query(states), ids)
