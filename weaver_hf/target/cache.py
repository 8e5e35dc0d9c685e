"""The target's cache during tree decoding: verifying leaves what is committed alone, a path commits in closed form.

The layers of a stock `DynamicCache` are adopted in place after the prefill and released when `generate` ends, so what
the user gets back is the stock cache, and it owns its memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from weaver_kernels import reference

from ..errors import UnsupportedCacheError, UnsupportedModelError
from ..tree import TokenTree

__all__ = ["LinearStash", "TreeCache", "TreeKVLayer", "TreeLinearLayer", "TreePlan", "check_cache"]


@dataclass
class TreePlan:
    """Facts of one tree that all layers share, handed down the forward as the keyword `weaver_tree`.

    Attributes:
        ancestors: bool `[B, N, N]`, see `TokenTree`.
        conv_index: int64 `[B, N, W]`, see `weaver_kernels.reference.causal_conv_index`.
        visible: bool `[B, N, S + N]`, the slots each node attends to: committed ones, then its own ancestors.
        position_ids: int64 `[B, N]`, or `[planes, B, N]` where the prompt's had planes (multimodal rope).
        attended: layers whose attention has read this plan.
    """

    ancestors: Tensor
    conv_index: Tensor
    visible: Tensor
    position_ids: Tensor
    attended: set[int] = field(default_factory=set)

    def to(self, device: Any, non_blocking: bool = False) -> "TreePlan":
        """The same facts on another device: accelerate calls this where layers lie on several."""
        moved = {
            name: getattr(self, name).to(device) for name in ("ancestors", "conv_index", "visible", "position_ids")
        }
        return replace(self, **moved)


class LinearStash(NamedTuple):
    """What a commit needs of one Gated DeltaNet layer: raw convolution rows `[B, N, C]` and the delta rule's stash."""

    rows: Tensor
    delta: reference.GatedDeltaStash


class TreeLinearLayer(LinearAttentionLayer):
    """A Gated DeltaNet layer's state, with the stash of the last verification."""

    stash: LinearStash | None

    def adopt(self) -> None:
        self.stash = None

    def commit(self, path: Tensor, lengths: Tensor) -> None:
        """Move the convolution window and the recurrent state along the path, in place."""
        assert self.stash is not None
        path, lengths = path.to(self.stash.rows.device), lengths.to(self.stash.rows.device)
        window = reference.causal_conv_commit(self.conv_states[0], self.stash.rows, path, lengths)
        state = reference.gated_delta_commit(self.recurrent_states[0], self.stash.delta, path, lengths)
        self.stash = None  # first: a commit that is interrupted and resumed must not apply a layer twice
        self.conv_states[0].copy_(window)
        self.recurrent_states[0].copy_(state)

    def release(self) -> None:
        self.__dict__.pop("stash", None)
        self.__class__ = LinearAttentionLayer


