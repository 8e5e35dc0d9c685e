"""`BlockDrafter`: DFlash (arXiv 2602.06036), the marginals of the next tokens in one non-causal pass.

Tensor names and shapes are those of the published checkpoints (z-lab). The context is what the target's tapped layers
said of the committed text: fused once, projected to keys and values by every layer, and kept; the block is the anchor
(the last committed token, whose own states are not known yet) and mask tokens. Slot `j` of a block predicts the token
at its own position, `anchor + j`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from weaver_kernels import ops
from weaver_kernels.dispatch import use_triton
from weaver_kernels.reference import TreeTopology, put_nodes

__all__ = ["BlockDrafter", "DraftBlock", "DrafterContext", "StaticContext"]

KeyValue = tuple[Tensor, Tensor]


class DraftBlock(NamedTuple):
    """What one pass of the drafter proposes for depths 1..D, the best `K` tokens of each.

    Attributes:
        hidden: `[B, D, H]`, final hidden states of slots 1..D.
        token_ids: int64 `[B, D, K]`, most probable first.
        logits: fp32 `[B, D, K]`, raw.
        log_probs: fp32 `[B, D, K]`, over the whole vocabulary, by the rule of the step (`scoring.DraftRule`).
        gumbels: fp32 `[B, D, K]`, the noise of these tokens where the draft is coupled, otherwise None.
    """

    hidden: Tensor
    token_ids: Tensor
    logits: Tensor
    log_probs: Tensor
    gumbels: Tensor | None = None


@dataclass
class DrafterContext:
    """Keys and values of the committed text in every drafter layer, in buffers that grow by halves.

    Attributes:
        layers: (keys, values) a layer, each `[B, Hkv, capacity, hd]`, of which `length` rows are used.
        length: rows of context.
        next_position: sequence index of the next row. Larger than `length` where the text before was not seen.
        cache_length: tokens in the target's cache when `generate` ended, to tell whether somebody moved it on since.
    """

    layers: list[KeyValue]
    length: int = 0
    next_position: int = 0
    cache_length: int = 0

    def append(self, rows: list[KeyValue]) -> None:
        """Add the same new rows `[B, Hkv, R, hd]` to every layer."""
        new = rows[0][0].shape[2]
        end = self.length + new
        for index, (buffers, added) in enumerate(zip(self.layers or rows, rows, strict=True)):
            if not self.layers:
                continue
            grown = tuple(self._room(buffer, end) for buffer in buffers)
            for buffer, row in zip(grown, added, strict=True):
                buffer[:, :, self.length : end] = row
            self.layers[index] = (grown[0], grown[1])
        if not self.layers:
            self.layers = rows
        self.length = end
        self.next_position += new

    def _room(self, buffer: Tensor, capacity: int) -> Tensor:
        if buffer.shape[2] >= capacity:
            return buffer
        larger = buffer.new_empty(*buffer.shape[:2], capacity + capacity // 2, buffer.shape[3])
        larger[:, :, : self.length] = buffer[:, :, : self.length]
        return larger

    def used(self) -> list[KeyValue]:
        """What a block attends to, `[B, Hkv, S, hd]` a layer."""
        return [(k[:, :, : self.length], v[:, :, : self.length]) for k, v in self.layers]

    def places(self, batch: int, device: torch.device) -> Tensor:
        """Sequence indices of the rows of `used`, int64 `[B, S]`; negative where a row is not to be seen."""
        first = self.next_position - self.length
        return torch.arange(first, self.next_position, device=device).expand(batch, -1)

    def ahead(self, count: int, batch: int, device: torch.device) -> Tensor:
        """The next `count` sequence indices, int64 `[B, count]`."""
        return (self.next_position + torch.arange(count, device=device)).expand(batch, -1)


class StaticContext(DrafterContext):
    """The same in buffers that never move, with the lengths on the device: for the captured step.

    Attributes:
        lens, positions: int64 `[B]`, `length` and `next_position` of each text.
        added: int64 `[B]`, how many of the rows that `append` is given count; it writes the others too, where they are
            garbage that the next ones overwrite.
    """

    def __init__(self, shapes: list[KeyValue], capacity: int, added: Tensor) -> None:
        super().__init__([tuple(x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in pair) for pair in shapes])  # type: ignore[misc]
        self.lens, self.positions, self.added = torch.zeros_like(added), torch.zeros_like(added), added
        self.start = 0  # rows at the beginning of the call

    def adopt(self, context: DrafterContext) -> None:
        """Copy another context in."""
        self.start, self.next_position = context.length, context.next_position
        for mine, theirs in zip(self.layers, context.used(), strict=False):
            for buffer, rows in zip(mine, theirs, strict=True):
                buffer[:, :, : context.length] = rows
        self.lens.fill_(context.length)
        self.positions.fill_(context.next_position)

    def copy_out(self, count: int) -> DrafterContext:
        """A context of its own, with the first `count` of the rows that came since `adopt`."""
        length = self.start + count
        rows = [tuple(x[:, :, :length].clone() for x in pair) for pair in self.layers]
        return DrafterContext(rows, length, self.next_position + count)  # type: ignore[arg-type]

    def append(self, rows: list[KeyValue]) -> None:
        """Write the rows `[B, Hkv, R, hd]` behind those that count, and count `added` of them."""
        slots = self.lens[:, None] + torch.arange(rows[0][0].shape[2], device=self.lens.device)
        for buffers, new in zip(self.layers, rows, strict=True):
            for buffer, row in zip(buffers, new, strict=True):
                put_nodes(buffer, slots, row)
        self.lens += self.added
        self.positions += self.added

    def ahead(self, count: int, batch: int, device: torch.device) -> Tensor:
        return self.positions[:, None] + torch.arange(count, device=device)


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, scaled in the input's dtype (as Qwen3's)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling() and use_triton(x):
            from weaver_kernels.fused import rms_norm  # Triton is asked for where it is used

            return rms_norm(x, self.weight, self.eps, plus_one=False)[0]
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class DrafterAttention(nn.Module):
    """Attention of blocks over the context and themselves; queries of one block never see another block."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.dim = dim
        sliding = config.layer_types[layer] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        self.causal = sliding if config.is_causal is None else config.is_causal

    def key_value(self, x: Tensor, rope: KeyValue) -> KeyValue:
        """Keys (normed, rotated) and values of rows `[..., R, H]`: `[..., Hkv, R, hd]`."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.dim))).transpose(-2, -3)
        v = self.v_proj(x).unflatten(-1, (-1, self.dim)).transpose(-2, -3)
        return rotate(k, rope), v

    def forward(
        self, x: Tensor, rope: KeyValue, context: KeyValue, own: KeyValue, context_positions: Tensor, positions: Tensor
    ) -> Tensor:
        """`x [B, A, Q, H]`: `A` blocks of `Q` rows at `positions [B, A, Q]` (the first is the anchor's).

        `context` `[B, Hkv, S, hd]` at `context_positions [B, S]` (negative: masked); `own` `[B, A, Hkv, Q, hd]`.
        """
        q = rotate(
            self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))).transpose(-2, -3), rope
        )  # [B, A, Hq, Q, hd]
        batch, blocks, heads, rows, dim = q.shape
        kv_heads = own[0].shape[2]
        # Query heads of one KV head side by side: [B, Hkv, A * G * Q, hd] against the context, no copies of it.
        grouped = q.view(batch, blocks, kv_heads, -1, dim)  # [B, A, Hkv, G * Q, hd]
        flat = grouped.transpose(1, 2).reshape(batch, kv_heads, -1, dim)
        to_context = (flat @ context[0].transpose(-1, -2)).view(batch, kv_heads, blocks, -1, rows, context[0].shape[2])
        to_own = (grouped @ own[0].transpose(-1, -2)).view(batch, blocks, kv_heads, -1, rows, rows).transpose(1, 2)

        key = context_positions[:, None, None, :]  # [B, 1, 1, S]
        seen = (key >= 0) & (key < positions[:, :, :1, None])  # strictly before the anchor
        if self.window is not None:
            seen = seen & (positions[..., None] - key < self.window)
        scores = torch.cat([to_context, to_own], -1).float() * self.dim**-0.5  # [B, Hkv, A, G, Q, S + Q]
        offset = torch.arange(rows, device=x.device)
        mutual = offset[:, None] - offset[None, :]  # query - key
        inside = torch.ones_like(mutual, dtype=torch.bool) if not self.causal else mutual >= 0
        if self.window is not None:
            inside = inside & (mutual.abs() < self.window)
        visible = torch.cat([seen.expand(-1, -1, rows, -1), inside.expand(batch, blocks, -1, -1)], -1)
        weights = scores.masked_fill(~visible[:, None, :, None], float("-inf")).softmax(-1).to(x.dtype)
        on_context, on_own = weights.split([context[0].shape[2], rows], -1)
        mixed = (on_context.reshape(batch, kv_heads, -1, context[0].shape[2]) @ context[1]).view(
            batch, kv_heads, blocks, -1, rows, dim
        )
        mixed = mixed + (on_own.transpose(1, 2).reshape(batch, blocks, kv_heads, -1, rows) @ own[1]).view(
            batch, blocks, kv_heads, -1, rows, dim
        ).transpose(1, 2)
        out = mixed.permute(0, 2, 4, 1, 3, 5).reshape(batch, blocks, rows, heads * dim)
        return self.o_proj(out)

    def attend(self, x: Tensor, rope: KeyValue, context: "StaticContext", layer: int, topology: TreeTopology) -> Tensor:
        """The same for one block a text, `x [B, Q, H]`, whose keys and values go behind those of a static context."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))).transpose(-2, -3), rope)
        buffers = context.layers[layer]
        slots = context.lens[:, None] + torch.arange(x.shape[1], device=x.device)
        for buffer, row in zip(buffers, self.key_value(x, rope), strict=True):
            put_nodes(buffer, slots, row)
        out = ops.tree_attention(q, *buffers, context.lens, topology, self.dim**-0.5, window=self.window)
        return self.o_proj(out.flatten(-2))


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One pre-norm layer; its keys and values of the context come from the fused features without its input norm."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DrafterMLP(config)

    def forward(
        self, x: Tensor, rope: KeyValue, context: KeyValue, context_positions: Tensor, positions: Tensor
    ) -> Tensor:
        normed = self.input_layernorm(x)
        own = self.self_attn.key_value(normed, rope)
        x = x + self.self_attn(normed, rope, context, own, context_positions, positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDrafter(nn.Module):
    """The network of a DFlash checkpoint. It has neither embedding nor head: both are the target's.

    Args:
        config: a `WeaverConfig` that declares a drafter.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head_dim, self.theta = config.head_dim, config.rope_theta

    def context_rows(self, features: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of every layer for tap features `[B, R, n * H]` at sequence indices `positions [B, R]`."""
        fused = self.hidden_norm(self.fc(features))
        rope = rope_at(positions, self.head_dim, self.theta, fused.dtype)
        layers: Iterable[Any] = self.layers
        return [layer.self_attn.key_value(fused, rope) for layer in layers]

    def block(self, noise: Tensor, context: "StaticContext") -> Tensor:
        """Final hidden states `[B, Q, H]` of one block a text behind a static context, whatever its capacity.

        Args:
            noise: `[B, Q, H]`, the target's embeddings of the anchor and of mask tokens.
            context: with room for `Q` rows behind those that count.
        """
        batch, rows, _ = noise.shape
        positions = context.ahead(rows, batch, noise.device)
        rope = rope_at(positions, self.head_dim, self.theta, noise.dtype)
        # Every slot of a block sees every other, or in causal layers those before it: as a tree, all of it or a chain.
        whole, chain = (_as_tree(batch, rows, causal, noise.device) for causal in (False, True))
        x = noise
        layers: Iterable[Any] = self.layers
        for index, layer in enumerate(layers):
            topology = chain if layer.self_attn.causal else whole
            x = x + layer.self_attn.attend(layer.input_layernorm(x), rope, context, index, topology)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def forward(self, noise: Tensor, context: list[KeyValue], context_positions: Tensor, positions: Tensor) -> Tensor:
        """Final hidden states of every slot.

        Args:
            noise: `[B, A, Q, H]`, the target's embeddings of the anchors and mask tokens.
            context: a layer each, `[B, Hkv, S, hd]`.
            context_positions: int64 `[B, S]`, sequence indices, negative where masked. A block sees what lies strictly
                before its anchor.
            positions: int64 `[B, A, Q]`.

        Returns:
            `[B, A, Q, H]`.
        """
        rope = rope_at(positions, self.head_dim, self.theta, noise.dtype)
        x = noise
        for layer, kv in zip(self.layers, context, strict=True):
            x = layer(x, rope, kv, context_positions, positions)
        return self.norm(x)


def _as_tree(batch: int, rows: int, causal: bool, device: torch.device) -> TreeTopology:
    """Who sees whom in a block of up to 63 rows, as attention over trees is told."""
    row = torch.arange(rows, device=device)
    seen = row[:, None] >= row if causal else torch.ones(rows, rows, dtype=torch.bool, device=device)
    bits = torch.where(seen, 1 << row, 0).sum(-1, keepdim=True)
    depths, none = row.expand(batch, -1), row[:0]
    return TreeTopology(depths - 1, depths, seen.expand(batch, -1, -1), bits.expand(batch, -1, -1), none)


def rope_at(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> KeyValue:
    """Cosine and sine at `positions [..., R]` for heads of width `dim`: `[..., 1, R, dim / 2]` each."""
    frequency = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angle = positions[..., None].float() * theta**-frequency
    return angle.cos().to(dtype).unsqueeze(-3), angle.sin().to(dtype).unsqueeze(-3)


def rotate(x: Tensor, rope: KeyValue) -> Tensor:
    """Rotary embedding by halves: `x [..., heads, rows, hd]`, cosine and sine `[..., 1, rows, hd / 2]`."""
    cos, sin = rope
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
