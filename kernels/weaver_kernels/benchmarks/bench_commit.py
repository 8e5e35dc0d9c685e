"""Times of the commit of all layers: captured, cold cache (a call moves more than the cache holds), a JSON line a row.

Run: `python -m weaver_kernels.benchmarks.bench_commit`. Nothing is timed unless all results are right.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from weaver_kernels import reference
from weaver_kernels.commit import CommitConfig, commit
from weaver_kernels.reference import TreeBuffers

from .timing import report, time_captured

NODES, SLOTS, LEN = 64, 1024, 700


class Shape(NamedTuple):
    """Layers and heads of a model."""

    layers: int
    value_heads: int
    channels: int
    attention: int


SHAPES = {"27B": Shape(48, 48, 10240, 16), "9B": Shape(24, 32, 8192, 8)}
CONFIGS = [
    CommitConfig(*fields)
    for fields in (
        (16, 128, 256, 4, 1),
        (16, 128, 256, 2, 1),
        (16, 128, 256, 1, 1),
        (16, 128, 256, 8, 1),
        (8, 128, 256, 4, 1),
        (8, 128, 256, 8, 1),
        (32, 128, 256, 2, 1),
        (16, 64, 256, 4, 1),
        (32, 64, 256, 4, 1),
        (32, 128, 512, 4, 4),
        (64, 128, 512, 2, 4),
        (128, 128, 512, 1, 8),
    )
]


def make_buffers(shape: Shape, batch: int) -> TreeBuffers:
    def rand(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype)

    layers, heads, channels, attention = shape
    return TreeBuffers(
        state=rand(layers, batch, heads, 128, 128),
        window=rand(layers, batch, channels, 4, dtype=torch.bfloat16),
        rows=rand(layers, batch, NODES, channels, dtype=torch.bfloat16),
        keys=torch.nn.functional.normalize(rand(layers, batch, 16, NODES, 128), dim=-1),
        updates=rand(layers, batch, heads, NODES, 128),
        decay=-0.1 * rand(layers, batch, heads, NODES).abs().cumsum(-1),
        kv=rand(attention, 2, batch, 4, SLOTS, 256, dtype=torch.bfloat16),
    )


def make_path(accepted: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """`path [B, 32]` through a tree of 64 nodes, `lengths [B]` and `lens [B]`."""
    gen = torch.Generator().manual_seed(accepted)
    path = torch.zeros(batch, 32, dtype=torch.long)
    for row in path:
        row[1:accepted] = 1 + torch.randperm(NODES - 1, generator=gen)[: accepted - 1].sort().values
    lengths = torch.full((batch,), accepted)
    return path.cuda(), lengths.cuda(), torch.full((batch,), LEN).cuda()


def gate(shape: Shape, batch: int, accepted: int, config: CommitConfig) -> float:
    """The relative error of the states against fp64; raises where a result is wrong."""
    buffers, args = make_buffers(shape, batch), make_path(accepted, batch)
    truth = TreeBuffers(*(x.double() for x in buffers))
    reference.commit(truth, *args)
    commit(buffers, *args, config)
    error = float((buffers.state.double() - truth.state).norm() / truth.state.norm())
    windows = torch.equal(buffers.window.double(), truth.window)
    end = LEN + accepted
    rows = torch.equal(buffers.kv[..., :end, :].double(), truth.kv[..., :end, :])
    if not (error < 3e-7 and windows and rows):
        raise SystemExit(
            f"red: {shape}, batch {batch}, {accepted} accepted, {config}: error of the states {error:.1e}, windows "
            f"equal {windows}, KV rows equal {rows}; nothing is timed"
        )
    return error


def moved_bytes(buffers: TreeBuffers, accepted: int) -> int:
    """States and windows read and written, and the accepted nodes' keys, updates and KV rows, once."""
    share = accepted / NODES
    once = sum(x.numel() * x.element_size() for x in (buffers.keys, buffers.updates)) * share
    twice = sum(x.numel() * x.element_size() for x in (buffers.state, buffers.window))
    twice += buffers.kv[..., :accepted, :].numel() * buffers.kv.element_size()
    return int(once + 2 * twice)


def bench(name: str, batch: int, accepted: int, configs: list[CommitConfig]) -> CommitConfig:
    """The fastest of `configs`."""
    buffers, args = make_buffers(SHAPES[name], batch), make_path(accepted, batch)
    size = moved_bytes(buffers, accepted)
    best, fastest = configs[0], float("inf")
    for config in configs:
        time = time_captured([partial(commit, buffers, *args, config)] * 4)
        if time < fastest:
            best, fastest = config, time
        report(
            kernel="commit",
            model=name,
            batch=batch,
            accepted=accepted,
            config=config._asdict(),
            us=round(time, 1),
            tb_per_s=round(size / time / 1e6, 2),
        )
    return best


def baselines(name: str, accepted: int) -> None:
    buffers, args = make_buffers(SHAPES[name], 1), make_path(accepted, 1)
    about = {"kernel": "commit", "model": name, "batch": 1, "accepted": accepted}
    time = time_captured([partial(reference.commit, buffers, *args)], repeats=20)
    report(**about, baseline="torch reference", us=round(time, 1))
    other = torch.randn_like(buffers.state)
    time = time_captured([partial(buffers.state.copy_, other), partial(other.copy_, buffers.state)] * 2)
    # Also the least that a design with a state per node pays: it copies the accepted node's states.
    report(**about, baseline="a copy of the states", us=round(time, 1))


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and there is none")
    torch.manual_seed(0)
    small = Shape(3, 48, 10240, 2)
    for config in CONFIGS:
        gate(small, 2, 8, config)
    for accepted in (1, 8, 32):
        report(kernel="commit", model="27B", accepted=accepted, error=gate(SHAPES["27B"], 1, accepted, CommitConfig()))
    best = bench("27B", 1, 8, CONFIGS)
    report(kernel="commit", best=best._asdict(), default=CommitConfig()._asdict())
    for accepted in (1, 4, 16, 32):
        bench("27B", 1, accepted, [best])
    bench("27B", 4, 8, [best])
    bench("9B", 1, 8, [best])
    for name in SHAPES:
        baselines(name, 8)


if __name__ == "__main__":
    main()
