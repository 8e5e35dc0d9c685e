"""`TokenTree`: the one data structure that drafting, verification and acceptance share."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .errors import InvalidTreeError

__all__ = ["TokenTree"]


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A batch of draft trees, flat and of one static width `N`.

    Node 0 is the root: the last committed token (the anchor). A parent's index is smaller than its child's, siblings
    carry different tokens, and nodes from `sizes` on are padding: parent 0, the anchor's token, no descendants, never
    accepted. Build one with `from_lists`, which checks all of that; `validate` checks a tree built on the device.

    Attributes:
        token_ids: int64 `[B, N]`.
        parents: int64 `[B, N]`, -1 at the root.
        log_probs: float32 `[B, N]`, log-probability of the path to the node under the drafter (root 0, padding -inf).
        sizes: int64 `[B]`, nodes that are not padding, root included.
        labels: for drawing, the text of each node, one list a row.
        accepted: for drawing, bool `[B, N]`, the nodes on the accepted path.
        max_depth: a depth that no node exceeds, known to the host; None where the builder does not say.
    """

    token_ids: Tensor
    parents: Tensor
    log_probs: Tensor
    sizes: Tensor
    labels: list[list[str]] | None = None
    accepted: Tensor | None = None
    max_depth: int | None = None

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]] | None = None,
        *,
        num_nodes: int | None = None,
        device: torch.device | str | None = None,
    ) -> "TokenTree":
        """Build a checked tree from one list of nodes a row, padded to `num_nodes` (by default the largest row).

        Raises:
            InvalidTreeError: a row breaks the contract, or holds more nodes than `num_nodes`.
        """
        if log_probs is None:
            log_probs = [[0.0] * len(row) for row in token_ids]
        if not token_ids or not (len(token_ids) == len(parents) == len(log_probs)):
            raise InvalidTreeError(
                f"{len(token_ids)} rows of tokens, {len(parents)} of parents and {len(log_probs)} of log-probabilities",
                "the same number of rows of each, at least one",
                "Give one list of nodes for each sequence of the batch.",
            )
        for row, (tokens, row_parents, scores) in enumerate(zip(token_ids, parents, log_probs, strict=True)):
            _check_row(row, tokens, row_parents, scores)
        sizes = [len(row) for row in token_ids]
        width = max(sizes) if num_nodes is None else num_nodes
        if width < max(sizes):
            raise InvalidTreeError(
                f"a tree of {max(sizes)} nodes", f"at most {width} nodes", "Prune the tree or raise `num_nodes`."
            )

        def padded(rows: Sequence[Sequence[float]], fills: Sequence[float], dtype: torch.dtype) -> Tensor:
            filled = [list(row) + [fill] * (width - len(row)) for row, fill in zip(rows, fills, strict=True)]
            return torch.tensor(filled, dtype=dtype, device=device)

        batch = len(token_ids)
        return cls(
            token_ids=padded(token_ids, [row[0] for row in token_ids], torch.long),
            parents=padded(parents, [0] * batch, torch.long),
            log_probs=padded(log_probs, [-math.inf] * batch, torch.float32),
            sizes=torch.tensor(sizes, dtype=torch.long, device=device),
            max_depth=max(_depth(row) for row in parents),
        )

    @property
    def batch_size(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_nodes(self) -> int:
        """The static width `N`, padding included."""
        return self.token_ids.shape[1]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    @cached_property
    def is_node(self) -> Tensor:
        """Bool `[B, N]`: True where the node is not padding."""
        return torch.arange(self.num_nodes, device=self.device) < self.sizes[:, None]

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool `[B, N, N]`: `[b, i, j]` says that `j` is `i` or an ancestor of it."""
        node = torch.arange(self.num_nodes, device=self.device)
        # Staying, or one step towards the root: squaring the relation doubles the distance that it covers.
        reach = (self.parents[..., None] == node) | (node[:, None] == node)
        for _ in range(max(self.num_nodes - 1, 1).bit_length()):
            reach = (reach.float() @ reach.float()) > 0
        return reach

    @cached_property
    def depths(self) -> Tensor:
        """Int64 `[B, N]`: 0 at the root, 1 for padding."""
        return self.ancestors.sum(-1) - 1

    @property
    def depth_limit(self) -> int:
        """A depth that no node exceeds, padding (1) included, without asking the device."""
        widest = self.num_nodes - 1
        return widest if self.max_depth is None else min(max(self.max_depth, 1), widest)

    def path(self, node: int, row: int = 0) -> list[int]:
        """The nodes from the root to `node`, on the host."""
        parents = self.parents[row].tolist()
        if not 0 <= node < len(parents):
            raise IndexError(f"node {node} of a tree with {len(parents)} nodes")
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = parents[node]
        return nodes[::-1]

    def children(self, row: int = 0) -> dict[tuple[int, int], int]:
        """`(parent, token) -> child` of one row, on the host."""
        size = int(self.sizes[row])
        tokens, parents = self.token_ids[row].tolist(), self.parents[row].tolist()
        return {(parents[node], tokens[node]): node for node in range(1, size)}

    def best_leaf(self, row: int = 0) -> int:
        """The end of the chain that follows the most probable child from the root down; ties go to the lower index."""
        size = int(self.sizes[row])
        parents, scores = self.parents[row].tolist(), self.log_probs[row].tolist()
        best: dict[int, int] = {}
        for node in range(1, size):
            rival = best.get(parents[node])
            if rival is None or scores[node] > scores[rival]:
                best[parents[node]] = node
        node = 0
        while node in best:
            node = best[node]
        return node

    def pad_to(self, num_nodes: int) -> "TokenTree":
        """The same trees at a larger static width.

        Raises:
            InvalidTreeError: the tree is already wider than `num_nodes`.
        """
        extra = num_nodes - self.num_nodes
        if extra < 0:
            raise InvalidTreeError(
                f"a tree of {self.num_nodes} nodes", f"at most {num_nodes} nodes", "Pad to a larger width."
            )
        if extra == 0:
            return self
        anchors = self.token_ids[:, :1].expand(-1, extra)
        none = self.parents.new_zeros(self.batch_size, extra)
        return replace(
            self,
            token_ids=torch.cat([self.token_ids, anchors], 1),
            parents=torch.cat([self.parents, none], 1),
            log_probs=torch.cat([self.log_probs, self.log_probs.new_full(none.shape, -math.inf)], 1),
            labels=None if self.labels is None else [row + [""] * extra for row in self.labels],
            accepted=None if self.accepted is None else torch.cat([self.accepted, none.bool()], 1),
        )

    def validate(self) -> "TokenTree":
        """Check the whole contract, padding included; returns the tree itself. Copies it to the host.

        Raises:
            InvalidTreeError: names the row, the node and what is wrong with it.
        """
        shape = tuple(self.token_ids.shape)
        shapes = {"parents": self.parents.shape, "log_probs": self.log_probs.shape}
        for name, other in shapes.items():
            if tuple(other) != shape or len(shape) != 2:
                raise InvalidTreeError(
                    f"`{name}` of shape {tuple(other)} beside `token_ids` of shape {shape}",
                    "two equal shapes [B, N]",
                    "Fix the builder that made this tree.",
                )
        sizes = self.sizes.tolist()
        if len(sizes) != shape[0] or any(not 1 <= size <= shape[1] for size in sizes):
            raise InvalidTreeError(
                f"sizes {sizes} for `token_ids` of shape {shape}",
                f"{shape[0]} sizes from 1 to {shape[1]}",
                "Fix the builder that made this tree.",
            )
        for row, size in enumerate(sizes):
            tokens, parents = self.token_ids[row].tolist(), self.parents[row].tolist()
            _check_row(row, tokens[:size], parents[:size], self.log_probs[row, :size].tolist())
            if any(tokens[n] != tokens[0] or parents[n] != 0 for n in range(size, shape[1])):
                raise InvalidTreeError(
                    f"padding of row {row} with other parents or tokens",
                    f"parent 0 and the anchor's token {tokens[0]} from node {size} on",
                    "Pad with `pad_to` or `from_lists(num_nodes=...)`.",
                )
        return self

    def annotate(self, decode: Callable[[list[int]], str] | None = None, accepted: Tensor | None = None) -> "TokenTree":
        """A copy that draws itself with text and the accepted path.

        Args:
            decode: turns a list of token ids into text, e.g. `tokenizer.decode`.
            accepted: bool `[B, N]`, or int64 node indices `[B, P]` of the accepted path (negative entries ignored).
        """
        labels = self.labels
        if decode is not None:
            labels = [[decode([token]) for token in row] for row in self.token_ids.tolist()]
        if accepted is None:
            accepted = self.accepted
        elif accepted.dtype != torch.bool:
            marks = torch.zeros(self.batch_size, self.num_nodes + 1, dtype=torch.bool, device=self.device)
            slots = torch.where(accepted >= 0, accepted, self.num_nodes)  # the extra column swallows what is ignored
            accepted = marks.scatter(1, slots.to(self.device), True)[:, :-1]
        return replace(self, labels=labels, accepted=accepted)

    # ---- drawing ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The tree, indented where it forks: a token a line, its probability given its parent, `*` where accepted."""
        rows = []
        for row in range(self.batch_size):
            if self.batch_size > 1:
                rows.append(f"row {row}")
            rows.extend(self._draw_row(row))
        return "\n".join(rows)

    def _draw_row(self, row: int) -> list[str]:
        nodes = self._nodes(row)
        lines = []
        stack = [(0, "", "")]
        while stack:
            node, lead, indent = stack.pop()
            label, probability, accepted, children = nodes[node]
            share, mark = "" if node == 0 else f"  {probability:.2f}", " *" if accepted else ""
            lines.append(f"{lead}{label}{share}{mark}")
            if len(children) == 1:  # no fork, no indentation: deep chains stay readable
                stack.append((children[0], indent, indent))
                continue
            for child in reversed(children):
                last = child == children[-1]
                stack.append((child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  ")))
        return lines

    def _nodes(self, row: int) -> list[tuple[str, float, bool, list[int]]]:
        """Label, conditional probability, accepted mark and children of each node that is not padding."""
        size = int(self.sizes[row])
        tokens, parents = self.token_ids[row].tolist(), self.parents[row].tolist()
        scores = self.log_probs[row].tolist()
        accepted = [False] * size if self.accepted is None else self.accepted[row].tolist()
        children: list[list[int]] = [[] for _ in range(size)]
        for node in range(1, size):
            children[parents[node]].append(node)
        out = []
        for node in range(size):
            label = str(tokens[node]) if self.labels is None else repr(self.labels[row][node])
            given = math.exp(scores[node] - scores[parents[node]]) if node else 1.0
            out.append((label, given, accepted[node], children[node]))
        return out

    def _repr_html_(self) -> str:
        """The trees as SVG, for notebooks: depth runs to the right, the accepted path is drawn in green."""
        return "".join(self._svg_row(row) for row in range(self.batch_size))

    def _svg_row(self, row: int) -> str:
        nodes = self._nodes(row)
        depths = self.depths[row].tolist()
        column, line = 150, 27
        # A leaf takes the next line; a parent stands beside its first child (children have larger indices).
        height: dict[int, float] = {}
        order = 0
        stack = [0]
        while stack:
            node = stack.pop()
            if not nodes[node][3]:
                height[node] = order
                order += 1
            stack.extend(reversed(nodes[node][3]))
        for node in reversed(range(len(nodes))):
            if nodes[node][3]:
                height[node] = height[nodes[node][3][0]]
        edges, boxes = [], []

        def place(node: int) -> tuple[float, float]:
            return 4 + depths[node] * column, 16 + height[node] * line

        for node, (label, probability, accepted, children) in enumerate(nodes):
            x, y = place(node)
            short = label if len(label) <= 12 else label[:11] + "…"
            width = 12 + 7.3 * len(short) + (0 if node == 0 else 28)
            for child in children:
                (cx, cy), (_, share, taken, _) = place(child), nodes[child]
                edges.append(
                    f'<path d="M{x + width:.0f},{y:.0f} C{cx - 12:.0f},{y:.0f} {cx - 24:.0f},{cy:.0f} {cx},{cy:.0f}" '
                    f'fill="none" stroke="{"#1a7f37" if taken else "#8c959f"}" stroke-width="{1 + 2 * share:.2f}"/>'
                )
            # Boxes of their own colours: readable on a dark page too.
            fill, edge, ink = ("#dafbe1", "#1a7f37", "#0f5323") if accepted else ("#f6f8fa", "#8c959f", "#24292f")
            chance = "" if node == 0 else f' <tspan fill="#57606a" font-size="10">{probability:.2f}</tspan>'
            boxes.append(
                f'<rect x="{x}" y="{y - 10:.0f}" width="{width:.0f}" height="20" rx="4" fill="{fill}" stroke="{edge}"/>'
                f'<text x="{x + 6}" y="{y + 4:.0f}" fill="{ink}" font-weight="{"bold" if accepted else "normal"}">'
                f"<title>{html.escape(label)}</title>{html.escape(short)}{chance}</text>"
            )
        total = 8 + (max(depths[: len(nodes)]) + 1) * column
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{8 + order * line:.0f}" '
            f'font-family="monospace" font-size="12" xml:space="preserve">{"".join(edges)}{"".join(boxes)}</svg>'
        )


def _depth(parents: Sequence[int]) -> int:
    """The depth of one row's deepest node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return max(depths)


def _check_row(row: int, tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]) -> None:
    """Raise unless one row's real nodes form a tree by the contract."""

    def fail(found: str, expected: str) -> None:
        raise InvalidTreeError(f"{found} in row {row}", expected, "Fix the builder that made this tree.")

    if not len(tokens) == len(parents) == len(log_probs):
        fail(f"{len(tokens)} tokens, {len(parents)} parents, {len(log_probs)} log-probabilities", "one of each a node")
    if not tokens or parents[0] != -1:
        fail(f"root parent {parents[0] if parents else None}", "a root, node 0, with parent -1")
    seen = set()
    for node in range(1, len(tokens)):
        parent = parents[node]
        if not 0 <= parent < node:
            fail(f"parent {parent} of node {node}", "a parent with a smaller index")
        if (parent, tokens[node]) in seen:
            fail(f"token {tokens[node]} twice under node {parent}", "siblings with different tokens")
        seen.add((parent, tokens[node]))
        if not log_probs[node] <= log_probs[parent]:  # also catches NaN
            fail(f"path log-probability {log_probs[node]} of node {node}", f"at most its parent's {log_probs[parent]}")
