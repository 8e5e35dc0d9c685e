"""`suffix`: draft what followed the current suffix earlier in the text. Needs no weights.

Prompt lookup (transformers' `prompt_lookup_num_tokens`) copies one earlier continuation; here several are merged into
one tree, as in SuffixDecoding (arXiv 2411.04975). An occurrence votes for its continuation with a weight that grows
with the length of the match, and a share of each node's mass is kept for "none of these", as in PPM text compression,
so that path probabilities are comparable across the tree and best-first growth is meaningful.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

from ..tree import TokenTree
from .protocol import DraftContext

__all__ = ["SuffixBuilder"]

NGRAM_LENGTHS = (4, 2, 1)  # indexed contexts; longer matches are found by walking back from them
MAX_OCCURRENCES = 32  # most recent ones first
MAX_MATCH = 24  # tokens
# These two are fitted: on the embedded target's loop-free text the trees' own probabilities add up to what is accepted.
MATCH_BASE = 1.4  # weight of a match that is longer by one token
ESCAPE = 3.0  # mass kept for an unseen token, in weights of a one-token match

# An occurrence: where its next token stands, where its continuation began, and its weight.
_Occurrence = tuple[int, int, float]


class SuffixBuilder:
    """Tree builder over matches of the current suffix, with an index that grows with the text."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._rows: list[_SuffixIndex] = []

    def __call__(self, context: DraftContext) -> TokenTree:
        if not self._rows:
            self._rows = [_SuffixIndex() for _ in context.history]
        tokens, parents, scores = [], [], []
        for index, text in zip(self._rows, context.history, strict=True):
            index.follow(text)
            row = index.grow(self.budget)
            tokens.append(row[0])
            parents.append(row[1])
            scores.append(row[2])
        return TokenTree.from_lists(tokens, parents, scores, device=context.device)


class _SuffixIndex:
    """The text so far and where each of its short n-grams ended."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def follow(self, text: Sequence[int]) -> None:
        """Add what `text` has beyond the tokens indexed so far."""
        for token in text[len(self.text) :]:
            self.text.append(token)
            for n in NGRAM_LENGTHS:
                if len(self.text) >= n:
                    self.ends[tuple(self.text[-n:])].append(len(self.text) - 1)

    def occurrences(self) -> list[_Occurrence]:
        """Earlier occurrences of the longest suffixes, each with the weight of its match."""
        text, last = self.text, len(self.text) - 1
        found: dict[int, _Occurrence] = {}
        for n in NGRAM_LENGTHS:
            for end in reversed(self.ends.get(tuple(text[-n:]), ())):
                if len(found) == MAX_OCCURRENCES:
                    break
                if end == last or end in found:
                    continue
                match = n
                while match < MAX_MATCH and match <= end and text[end - match] == text[last - match]:
                    match += 1
                found[end] = (end + 1, end + 1, MATCH_BASE ** (match - 1))
        return list(found.values())

    def grow(self, budget: int) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and path log-probabilities of the best `budget` nodes and the root."""
        tokens, parents, scores = [self.text[-1]], [-1], [0.0]
        escapes = [ESCAPE]  # a drafted token lengthens every match that agrees with it
        frontier: list[tuple[float, int, int, int, list[_Occurrence]]] = []
        order = 0

        def expand(node: int, occurrences: list[_Occurrence]) -> None:
            nonlocal order
            groups: dict[int, list[_Occurrence]] = defaultdict(list)
            for occurrence in occurrences:
                groups[self.text[occurrence[0]]].append(occurrence)
            total = escapes[node] + sum(weight for _, _, weight in occurrences)
            for token, group in groups.items():
                share = sum(weight for _, _, weight in group) / total
                heapq.heappush(frontier, (-(scores[node] + math.log(share)), order, node, token, group))
                order += 1

        expand(0, self.occurrences())
        while frontier and len(tokens) <= budget:
            negative, _, parent, token, group = heapq.heappop(frontier)
            tokens.append(token)
            parents.append(parent)
            scores.append(-negative)
            escapes.append(escapes[parent] / MATCH_BASE)
            expand(len(tokens) - 1, [self._advance(occurrence) for occurrence in group])
        return tokens, parents, scores

    def _advance(self, occurrence: _Occurrence) -> _Occurrence:
        """One token on. At the end of the text a continuation goes on with itself, as in LZ77's overlapping copies."""
        position, start, weight = occurrence
        position += 1
        return (position if position < len(self.text) else start, start, weight)
