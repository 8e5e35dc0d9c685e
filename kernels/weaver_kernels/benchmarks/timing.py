"""Times of kernels as a decoding step sees them: captured in a CUDA graph, cold cache, medians."""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["COLD", "copies", "random_parents", "report", "time_captured"]

COLD = 128 << 20  # bytes between two uses of a buffer: more than twice the second-level cache of an H200


def time_captured(calls: Sequence[Callable[[], Any]], repeats: int = 50) -> float:
    """Median microseconds of one call, all of them captured one after the other in a CUDA graph.

    Calls on enough distinct buffers (`copies`) find the cache cold. What they return is kept, so that outputs are
    distinct too.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for repeat in range(repeats + 3):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return statistics.median(times)


def copies(size: int) -> int:
    """How many distinct sets of `size` bytes keep the cache cold, and at least enough to hide a graph's own launch."""
    return max(16, -(-COLD // size))


def random_parents(nodes: int, depth: int = 15, seed: int = 0) -> Tensor:
    """`[1, T]`: a spine of `depth` nodes and random branches no deeper."""
    gen = torch.Generator().manual_seed(seed)
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        parent = node - 1 if node <= min(depth, nodes // 2) else int(torch.randint(node, (1,), generator=gen))
        while depths[parent] >= depth:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return torch.tensor([parents], device="cuda")


def report(**row: Any) -> None:
    """One JSON line."""
    print(json.dumps({k: round(v, 3) if isinstance(v, float) and v > 0.01 else v for k, v in row.items()}), flush=True)
