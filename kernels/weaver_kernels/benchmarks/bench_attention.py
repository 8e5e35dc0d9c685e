"""Times of tree attention beside SDPA with a 4-D mask, and beside what the card can do: one JSON line a row.

Run: `python -m weaver_kernels.benchmarks.bench_attention`. Heads of the 27B hybrids, batch 1, bf16. `floor_us` is the
larger of reading the prefix's keys and values once at the measured rate and the products at 60 % of the measured rate
of large bf16 products; `ratio` is `us / floor_us` and `target` what it should not exceed. A configuration whose output
is wrong is not timed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from weaver_kernels import reference
from weaver_kernels.attention import AttentionConfig, attention_config, split_count, tree_attention
from weaver_kernels.benchmarks.timing import copies, report, time_captured
from weaver_kernels.reference import TreeTopology

HEADS, KV_HEADS, DIM = 24, 4, 256
CONTEXTS = (512, 8192, 32768, 65536)
NODES = (1, 16, 64, 128)
CAPACITY = CONTEXTS[-1] + NODES[-1]
BOUND = 1e-2
# rows, slots, warps, stages, programs a multiprocessor
WIDE = [(128, 32, 8, 3, 1), (128, 32, 8, 4, 1), (128, 64, 8, 2, 1), (64, 32, 4, 2, 2)]
SWEEP = {
    1: [(16, 32, 4, 3, 2), (16, 64, 4, 3, 1), (16, 32, 4, 4, 2)],
    16: [*WIDE, (32, 32, 4, 3, 2)],
    64: WIDE,
    128: WIDE,
}
SWEPT = (8192, 65536)


class Case(NamedTuple):
    """The arguments of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    lens: Tensor
    tree: TreeTopology

    def run(self, config: AttentionConfig | None = None) -> Tensor:
        return tree_attention(self.query, self.key, self.value, self.lens, self.tree, DIM**-0.5, config=config)


def random_tree(nodes: int, seed: int = 0) -> TreeTopology:
    """Every node hangs at a random one of the eight before it: deep and bushy."""
    gen = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(max(0, node - 8), node, (1,), generator=gen)) for node in range(1, nodes))]
    return reference.tree_topology(torch.tensor([parents], device="cuda"), 4)


def cases(pool: Tensor, context: int, nodes: int) -> Iterator[Case]:
    """Enough cases on parts of `pool [2, 1, Hkv, slots, D]` that do not overlap to find the cache cold."""
    tree, lens = random_tree(nodes), torch.tensor([context], device="cuda")
    step = context + nodes
    for i in range(copies(2 * KV_HEADS * DIM * step * 2)):
        key, value = pool[:, :, :, i * step : i * step + CAPACITY]  # one capacity: the grid knows no lengths
        query = torch.randn(1, nodes, HEADS, DIM, dtype=pool.dtype, device="cuda").transpose(1, 2)
        yield Case(query, key, value, lens, tree)


def gate(case: Case, expected: Tensor, config: AttentionConfig | None) -> float:
    """Relative error; raises where it is beyond rounding."""
    error = float((case.run(config).float() - expected).norm() / expected.norm())
    if not error < BOUND:
        raise AssertionError(f"An error of {error}; expected below {BOUND}.")
    return error


def configurations(nodes: int, case: Case, sweep: bool) -> list[AttentionConfig]:
    """The default one first."""
    found = [attention_config(case.query, case.key)]
    units = torch.cuda.get_device_properties(0).multi_processor_count
    for rows, slots, warps, stages, programs in SWEEP[nodes] if sweep else ():
        tiles = triton.cdiv(nodes * HEADS // KV_HEADS, rows) * KV_HEADS
        splits = split_count(tiles, programs * units, triton.cdiv(CAPACITY, slots))
        found.append(AttentionConfig(rows, slots, warps, stages, splits))
    return list(dict.fromkeys(found))


def baselines(case: Case, context: int, visible: Tensor) -> dict[str, Callable[[], Any]]:
    """SDPA on the slots in use: grouped heads left to it, and repeated as transformers does under a mask."""
    used = context + case.query.shape[2]
    query, key, value = case.query, case.key[:, :, :used], case.value[:, :, :used]
    mask = visible[:, None, :, :used].contiguous()

    def repeated(x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2)

    return {
        "sdpa enable_gqa": lambda: F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True),
        "sdpa repeated heads": lambda: F.scaled_dot_product_attention(query, repeated(key), repeated(value), mask),
    }


