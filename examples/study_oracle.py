"""The oracle's scores: the target's own conditionals of a drafter's candidates, at places of known texts.

What a tree could be with a perfect adapter: a pass of the target for every pass of the adapter, over several texts at
once. Needs no drafter: any pools and any `weaver_hf.proposal` search over conditional scores will do.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache

from weaver_hf import TokenTree
from weaver_hf.target.cache import TreeCache, verify_tree
from weaver_hf.target.compat import CACHE_KEY


class CommittedTexts:
    """The target's states of several texts, each committed up to its own place, where its trees hang.

    Verifying a tree commits nothing, so trees can be verified again and again while they grow.

    Args:
        model: to which a Weaver is attached.
        texts: ids of each text.
        places: for each text, index in its ids of the anchor, the first token that is not committed; at least 1.
    """

    @torch.no_grad()
    def __init__(self, model: Any, texts: Sequence[list[int]], places: Sequence[int]) -> None:
        self.model, self.texts, self.places = model, texts, list(places)
        caches = []
        for ids, place in zip(texts, places, strict=True):
            cache = DynamicCache(config=model.config)
            prompt = torch.tensor([ids[:place]], device=model.device)
            model(prompt, use_cache=True, logits_to_keep=1, **{CACHE_KEY: cache})
            caches.append(cache)
        lengths = torch.tensor(self.places, device=model.device)
        longest = int(lengths.max())
        mask = torch.arange(longest, device=model.device) >= longest - lengths[:, None]
        room = max(len(ids) - place for ids, place in zip(texts, places, strict=True)) + 128
        self.cache = TreeCache(stacked(caches, longest), mask, lengths, room)

    def move(self, texts: Sequence[int], places: Sequence[int]) -> None:
        """Commit these texts up to new places; the others stay."""
        runs = [0] * len(self.texts)
        for i, place in zip(texts, places, strict=True):
            runs[i] = place - self.places[i]
        most = max(runs)
        if most == 0:
            return
        ids = [(text + [0] * most)[p : p + most] for text, p in zip(self.texts, self.places, strict=True)]
        chain = list(range(most))
        self.logits(TokenTree.from_lists(ids, [[i - 1 for i in chain]] * len(ids), device=self.model.device), keep=1)
        lengths = torch.tensor(runs, device=self.model.device)
        path = torch.tensor(chain, device=self.model.device).expand(len(ids), -1)
        self.cache.defer(path, lengths, int((self.cache.lens + lengths).max()) - self.cache.length)
        self.cache.commit()
        self.places = [place + run for place, run in zip(self.places, runs, strict=True)]

    @torch.no_grad()
    def logits(self, tree: TokenTree, keep: int) -> Tensor:
        """The target's logits after the last `keep` nodes of trees at the committed texts, `[B, keep, V]`."""
        plan = self.cache.plan(tree)
        return verify_tree(self.model, tree.token_ids, plan, self.cache.cache, logits_to_keep=keep)


def stacked(caches: Sequence[Cache], longest: int) -> Cache:
    """The caches of single texts as one batch, in the first of them; shorter texts are padded on the left."""
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        first = layers[0]
        if hasattr(first, "recurrent_states"):
            for name in ("conv_states", "recurrent_states"):
                getattr(first, name)[0] = torch.cat([getattr(layer, name)[0] for layer in layers])
        else:
            for name in ("keys", "values"):
                tensors = [getattr(layer, name) for layer in layers]
                padded = [F.pad(x, (0, 0, longest - x.shape[2], 0)) for x in tensors]
                setattr(first, name, torch.cat(padded))
    return caches[0]


class TargetScorer:
    """`Scorer` whose conditionals are the target's own: log-probabilities over the vocabulary, of the pool's tokens.

    A pass a round over the whole tree so far, because the target keeps no state of a node.

    Args:
        target: whose texts the trees hang at.
        pools: int64 `[B, D, K]`, the candidates of each depth; no other token can be drafted.
        temperature: of the target, above 0.
    """

    def __init__(self, target: CommittedTexts, pools: Tensor, temperature: float) -> None:
        self._target, self._pools, self._temperature = target, pools, temperature
        self._tokens = self._parents = pools[:, 0, :0]

    def __call__(self, token_ids: Tensor, depths: Tensor, ancestors: Tensor, first: int) -> Tensor:
        """See `weaver_hf.proposal.Scorer`."""
        width, slots = ancestors.shape[1:]
        slot = torch.arange(slots, device=token_ids.device)
        own = slot == first + torch.arange(width, device=token_ids.device)[:, None]
        parents = torch.where(ancestors & ~own, slot, -1).amax(-1)  # slots grow along a path, so the last one above
        self._tokens = torch.cat([self._tokens, token_ids], 1)
        self._parents = torch.cat([self._parents, parents], 1)
        batch, nodes = self._tokens.shape
        sizes = torch.full((batch,), nodes, device=token_ids.device)
        no_scores = torch.zeros(batch, nodes, device=token_ids.device)
        logits = self._target.logits(TokenTree(self._tokens, self._parents, no_scores, sizes), keep=width)
        log_p = (logits.float() / self._temperature).log_softmax(-1)
        depth = depths.clamp(max=self._pools.shape[1] - 1)[..., None]
        return log_p.gather(-1, self._pools.gather(1, depth.expand(-1, -1, self._pools.shape[-1])))
