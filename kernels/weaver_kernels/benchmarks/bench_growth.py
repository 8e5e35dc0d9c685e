# mypy: allow-untyped-defs
"""Times of whole growths at the released 27B geometry, kernels beside torch operations, both captured: JSON lines.

Run: `python -m weaver_kernels.benchmarks.bench_growth`. A shape whose trees differ from the plain search's in fp32, or
change from run to run, is not timed. A growth is everything between the drafter's block and the tree: the prefix, 16
or 8 rounds, pruning.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from weaver_hf.adapter import AdapterScorer, FoldedTables, TopKAdapter
from weaver_hf.configuration_weaver import AdapterConfig
from weaver_hf.drafter import DraftBlock
from weaver_hf.proposal.conditional import grow
from weaver_hf.proposal.conditional_kernels import grow_adapter
from weaver_hf.scoring import DraftRule
from weaver_kernels import adapter_step, growth
from weaver_kernels.benchmarks.timing import copies, report, time_captured

HIDDEN, VOCAB, DEPTHS, BUDGET, CHILDREN = 5120, 248_320, 15, 63, 16
ROUNDS = {"16x4": [1] + [4] * 15, "8x8": [1] + [8] * 7}
LINEAR = [
    {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
    for n, k, warps, stages in (
        (16, 128, 4, 4), (16, 256, 4, 3), (16, 256, 4, 4), (16, 512, 4, 3), (32, 128, 4, 5), (32, 256, 4, 3),
        (16, 256, 2, 4), (16, 512, 8, 3),
    )
]  # fmt: skip
SCORE: list[dict[str, int]] = [
    {"BLOCK_N": 512}, {"BLOCK_N": 1024}, {"BLOCK_C": 4, "BLOCK_N": 512}, {"BLOCK_C": 16, "BLOCK_N": 256}
]  # fmt: skip


class Case:
    """An adapter on a random target, and blocks of candidates."""

    def __init__(self, pool: int, dtype: torch.dtype, fold: bool, blocks: int) -> None:
        with torch.device("cuda"):
            self.adapter = TopKAdapter(HIDDEN, AdapterConfig("learned")).to(dtype).eval()
            # In fp32, for the gate alone, a smaller vocabulary: the folded tables of the whole one take 4 GiB.
            vocab = VOCAB if dtype == torch.bfloat16 else 16_384
            self.embedding = torch.nn.Embedding(vocab, HIDDEN, dtype=dtype)
            self.head = torch.nn.Linear(HIDDEN, vocab, bias=False, dtype=dtype)
            self.blocks = []
            for _ in range(blocks):
                ids = torch.stack([torch.randperm(vocab)[:pool] for _ in range(DEPTHS)])[None]
                logits = (torch.randn(1, DEPTHS, pool) * 3).sort(-1, descending=True).values
                hidden = torch.randn(1, DEPTHS, HIDDEN, dtype=dtype)
                self.blocks.append(DraftBlock(hidden, ids, logits, logits.log_softmax(-1)))
            self.target_hidden, self.anchors = torch.randn(1, HIDDEN, dtype=dtype), torch.tensor([[5]])
        self.rule = DraftRule([1.0] * DEPTHS)
        self.tables = FoldedTables.build(self.adapter, self.embedding, self.head) if fold else None

    def arguments(self, block: DraftBlock) -> tuple[Any, Any, Any, Any, Any, Any]:
        return self.adapter, self.embedding, self.head, block, self.target_hidden, self.rule

    def plain(self, block: DraftBlock, widths: list[int]):
        score = AdapterScorer(*self.arguments(block), self.tables)
        with torch.no_grad():
            return grow(block.token_ids, self.anchors, score, BUDGET, widths, CHILDREN, prune=True)

    def kernels(self, block: DraftBlock, widths: list[int]):
        return grow_adapter(*self.arguments(block), self.anchors, BUDGET, widths, CHILDREN, self.tables)


def same(tree, other) -> bool:
    return torch.equal(tree.token_ids, other.token_ids) and torch.equal(tree.parents, other.parents)


def launches(call: Callable[[], Any]) -> int:
    """Kernels of one eager call."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages())


def sweep_linear() -> None:
    """Microseconds of each matrix of a round on 4 rows, cold, beside torch's product alone."""
    best: dict[str, float] = {}
    shapes = {"qkv": (6144, 2048), "square": (2048, 2048), "token_in": (2048, 5120), "query": (5120, 2048)}
    for name, (features, width) in shapes.items():
        count = copies(2 * features * width)
        weights = [torch.randn(features, width, device="cuda").bfloat16() / width**0.5 for _ in range(count)]
        x, norm = torch.randn(1, 4, width, device="cuda").bfloat16(), torch.ones(2, width, device="cuda").bfloat16()
        for config in LINEAR:
            call = partial(adapter_step.adapter_linear, x, norm=(norm[0], norm[1]), config=config)
            us = time_captured([partial(call, weight) for weight in weights])
            best[str(config)] = best.get(str(config), 0.0) + us
            report(part="linear", matrix=name, config=config, us=us, gb_s=2e-3 * features * width / us)
        us = time_captured([partial(torch.nn.functional.linear, x, weight) for weight in weights])
        report(part="linear", matrix=name, config="torch, without the norm", us=us)
    report(part="linear", best=min(best, key=lambda config: best[config]), us=min(best.values()))


def main() -> None:
    """Check, sweep, and print one line a shape."""
    torch.manual_seed(0)
    sweep_linear()
    for fold in (True, False):
        for pool in (256, 64):
            exact = Case(pool, torch.float32, fold, 1)
            case = Case(pool, torch.bfloat16, fold, 4)
            for name, widths in ROUNDS.items():
                block = exact.blocks[0]
                right = same(exact.kernels(block, widths), exact.plain(block, widths))
                first = case.kernels(case.blocks[0], widths)
                steady = all(same(case.kernels(case.blocks[0], widths), first) for _ in range(20))
                shape = {"part": "growth", "rounds": name, "pool": pool, "folded": fold}
                report(**shape, equal_in_fp32=right, steady=steady)
                if not (right and steady):
                    continue
                kept = dict(growth.SCORE)
                for config in SCORE if fold else SCORE[:1]:
                    growth.SCORE.clear()
                    growth.SCORE.update({**kept, **config})
                    calls = [partial(case.kernels, block, widths) for block in case.blocks]
                    report(**shape, config=config, us=time_captured(calls, 20))
                growth.SCORE.clear()
                growth.SCORE.update(kept)
                calls = [partial(case.plain, block, widths) for block in case.blocks]
                report(
                    **shape, torch_us=time_captured(calls, 10), torch_launches=launches(calls[0]),
                    launches=launches(partial(case.kernels, case.blocks[0], widths)),
                )  # fmt: skip
            del exact, case


if __name__ == "__main__":
    main()
