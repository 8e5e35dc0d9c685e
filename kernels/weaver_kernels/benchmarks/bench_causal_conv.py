"""Times of the tree convolution and the topology: captured, cold cache, one JSON line a row.

Run: `python -m weaver_kernels.benchmarks.bench_causal_conv`. Nothing is timed unless all results are right.
"""

from functools import partial

import torch
from torch import Tensor

from weaver_kernels import reference
from weaver_kernels.benchmarks.timing import COLD, random_parents, report, time_captured
from weaver_kernels.causal_conv import ConvConfig, causal_conv_tree, default_config, tree_topology

WIDTH = 4
CONFIGS = [
    ConvConfig(*fields)
    for fields in (
        (1, 256, 1),
        (1, 512, 2),
        (2, 256, 1),
        (2, 256, 2),
        (2, 512, 2),
        (4, 128, 1),
        (4, 256, 1),
        (4, 256, 2),
        (4, 512, 4),
        (8, 128, 2),
        (8, 256, 2),
        (8, 256, 4),
    )
]


def inputs(nodes: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows (columns of a wider projection), window, weight and a stash."""
    rows = torch.randn(1, nodes, channels + 512, device="cuda", dtype=dtype)[..., :channels]
    window = torch.randn(1, channels, WIDTH, device="cuda", dtype=dtype)
    weight = torch.randn(channels, 1, WIDTH, device="cuda", dtype=dtype).squeeze(1)
    return rows, window, weight, torch.empty(1, nodes, channels, device="cuda", dtype=dtype)


def gate(nodes: int, channels: int, config: ConvConfig) -> float:
    """The relative error against fp64; raises where a result is wrong."""
    parents = random_parents(nodes)
    topology, expected = tree_topology(parents, WIDTH), reference.tree_topology(parents, WIDTH)
    wrong = [name for name, a, b in zip(topology._fields, topology, expected) if not torch.equal(a, b)]
    rows, window, weight, stash = inputs(nodes, channels)
    output = causal_conv_tree(rows, window, weight, topology.conv_index, stash=stash, config=config).double()
    truth = reference.causal_conv_tree(rows.double(), window.double(), weight.double(), expected.conv_index)
    error = float((output - truth).norm() / truth.norm())
    if wrong or error > 3e-3 or not torch.equal(stash, rows):
        raise SystemExit(
            f"red: {nodes} nodes, {channels} channels, {config}: error {error:.1e}, stash equal "
            f"{torch.equal(stash, rows)}, wrong in the topology: {wrong}; nothing is timed"
        )
    return error


def bench_conv(nodes: int, channels: int, configs: list[ConvConfig]) -> None:
    index = tree_topology(random_parents(nodes), WIDTH).conv_index
    size = 3 * nodes * channels * 2  # read, written, and stashed
    sets = [inputs(nodes, channels) for _ in range(min(-(-COLD // size), 160))]
    about = {"kernel": "causal_conv_tree", "nodes": nodes, "channels": channels, "dtype": "bfloat16"}

    def own(config: ConvConfig) -> float:
        return time_captured([partial(causal_conv_tree, *s[:3], index, stash=s[3], config=config) for s in sets])

    errors = {config: gate(nodes, channels, config) for config in configs}
    times = {config: own(config) for config in configs}
    for config, time in times.items():
        report(**about, config=config._asdict(), us=round(time, 2), error=errors[config])
    best = min(times, key=times.__getitem__)
    report(**about, best=best._asdict(), us=round(times[best], 2), default=default_config(nodes, channels)._asdict())

    def plain(rows: Tensor, window: Tensor, weight: Tensor, stash: Tensor) -> Tensor:
        stash.copy_(rows)
        return reference.causal_conv_tree(rows, window, weight, index)

    time = time_captured([partial(plain, *s) for s in sets[:16]])
    report(**about, baseline="torch reference and a copy to the stash", us=round(time, 2))
    time = time_captured([partial(s[3].copy_, s[0]) for s in sets])
    report(**about, baseline="the copy to the stash alone", us=round(time, 2))


def bench_topology(nodes: int) -> None:
    chain = torch.arange(-1, nodes - 1, device="cuda")[None]
    for shape, parents in (("depth 15", random_parents(nodes)), ("chain", chain)):
        about = {"kernel": "tree_topology", "nodes": nodes, "shape": shape}
        time = time_captured([partial(tree_topology, parents, WIDTH)] * 20)
        report(**about, us=round(time, 2))
        time = time_captured([partial(reference.tree_topology, parents, WIDTH)] * 4)
        report(**about, baseline="torch reference", us=round(time, 2))


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and there is none")
    torch.manual_seed(0)
    for nodes in (16, 64, 256):
        gate(nodes, 10240, default_config(nodes, 10240))
    bench_conv(64, 10240, CONFIGS)
    bench_conv(16, 10240, CONFIGS[:8])
    bench_conv(128, 10240, CONFIGS[4:])
    bench_conv(256, 10240, CONFIGS[4:])
    bench_conv(64, 8192, [default_config(64, 8192)])
    for nodes in (16, 64, 128, 256):
        bench_topology(nodes)


if __name__ == "__main__":
    main()
