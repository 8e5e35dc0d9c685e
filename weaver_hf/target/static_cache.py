"""The target's cache in memory that never moves: what a captured step reads and writes.

All lengths lie on the device and all shapes are fixed, so one capture serves every step of every text that fits. A
prompt's stock cache is copied in, and what `generate` hands back is copied out into it: nobody shares memory with it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from weaver_kernels import ops
from weaver_kernels.reference import TreeBuffers, put_nodes

from ..tree import TokenTree
from .cache import TreePlan

__all__ = ["StaticKVLayer", "StaticLinearLayer", "StaticTreeCache", "cannot_stack"]


class StaticLinearLayer(LinearAttentionLayer):
    """Views of one Gated DeltaNet layer: committed window and state, and where a verification leaves its stash.

    Attributes:
        rows: `[B, N, C]`, raw convolution rows.
        delta: the delta rule's stash.
    """

    def __init__(self, buffers: TreeBuffers, index: int) -> None:
        super().__init__()
        self.conv_states[0], self.recurrent_states[0] = buffers.window[index], buffers.state[index]
        self.has_previous_state[0] = True
        self.rows, self.delta = buffers.rows[index], buffers.stash(index)


class StaticKVLayer(DynamicLayer):
    """Views of one attention layer: `keys_buffer, values_buffer [B, Hkv, S, D]`."""

    def __init__(self, kv: Tensor, slots: Tensor) -> None:
        super().__init__()
        self.keys_buffer, self.values_buffer = kv[0], kv[1]
        self._slots = slots  # int64 [B, N], of the nodes; the cache fills it before each verification

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the nodes behind the committed rows of each text; returns the whole buffers."""
        put_nodes(self.keys_buffer, self._slots, key_states)
        put_nodes(self.values_buffer, self._slots, value_states)
        return self.keys_buffer, self.values_buffer

    def get_seq_length(self) -> int:
        return 0  # positions and masks are handed down; nothing may be computed from a length on the host


def cannot_stack(cache: Cache) -> str | None:
    """Why the layers of a prefilled cache cannot lie in common buffers, None where they can."""
    shapes: dict[str, set[Any]] = {"attention": set(), "linear": set()}
    for layer in cache.layers:
        if type(layer) is LinearAttentionLayer:
            window, state = layer.conv_states[0], layer.recurrent_states[0]
            shapes["linear"].add((window.shape, window.dtype, state.shape, state.dtype, window.device))
            if state.dtype != torch.float32:
                return f"recurrent states in {state.dtype}"
        else:
            shapes["attention"].add((layer.keys.shape[1::2], layer.keys.dtype, layer.keys.device))
            if layer.keys.shape != layer.values.shape:
                return "keys and values of different shapes"
    for kind, found in shapes.items():
        if len(found) > 1:
            return f"{kind} layers of {len(found)} kinds of shape, dtype or device"
    return None