class TreeKVLayer(DynamicLayer):
    """A full-attention layer's keys and values in a buffer with room behind the committed rows.

    Rows `[0, length)` are committed; a verification writes its nodes at `[length, length + N)`, where they stay garbage
    until a commit gathers the accepted ones. Nothing is copied that does not move.
    """

    keys: Tensor | None
    values: Tensor | None
    _keys: Tensor
    _values: Tensor
    length: int
    stash: int | None  # nodes of the last verification, still behind `length`

    def adopt(self, capacity: int) -> None:
        assert self.keys is not None, "adopted after the prefill"
        assert self.values is not None
        self.length, self.stash = self.keys.shape[-2], None
        self._keys, self._values = self._larger(self.keys, capacity), self._larger(self.values, capacity)
        self.keys = self.values = None

    def _larger(self, rows: Tensor, capacity: int) -> Tensor:
        """A buffer with room for `capacity` rows that starts with the committed ones."""
        buffer = rows.new_empty(*rows.shape[:2], max(capacity, self.length), rows.shape[-1])
        buffer[:, :, : self.length] = rows[:, :, : self.length]
        return buffer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the nodes behind the committed rows; returns both, `[B, H, length + N, D]`."""
        nodes = key_states.shape[-2]
        end = self.length + nodes
        if end > self._keys.shape[-2]:
            self._keys, self._values = (self._larger(x, end + end // 2) for x in (self._keys, self._values))
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.stash = nodes
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def commit(self, path: Tensor, lens: Tensor, longest: int) -> None:
        """Gather the accepted nodes to slots `lens[b], lens[b] + 1, ...` of each row; `longest` is the new length."""
        assert self.stash is not None
        path, lens = path.to(self._keys.device), lens.to(self._keys.device)
        slots = lens[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, P]
        for buffer in (self._keys, self._values):
            nodes = buffer[:, :, self.length : self.length + self.stash]
            rows = reference.gather_nodes(nodes, path)
            buffer.scatter_(2, slots[:, None, :, None].expand_as(rows), rows)
        self.stash, self.length = None, longest

    def release(self) -> None:
        if self.keys is None:
            # Contiguous copies of their own: the buffer goes, and nobody shares memory with what the user keeps.
            self.keys = self._keys[:, :, : self.length].clone()
            self.values = self._values[:, :, : self.length].clone()
        for name in ("_keys", "_values", "length", "stash"):
            self.__dict__.pop(name, None)
        self.__class__ = DynamicLayer


def check_cache(cache: Cache | None) -> None:
    """Raise `UnsupportedCacheError` unless the cache is a stock dynamic one, before any work is done on it."""
    found = None
    if cache is None:
        found = "no cache"
    elif type(cache) is not DynamicCache or any(
        type(x) not in (DynamicLayer, LinearAttentionLayer) for x in cache.layers
    ):
        found = f"a {type(cache).__name__} with layers {sorted({type(layer).__name__ for layer in cache.layers})}"
    elif cache.offloading:
        found = "an offloaded cache"
    elif any(layer.record_past for layer in cache.layers if type(layer) is LinearAttentionLayer):
        found = "a cache that records its past (`activate_past_recording` was called on it)"
    if found is not None:
        raise UnsupportedCacheError(
            found,
            "a plain DynamicCache (also what `generate` makes by default)",
            "Leave the cache arguments out, or pass a `DynamicCache(config=model.config)`.",
        )


class TreeCache:
    """The adopted cache of one call of `generate`.

    Lengths live on the device (`lens`); the longest of them, `length`, is also known to the host.

    Args:
        cache: a prefilled `DynamicCache` that `check_cache` accepts.
        attention_mask: int or bool `[B, L]` over the prefilled slots, or None where none is masked.
        next_position: int64 `[B]` or `[planes, B]`, the position ids of the token after the prefilled ones.
        room: slots to reserve behind the prefilled ones.
    """

    def __init__(self, cache: Cache, attention_mask: Tensor | None, next_position: Tensor, room: int) -> None:
        self.cache = cache
        self.length = cache.get_seq_length()
        self.lens = torch.full(next_position.shape[-1:], self.length, device=next_position.device)
        self.position_offset = next_position - self.length
        self.prefilled = None if attention_mask is None else attention_mask.bool()
        self.pending: tuple[Tensor, Tensor, int] | None = None
        try:
            for layer in cache.layers:
                if type(layer) is LinearAttentionLayer:
                    layer.__class__ = TreeLinearLayer
                    layer.adopt()
                else:
                    layer.__class__ = TreeKVLayer
                    layer.adopt(self.length + room)
        except BaseException:  # out of memory: the cache is the user's
            self.release()
            raise

    @property
    def conv_width(self) -> int:
        return next(layer.conv_states[0].shape[-1] for layer in self.linear_layers)

    @property
    def linear_layers(self) -> Iterable[TreeLinearLayer]:
        return (layer for layer in self.cache.layers if isinstance(layer, TreeLinearLayer))

    def plan(self, tree: TokenTree) -> TreePlan:
        """The facts of a tree that hangs at the end of the committed text."""
        slots = torch.arange(self.length, device=tree.device)
        committed = slots < self.lens[:, None]  # [B, S]
        if self.prefilled is not None:
            prompt = self.prefilled.shape[1]
            committed = torch.cat([committed[:, :prompt] & self.prefilled, committed[:, prompt:]], 1)
        visible = torch.cat([committed[:, None].expand(-1, tree.num_nodes, -1), tree.ancestors], -1)
        return TreePlan(
            ancestors=tree.ancestors,
            conv_index=reference.causal_conv_index(tree.parents, tree.depths, self.conv_width),
            visible=visible,
            position_ids=(self.lens + self.position_offset)[..., None] + tree.depths,
        )

    def check_verified(self, plan: TreePlan) -> None:
        """Raise unless every layer has read this plan: a layer that ran another forward would corrupt the text."""
        nodes = plan.ancestors.shape[-1]
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, TreeKVLayer):
                ran = index in plan.attended and layer.stash == nodes
            else:
                ran = layer.stash is not None and layer.stash.rows.shape[1] == nodes
            if not ran:
                raise UnsupportedModelError(
                    f"layer {index} that did not run the tree forward",
                    f"{nodes} verified nodes in every layer",
                    "Another library replaced its forward (a kernel or a patch): undo that, then attach again.",
                )

    def defer(self, path: Tensor, lengths: Tensor, longest: int) -> None:
        """Set the accepted path to be committed later: int64 `[B, P]`, `[B]`, and the largest of the lengths.

        It waits for the next verification, because until then the host may shorten it, and a recurrent state that has
        moved cannot be moved back.
        """
        self.pending = (path, lengths, longest)

    def commit(self) -> None:
        """Commit the pending path, if any. Resumable: a layer that has committed has no stash any more."""
        if self.pending is None:
            return
        path, lengths, longest = self.pending
        for layer in self.cache.layers:
            if layer.stash is None:
                continue
            if isinstance(layer, TreeKVLayer):
                layer.commit(path, self.lens, self.length + longest)
            else:
                layer.commit(path, lengths)
        self.pending = None
        self.lens = self.lens + lengths
        self.length += longest

    def release(self) -> Cache:
        """Commit what is pending and give the stock cache back; also after an error, and then as far as it got."""
        try:
            self.commit()
        finally:
            for layer in self.cache.layers:
                if isinstance(layer, TreeKVLayer | TreeLinearLayer):
                    layer.release()
        return self.cache
