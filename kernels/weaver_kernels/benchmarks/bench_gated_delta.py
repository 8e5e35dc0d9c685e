# mypy: allow-untyped-defs
"""Times and errors of the gated delta tree kernel beside the alternatives: one JSON line a row.

Run: `python -m weaver_kernels.benchmarks.bench_gated_delta`. A shape whose results are wrong is not timed. Baselines:
plain torch (`reference`), flash-linear-attention's recurrent kernel on every branch and its chunk kernel on a chain of
as many nodes (the cost of a chain), and a recurrent kernel with one stored state per node, as serving engines do it.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weaver_kernels import reference
from weaver_kernels.benchmarks.timing import copies, random_parents, report, time_captured
from weaver_kernels.gated_delta import GatedDeltaConfig, default_config, gated_delta_tree
from weaver_kernels.reference import GatedDeltaStash, TreeTopology

try:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
except ImportError:
    chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = None

KEY_HEADS, DIM = 16, 128
BOUNDS = {torch.bfloat16: (5e-3, 1e-5), torch.float16: (1e-3, 1e-5), torch.float32: (1e-5, 1e-5)}  # output, u
SWEEP = {
    16: [GatedDeltaConfig(16, 16, DIM, 2), GatedDeltaConfig(16, 16, DIM, 4), GatedDeltaConfig(16, 32, DIM, 4),
         GatedDeltaConfig(16, 64, DIM, 4)],
    64: [GatedDeltaConfig(64, 32, DIM, 4), GatedDeltaConfig(64, 64, DIM, 4), GatedDeltaConfig(64, 64, DIM, 8),
         GatedDeltaConfig(64, 64, DIM, 4, invert="tf32x3"), GatedDeltaConfig(64, 64, DIM, 4, read="bf16"),
         GatedDeltaConfig(64, 128, DIM, 8), GatedDeltaConfig(32, 64, DIM, 4)],
    256: [GatedDeltaConfig(64, 32, DIM, 4), GatedDeltaConfig(64, 64, DIM, 8), GatedDeltaConfig(32, 64, DIM, 4)],
}  # fmt: skip


class Case(NamedTuple):
    """The arguments of one call; `stash` is written."""

    args: list[Any]  # query .. state
    tree: TreeTopology
    stash: GatedDeltaStash

    def run(self, config: GatedDeltaConfig | None = None) -> tuple[Tensor, GatedDeltaStash]:
        return gated_delta_tree(*self.args, topology=self.tree, stash=self.stash, config=config)  # type: ignore[misc]

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, GatedDeltaStash]:
        query, key, value, a, b, A_log, dt_bias, state = self.args
        rows = (query, key, value, *reference.gating(a, b, A_log, dt_bias), state)
        return reference.gated_delta_tree(*(x.to(dtype) for x in rows), ancestors=self.tree.ancestors)  # type: ignore[misc]

    def size(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.args, *self.stash))


def make(nodes: int, heads: int = 48, dtype: torch.dtype = torch.bfloat16, kind: str = "tree", repeated: bool = False,
         seed: int = 0) -> Case:  # fmt: skip
    """Inputs as the layer has them: views of the convolution's rows and of one projection of gates."""
    gen = torch.Generator("cuda").manual_seed(seed)
    key_heads = min(KEY_HEADS, heads)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    rows, gates = rand(1, nodes, (2 * key_heads + heads) * DIM), rand(1, nodes, 2 * heads)
    if repeated:
        same = torch.rand(1, nodes, 1, generator=gen, device="cuda") < 0.9
        rows = torch.where(same, rows[:, :1] + 0.01 * rand(*rows.shape), rows)
        gates += torch.tensor([-3.0] * heads + [4.0] * heads, device="cuda")
    widths = [key_heads * DIM, key_heads * DIM, heads * DIM]
    split = [x.unflatten(-1, (-1, DIM)) for x in rows.to(dtype).split(widths, -1)]
    a, b = gates.to(dtype).chunk(2, -1)
    parents = torch.arange(-1, nodes - 1, device="cuda")[None] if kind == "chain" else random_parents(nodes, seed=seed)
    shapes = (1, key_heads, nodes, DIM), (1, heads, nodes, DIM), (1, heads, nodes)
    stash = GatedDeltaStash(*(torch.empty(s, device="cuda") for s in shapes))
    state = 0.3 * rand(1, heads, DIM, DIM)
    return Case([*split, a, b, rand(heads), rand(heads), state], reference.tree_topology(parents, 4), stash)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def sequential(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """fp64 node by node, each from its parent's state: outputs `[T, Hv, dv]`, u, and the states after every node."""
    query, key, value, a, b, A_log, dt_bias, state = case.args
    groups = value.shape[2] // key.shape[2]
    g, beta = (x[0].double() for x in reference.gating(a, b, A_log, dt_bias))
    q, k = (reference.l2norm(x[0].double()).repeat_interleave(groups, 1) for x in (query, key))
    states: list[Tensor] = []
    outputs, updates = [], []
    for node, parent in enumerate(case.tree.parents[0].tolist()):
        s = (state[0].double() if parent < 0 else states[parent]) * g[node].exp()[:, None, None]
        u = beta[node, :, None] * (value[0, node].double() - torch.einsum("hkv,hk->hv", s, k[node]))
        states.append(s + k[node][..., None] * u[:, None])
        updates.append(u)
        outputs.append(torch.einsum("hkv,hk->hv", states[-1], q[node]) * DIM**-0.5)
    return torch.stack(outputs), torch.stack(updates, 1), torch.stack(states)


def gate(case: Case, config: GatedDeltaConfig | None = None) -> tuple[float, float]:
    """Relative errors of outputs and u against fp64; raises where they are beyond rounding."""
    output, stash = case.run(config)
    exact, exact_stash = case.expected(torch.float64)
    errors = relative(output, exact), relative(stash.updates, exact_stash.updates)
    bounds = BOUNDS[case.args[0].dtype]
    if not all(error < bound for error, bound in zip(errors, bounds)):
        raise AssertionError(f"Errors {errors} of output and u; expected below {bounds}.")
    return errors


@triton.jit
def _state_per_node(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, parents_ptr, nodes_ptr, out_ptr, T, scale,
                    q_t, k_t, v_t, HV: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
                    BV: tl.constexpr):  # fmt: skip
    """Node by node from the parent's stored state; every state is stored, `nodes_ptr [T, Hv, dk, dv]`."""
    tile, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, D), tile * BV + tl.arange(0, BV)
    square = i[:, None] * D + j[None, :]
    for node in range(T):
        parent = tl.load(parents_ptr + node)
        source = state_ptr + head * D * D
        if parent >= 0:
            source = nodes_ptr + (parent * HV + head) * D * D
        s = tl.load(source + square)
        q = tl.load(q_ptr + node * q_t + head // GROUPS * D + i).to(tl.float32)
        k = tl.load(k_ptr + node * k_t + head // GROUPS * D + i).to(tl.float32)
        v = tl.load(v_ptr + node * v_t + head * D + j).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        s *= tl.exp(tl.load(g_ptr + node * HV + head))
        u = tl.load(beta_ptr + node * HV + head).to(tl.float32) * (v - tl.sum(s * k[:, None], 0))
        s += k[:, None] * u[None, :]
        tl.store(nodes_ptr + (node * HV + head) * D * D + square, s)
        tl.store(out_ptr + (node * HV + head) * D + j, tl.sum(s * q[:, None], 0).to(out_ptr.dtype.element_ty))
        tl.debug_barrier()  # a child reads this state back


def state_per_node(case: Case, states: Tensor) -> Tensor:
    """The common practice: outputs `[1, T, Hv, dv]`, with `states [T, Hv, dk, dv]` as scratch."""
    query, key, value, a, b, A_log, dt_bias, state = case.args
    g, beta = reference.gating(a, b, A_log, dt_bias)
    heads, nodes = value.shape[2], value.shape[1]
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    _state_per_node[(DIM // 32, heads)](
        query, key, value, g, beta.contiguous(), state, case.tree.parents, states, out, nodes, DIM**-0.5,
        query.stride(1), key.stride(1), value.stride(1), HV=heads, GROUPS=heads // key.shape[2], D=DIM, BV=32,
        num_warps=4,
    )  # fmt: skip
    return out


def fla_branches(case: Case) -> Callable[[], Any]:
    """fla's recurrent kernel on every root-to-leaf path, all of them in one call with `cu_seqlens`."""
    query, key, value, a, b, A_log, dt_bias, state = case.args
    parents = case.tree.parents[0].tolist()
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    rows = torch.tensor([node for path in paths for node in path], device="cuda")
    ends = torch.tensor([0, *itertools.accumulate(map(len, paths))], dtype=torch.int32, device="cuda")
    q, k, v = (x[:, rows].contiguous() for x in (query, key, value))
    g, beta = (x[:, rows].contiguous() for x in reference.gating(a, b, A_log, dt_bias))
    start = state.expand(len(paths), -1, -1, -1).contiguous()

    def call() -> Any:
        return fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=start, output_final_state=False, use_qk_l2norm_in_kernel=True,
            cu_seqlens=ends,
        )  # fmt: skip

    return call


def fla_chunk(case: Case) -> Callable[[], Any]:
    """fla's chunk kernels over the nodes as one chain."""
    query, key, value, a, b, A_log, dt_bias, state = case.args
    g, beta = reference.gating(a, b, A_log, dt_bias)
    q, k, v, beta = (x.contiguous() for x in (query, key, value, beta))

    def call() -> Any:
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=False, use_qk_l2norm_in_kernel=True
        )

    return call


def errors() -> None:
    """Errors against the fp64 recurrence, and the drift of a state committed 300 times."""
    precise: dict[str, dict[str, Any]] = {
        "default": {},
        "invert tf32x3": {"invert": "tf32x3"},
        "read bf16": {"read": "bf16"},
        "solve tf32": {"solve": "tf32"},  # what the rules forbid
        "invert, solve tf32": {"invert": "tf32", "solve": "tf32"},
    }
    for dtype, kind, repeated in itertools.product(BOUNDS, ("tree", "chain"), (False, True)):
        case = make(64, 48, dtype, kind, repeated)
        out, updates, states = sequential(case)
        last = [i for i in range(64) if case.tree.ancestors[0, 63, i]]
        path = torch.tensor([last], device="cuda"), torch.tensor([len(last)], device="cuda")
        for name, fields in precise.items():
            if dtype != torch.bfloat16 and name != "default":
                continue  # fp32 is ieee everywhere; fp16 as bf16
            config = default_config(64, DIM, DIM, dtype)._replace(**fields)
            output, stash = case.run(config)
            state = reference.gated_delta_commit(case.args[-1], stash, *path)
            report(row="error", T=64, kind=kind, keys="repeated" if repeated else "random", dtype=str(dtype)[6:],
                   precision=name, output=relative(output[0], out), u=relative(stash.updates[0], updates),
                   state=relative(state[0], states[63]))  # fmt: skip
    for dtype in BOUNDS:
        worst, state, exact = 0.0, torch.zeros(1, 48, DIM, DIM, device="cuda"), None
        for round_ in range(300):
            case = make(16, 48, dtype, repeated=round_ % 3 == 0, seed=round_)
            case.args[-1] = state
            _, stash = case.run()
            case.args[-1] = state.double() if exact is None else exact
            _, truth = case.expected(torch.float64)
            node = round_ % 16
            path = case.tree.ancestors[0, node].nonzero().T, case.tree.ancestors[0, node].sum()[None]
            state = reference.gated_delta_commit(state, stash, *path)
            exact = reference.gated_delta_commit(case.args[-1], truth, *path)
            worst = max(worst, relative(state, exact))
        report(row="drift", rounds=300, dtype=str(dtype)[6:], state=worst)


def times(nodes: int, heads: int, sweep: bool) -> None:
    """The kernel with its configurations and, where `sweep`, the alternatives."""
    case = make(nodes, heads)
    shape: dict[str, Any] = {"T": nodes, "heads": f"{KEY_HEADS}/{heads}"}
    cases = [make(nodes, heads, seed=i) for i in range(copies(case.size()))]
    best: tuple[float, Any] = (float("inf"), None)
    configs = [default_config(nodes, DIM, DIM, torch.bfloat16)]
    if sweep:
        configs += [c for c in SWEEP[16 if nodes <= 16 else 64 if nodes <= 64 else 256] if c != configs[0]]
    for config in configs:
        try:
            error, _ = gate(case, config)
        except Exception as reason:  # no speed for what is wrong or does not fit on the card
            report(row="kernel", **shape, config=tuple(config), wrong=f"{type(reason).__name__}: {reason}"[:200])
            continue
        micros = time_captured([partial(c.run, config) for c in cases])
        best = min(best, (micros, tuple(config)))
        name = "kernel (default)" if config == configs[0] else "kernel"
        report(row=name, **shape, config=tuple(config), us=micros, error=error)
    report(row="best", **shape, config=best[1], us=best[0])
    if not sweep:
        return
    states = torch.empty(nodes, heads, DIM, DIM, device="cuda")
    error = relative(state_per_node(case, states), case.expected(torch.float64)[0])
    slow: dict[str, Callable[[Case], Any]] = {
        "torch reference": lambda c: c.expected(torch.float32),
        f"state per node (error {error:.1e})": lambda c: state_per_node(c, states),
    }
    calls: dict[str, list[Callable[[], Any]]] = {
        name: [partial(call, c) for c in cases[:16]] for name, call in slow.items()
    }
    for name, build in (("fla fused_recurrent per branch", fla_branches), ("fla chunk over a chain", fla_chunk)):
        if fused_recurrent_gated_delta_rule is None:
            report(row=name, **shape, us="absent")
        else:
            calls[name] = [build(c) for c in cases[:16]]
    for name, alternatives in calls.items():
        if name.startswith("state") and error > BOUNDS[torch.bfloat16][0]:
            report(row=name, **shape, us="wrong")
            continue
        try:
            report(row=name, **shape, us=time_captured(alternatives))
        except Exception as reason:  # what cannot be captured, or another version of fla
            report(row=name, **shape, us="failed", why=f"{type(reason).__name__}: {reason}"[:200])


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("Found no GPU; this measures Triton kernels on one.")
    report(row="card", name=torch.cuda.get_device_name(0), torch=torch.__version__, triton=triton.__version__)
    for nodes in (1, 16, 37, 64, 100):
        for kind in ("tree", "chain"):
            output, u = gate(make(nodes, kind=kind, repeated=True))
            report(row="gate", T=nodes, kind=kind, keys="repeated", output=output, u=u)
    for nodes, heads, sweep in ((16, 48, True), (64, 48, True), (256, 48, True), (128, 48, False), (32, 48, False),
                                (64, 32, False)):  # fmt: skip
        times(nodes, heads, sweep)
    errors()


if __name__ == "__main__":
    main()