class StaticTreeCache:
    """Preallocated buffers of one model's layers, and the stock cache that they stand in for during a call.

    Args:
        example: a prefilled stock cache that `cannot_stack` has nothing against: whose shapes are taken.
        nodes: `N`, rows of a verification.
        capacity: `S`, slots of the KV buffers, the nodes' own included.
        planes: leading shape of position ids, `()` or `(planes,)`.

    Attributes:
        cache: what the model is called with.
        lens: int64 `[B]`, committed slots; starts: int64 `[B]`, the first that is no padding.
        position_offset: int64 `[B]` or `[planes, B]`, position id less slot.
        path, lengths: int64 `[B, P]` and `[B]`, what the next verification commits first.
        pending: nodes emitted since the last verification began, known to the host.
        length: tokens committed, known to the host.
    """

    def __init__(self, example: Cache, nodes: int, capacity: int, depth: int, planes: tuple[int, ...] = ()) -> None:
        linear = [x for x in example.layers if type(x) is LinearAttentionLayer]
        attention = [x for x in example.layers if type(x) is not LinearAttentionLayer]
        some = linear[0].conv_states[0] if linear else attention[0].keys
        batch, device = some.shape[0], some.device

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        if linear:
            state, window = linear[0].recurrent_states[0], linear[0].conv_states[0]
            (_, heads, dk, dv), (_, channels, width) = state.shape, window.shape
            key_heads = (channels - heads * dv) // (2 * dk)
        else:
            heads = dk = dv = channels = width = key_heads = 1
        kv_heads, dim = (attention[0].keys.shape[1], attention[0].keys.shape[3]) if attention else (1, 1)
        count, dtype = len(linear), some.dtype
        self.buffers = TreeBuffers(
            state=empty(count, batch, heads, dk, dv),
            window=empty(count, batch, channels, width, dtype=dtype),
            rows=empty(count, batch, nodes, channels, dtype=dtype),
            keys=empty(count, batch, key_heads, nodes, dk),
            updates=empty(count, batch, heads, nodes, dv),
            decay=empty(count, batch, heads, nodes),
            kv=empty(len(attention), 2, batch, kv_heads, capacity, dim, dtype=dtype),
        )
        self.capacity, self.nodes = capacity, nodes
        integers = {"dtype": torch.long, "device": device}
        self.lens, self.starts = (torch.zeros(batch, **integers) for _ in range(2))
        self.position_offset = torch.zeros(*planes, batch, **integers)
        self.path = torch.zeros(batch, min(depth + 1, nodes), **integers)
        self.lengths = torch.zeros(batch, **integers)
        self._slots = torch.zeros(batch, nodes, **integers)
        self.cache = DynamicCache()
        kinds = [type(x) is LinearAttentionLayer for x in example.layers]
        places = [sum(kinds[:i]) if kind else i - sum(kinds[:i]) for i, kind in enumerate(kinds)]
        self.cache.layers = [
            StaticLinearLayer(self.buffers, place) if kind else StaticKVLayer(self.buffers.kv[place], self._slots)
            for kind, place in zip(kinds, places, strict=True)
        ]
        self.width = width
        self.stock: Cache | None = None
        self.length = 0
        self.pending: list[int] = []

    def adopt(self, stock: Cache, starts: Tensor | None, next_position: Tensor) -> None:
        """Copy a prefilled cache in; `next_position` int64 `[B]` or `[planes, B]` is that of the token behind it."""
        self.stock, self.length, self.pending = stock, stock.get_seq_length(), []
        for mine, theirs in zip(self.cache.layers, stock.layers, strict=True):
            if isinstance(mine, StaticLinearLayer):
                mine.conv_states[0].copy_(theirs.conv_states[0])
                mine.recurrent_states[0].copy_(theirs.recurrent_states[0])
            else:
                mine.keys_buffer[:, :, : self.length] = theirs.keys
                mine.values_buffer[:, :, : self.length] = theirs.values
        self.lens.fill_(self.length)
        self.starts.copy_(torch.zeros_like(self.starts) if starts is None else starts)
        self.position_offset.copy_(next_position - self.length)
        self.lengths.zero_()

    def commit(self) -> None:
        """Commit `path` and count it: the front of a verification, captured with it."""
        ops.commit(self.buffers, self.path, self.lengths, self.lens)
        self.lens += self.lengths

    def plan(self, tree: TokenTree) -> TreePlan:
        """The facts of a tree that hangs at the end of the committed text; the layers write to its nodes' slots."""
        topology = ops.tree_topology(tree.parents, self.width)
        self._slots.copy_(self.lens[:, None] + torch.arange(self.nodes, device=self.lens.device))
        positions = (self.lens + self.position_offset)[..., None] + topology.depths
        return TreePlan(topology, self.lens, positions, self.starts, fused=True)

    def defer(self, nodes: Sequence[int]) -> None:
        """What the host has emitted since the last verification began, for `release`."""
        self.pending = list(nodes)

    def began(self) -> None:
        """A verification has begun, and so has the commit of what was pending."""
        self.length += len(self.pending)
        self.pending = []

    def release(self) -> Cache | None:
        """Commit what the host has emitted and copy everything into the stock cache; also after an error."""
        stock, self.stock = self.stock, None
        if stock is None:
            return None
        path = torch.zeros_like(self.path)
        path[0, : len(self.pending)] = torch.tensor(self.pending, device=path.device, dtype=path.dtype)
        self.path.copy_(path)
        self.lengths.fill_(len(self.pending))
        self.lens.fill_(self.length)
        self.commit()
        self.began()
        for mine, theirs in zip(self.cache.layers, stock.layers, strict=True):
            if isinstance(mine, StaticLinearLayer):
                theirs.conv_states[0].copy_(mine.conv_states[0])
                theirs.recurrent_states[0].copy_(mine.recurrent_states[0])
            else:
                theirs.keys = mine.keys_buffer[:, :, : self.length].clone()
                theirs.values = mine.values_buffer[:, :, : self.length].clone()
        return stock