def rates(pool: Tensor) -> tuple[float, float]:
    """Measured bytes a second of reading, and operations a second of a large bf16 product."""
    words = pool[0].flatten().view(torch.float32)
    read = words.numel() * 4 / (time_captured([words.sum] * 4) * 1e-6)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = 2 * 8192**3 / (time_captured([partial(torch.matmul, a, b)] * 4, repeats=20) * 1e-6)
    report(row="card", name=torch.cuda.get_device_name(0), torch=torch.__version__, triton=triton.__version__,
           read_TBs=read / 1e12, bf16_TFs=product / 1e12)  # fmt: skip
    return read, product


def times(pool: Tensor, context: int, nodes: int, read: float, product: float) -> None:
    """The kernel with its configurations and SDPA at one shape."""
    every = list(cases(pool, context, nodes))
    case = every[0]
    used = context + nodes
    visible = reference.visible_slots(case.tree, case.lens, used)
    expected = reference.tree_attention(
        case.query.float(), case.key[:, :, :used].float(), case.value[:, :, :used].float(), visible, DIM**-0.5
    )
    read_us = 2 * KV_HEADS * DIM * used * 2 / read * 1e6
    product_us = 4 * HEADS * DIM * nodes * used / (0.6 * product) * 1e6
    floor = max(read_us, product_us)
    shape: dict[str, Any] = {"context": context, "nodes": nodes}
    best: tuple[float, Any] = (float("inf"), None)
    for i, config in enumerate(configurations(nodes, case, context in SWEPT)):
        try:
            error = gate(case, expected, config)
        except Exception as reason:  # no speed for what is wrong or does not fit on the card
            report(row="kernel", **shape, config=config, wrong=f"{type(reason).__name__}: {reason}"[:200])
            continue
        micros = time_captured([partial(c.run, config) for c in every])
        best = min(best, (micros, config))
        report(row="kernel" if i else "kernel (default)", **shape, config=config, us=micros, read_us=read_us,
               product_us=product_us, floor_us=floor, ratio=micros / floor, target=1.5 if nodes >= 64 else 1.3,
               error=error)  # fmt: skip
    report(row="best", **shape, config=best[1], us=best[0], ratio=best[0] / floor)
    for name, call in baselines(case, context, visible).items():
        try:
            error = float((call().transpose(1, 2).float() - expected).norm() / expected.norm())
            repeats = 50 if context < CONTEXTS[-1] else 10  # milliseconds each; larger than any cache
            calls = [baselines(c, context, visible)[name] for c in every[: 16 if context == CONTEXTS[0] else 2]]
            report(row=name, **shape, us=time_captured(calls, repeats), error=error)
        except torch.cuda.OutOfMemoryError as reason:
            report(row=name, **shape, us="failed", why=str(reason)[:200])


def profile(pool: Tensor, context: int, nodes: int) -> None:
    """Where the time goes: the two launches apart, each on cold buffers."""
    every = list(cases(pool, context, nodes))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for case in every:
            case.run()
        torch.cuda.synchronize()
    parts = {e.key: e.device_time_total / e.count for e in seen.key_averages() if e.key.startswith("_")}
    report(row="profile", context=context, nodes=nodes, **parts)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("Found no GPU; this measures Triton kernels on one.")
    slots = 16 * (CONTEXTS[-1] + NODES[-1])
    pool = torch.randn(2, 1, KV_HEADS, slots, DIM, dtype=torch.bfloat16, device="cuda")
    read, product = rates(pool)
    for nodes in (16, 64, 1, 128):
        for context in CONTEXTS[::-1]:
            times(pool, context, nodes, read, product)
    for context, nodes in ((8192, 16), (8192, 64), (65536, 16), (65536, 64)):
        profile(pool, context, nodes)


if __name__ == "__main__":
    main()
