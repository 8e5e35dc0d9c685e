"""The target's cache during tree decoding: verifying leaves what is committed alone, a path commits in closed form.

The layers of a stock `DynamicCache` are adopted in place after the prefill and released when `generate` ends, so what
the user gets back is the stock cache, and it owns its memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from weaver_kernels import reference

from ..errors import UnsupportedCacheError, UnsupportedModelError
from ..tree import TokenTree
from .compat import CACHE_KEY

__all__ = [
    "LinearStash",
    "TreeCache",
    "TreeKVLayer",
    "TreeLinearLayer",
    "TreePlan",
    "check_cache",
    "check_verified",
    "verify_tree",
]


@dataclass
class TreePlan:
    """Facts of one tree that all layers share, handed down the forward as the keyword `weaver_tree`.

    Attributes:
        topology: of the trees, see `weaver_kernels.reference`.
        lens: int64 `[B]`, committed slots; the nodes take the slots behind them.
        position_ids: int64 `[B, N]`, or `[planes, B, N]` where the prompt's had planes (multimodal rope).
        starts: int64 `[B]`, the first committed slot that is no padding; None where there is none.
        mask: bool `[B, L]`, the prompt's slots that are seen where that is not all from `starts` on.
        fused: decoder layers run their fused forward (`fused.py`), into static buffers.
        attended: layers that have read this plan.
    """

    topology: reference.TreeTopology
    lens: Tensor
    position_ids: Tensor
    starts: Tensor | None = None
    mask: Tensor | None = None
    fused: bool = False
    attended: set[int] = field(default_factory=set)
    _visible: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def visible(self, slots: int) -> Tensor:
        """Which of a buffer's `slots` each node attends to, bool `[B, N, slots]`; the same for all layers."""
        if slots not in self._visible:
            seen = reference.visible_slots(self.topology, self.lens, slots, self.starts)
            if self.mask is not None:
                seen[..., : self.mask.shape[1]] &= self.mask[:, None]
            self._visible[slots] = seen
        return self._visible[slots]

    def to(self, device: Any, non_blocking: bool = False) -> "TreePlan":
        """The same facts on another device: accelerate calls this where layers lie on several."""
        topology = reference.TreeTopology(*(x.to(device) for x in self.topology))
        starts, mask = (None if x is None else x.to(device) for x in (self.starts, self.mask))
        return TreePlan(
            topology, self.lens.to(device), self.position_ids.to(device), starts, mask, self.fused, self.attended
        )


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

    Rows `[0, lens[b])` are committed; a verification writes its nodes at `[lens[b], lens[b] + N)`, where they stay
    garbage until a commit gathers the accepted ones. Nothing is copied that does not move.
    """

    keys: Tensor | None
    values: Tensor | None
    _keys: Tensor
    _values: Tensor
    length: int  # the largest of `lens`
    lens: Tensor
    stash: int | None  # nodes of the last verification, still behind `lens`

    def adopt(self, capacity: int, lens: Tensor) -> None:
        assert self.keys is not None, "adopted after the prefill"
        assert self.values is not None
        self.length, self.lens, self.stash = self.keys.shape[-2], lens, None
        self._keys, self._values = self._larger(self.keys, capacity), self._larger(self.values, capacity)
        self.keys = self.values = None

    def _larger(self, rows: Tensor, capacity: int) -> Tensor:
        """A buffer with room for `capacity` rows that starts with the committed ones."""
        buffer = rows.new_empty(*rows.shape[:2], max(capacity, self.length), rows.shape[-1])
        buffer[:, :, : self.length] = rows[:, :, : self.length]
        return buffer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the nodes behind the committed rows of each text; returns both, `[B, H, length + N, D]`."""
        nodes = key_states.shape[-2]
        end = self.length + nodes
        if end > self._keys.shape[-2]:
            self._keys, self._values = (self._larger(x, end + end // 2) for x in (self._keys, self._values))
        for buffer, states in ((self._keys, key_states), (self._values, value_states)):
            if len(states) == 1:
                buffer[:, :, self.length : end] = states
            else:
                slots = self.lens.to(states.device)[:, None] + torch.arange(nodes, device=states.device)
                reference.put_nodes(buffer, slots, states)
        self.stash = nodes
        return self._keys[:, :, :end], self._values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def commit(self, path: Tensor, lengths: Tensor, longest: int) -> None:
        """Gather the accepted nodes to slots `lens[b], lens[b] + 1, ...` of each row; `longest` is the new length."""
        path, lens = path.to(self._keys.device), self.lens.to(self._keys.device)
        slots = lens[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, P]
        for buffer in (self._keys, self._values):
            reference.put_nodes(buffer, slots, reference.gather_nodes(buffer, lens[:, None] + path))
        self.stash, self.lens, self.length = None, self.lens + lengths, longest

    def release(self) -> None:
        if self.keys is None:
            # Contiguous copies of their own: the buffer goes, and nobody shares memory with what the user keeps.
            self.keys = self._keys[:, :, : self.length].clone()
            self.values = self._values[:, :, : self.length].clone()
        for name in ("_keys", "_values", "length", "lens", "stash"):
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


def verify_tree(model: Any, token_ids: Tensor, plan: TreePlan, cache: Cache, **options: Any) -> Tensor:
    """The target's logits after the nodes of trees, from a pass that has run the tree forward in every layer.

    Args:
        token_ids: int64 `[B, N]`.
        cache: whose layers the plan was made for.
        options: of the model's forward.
    """
    outputs = model(
        input_ids=token_ids,
        position_ids=plan.position_ids,
        attention_mask=dict.fromkeys(model.config.layer_types),  # none: the plan says what a node sees
        use_cache=True,
        return_dict=True,
        weaver_tree=plan,
        **options,
        **{CACHE_KEY: cache},
    )
    check_verified(plan, len(cache.layers))
    return outputs.logits


def check_verified(plan: TreePlan, layers: int) -> None:
    """Raise unless every layer has read this plan: a layer that ran another forward would corrupt the text.

    Raises:
        UnsupportedModelError: names the layers.
    """
    missing = sorted(set(range(layers)) - plan.attended)
    if missing:
        raise UnsupportedModelError(
            f"layers {missing} that did not run the tree forward",
            f"all {layers} layers to read the tree",
            "Another library replaced their forward (a kernel or a patch): undo that, then attach again.",
        )


def padding_of(attention_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What a prompt's mask `[B, L]` says: first slots that are seen, int64 `[B]`, and the mask where that is not all.

    Padding is on the left as a rule, and then a start says it; waits for the device once.
    """
    if attention_mask is None:
        return None, None
    mask = attention_mask.bool()
    starts = mask.long().argmax(-1)
    left = torch.arange(mask.shape[1], device=mask.device) >= starts[:, None]
    return starts, None if bool((left == mask).all()) else mask


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
        self.starts, self.mask = padding_of(attention_mask)
        self.pending: tuple[Tensor, Tensor, int] | None = None
        try:
            for layer in cache.layers:
                if type(layer) is LinearAttentionLayer:
                    layer.__class__ = TreeLinearLayer
                    layer.adopt()
                else:
                    layer.__class__ = TreeKVLayer
                    layer.adopt(self.length + room, self.lens)
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
        topology = reference.tree_topology(tree.parents, self.conv_width, tree.ancestors)
        positions = (self.lens + self.position_offset)[..., None] + tree.depths
        return TreePlan(topology, self.lens, positions, self.starts, self.mask)

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
                layer.commit(path, lengths, self.length + longest)
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
