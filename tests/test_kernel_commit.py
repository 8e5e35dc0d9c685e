"""The Triton kernel that commits all layers at once, in the interpreter where there is no GPU."""

import pytest
import torch
import triton
import triton.language as tl
from support import KINDS, random_parents, relative, sequential_delta
from torch import Tensor

from weaver_kernels import reference
from weaver_kernels.causal_conv import causal_conv_tree
from weaver_kernels.commit import CommitConfig, _exp, commit
from weaver_kernels.reference import TreeBuffers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_buffers(
    layers: int = 1,
    batch: int = 1,
    key_heads: int = 1,
    value_heads: int = 2,
    dk: int = 16,
    dv: int = 24,
    channels: int = 20,
    width: int = 4,
    nodes: int = 9,
    attention: int = 1,
    kv_heads: int = 1,
    slots: int = 30,
    dim: int = 12,
    dtype: torch.dtype = torch.float32,
) -> TreeBuffers:
    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=DEVICE).to(dtype)

    return TreeBuffers(
        state=rand(layers, batch, value_heads, dk, dv),
        window=rand(layers, batch, channels, width, dtype=dtype),
        rows=rand(layers, batch, nodes, channels, dtype=dtype),
        keys=rand(layers, batch, key_heads, nodes, dk),
        updates=rand(layers, batch, value_heads, nodes, dv),
        decay=-rand(layers, batch, value_heads, nodes).abs().cumsum(-1),
        kv=rand(attention, 2, batch, kv_heads, slots, dim, dtype=dtype),
    )


def copied(buffers: TreeBuffers) -> TreeBuffers:
    return TreeBuffers(*(x.clone() for x in buffers))


def paths(rows: list[list[int]], size: int | None = None, fill: int = 0) -> tuple[Tensor, Tensor]:
    """`path [B, P]`, filled up behind each row, and `lengths [B]`."""
    size = size or max(map(len, rows))
    filled = [row + [fill] * (size - len(row)) for row in rows]
    return torch.tensor(filled, device=DEVICE), torch.tensor([len(row) for row in rows], device=DEVICE)


def tree_path(nodes: int, kind: str, leaf: int, seed: int = 0) -> list[int]:
    parents, path = random_parents(nodes, kind, seed), []
    while leaf >= 0:
        path.append(leaf)
        leaf = parents[leaf]
    return path[::-1]


def check(buffers: TreeBuffers, rows: list[list[int]], lens: list[int], config: CommitConfig | None = None) -> None:
    """Commit and compare with the reference, and see that nothing else was written."""
    before, expected = copied(buffers), copied(buffers)
    path, lengths = paths(rows)
    at = torch.tensor(lens, device=DEVICE)
    reference.commit(expected, path, lengths, at)
    commit(buffers, path, lengths, at, config)
    if buffers.state.numel():
        assert relative(buffers.state, expected.state) < 3e-7
    assert torch.equal(buffers.window, expected.window)
    for row, (start, nodes) in enumerate(zip(lens, rows)):
        new, old = buffers.kv[:, :, row], before.kv[:, :, row]
        end = start + len(nodes)
        assert torch.equal(new[..., start:end, :], old[..., [start + node for node in nodes], :])
        assert torch.equal(new[..., :start, :], old[..., :start, :])
        assert torch.equal(new[..., end:, :], old[..., end:, :])
    for name in ("rows", "keys", "updates", "decay"):
        assert torch.equal(getattr(buffers, name), getattr(before, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_layers_move_as_the_reference_moves_them(dtype: torch.dtype) -> None:
    check(random_buffers(layers=2, attention=2, kv_heads=2, dtype=dtype), [[0, 2, 3, 5, 8]], [7])


@pytest.mark.parametrize("kind", KINDS)
def test_paths_of_every_kind_of_tree(kind: str) -> None:
    check(random_buffers(nodes=12), [tree_path(12, kind, 11)], [5])


def test_rows_of_a_batch_have_their_own_path_and_place() -> None:
    check(random_buffers(batch=4), [[0, 1, 4, 7, 8], [0], [0, 8], [0, 1, 2]], [3, 0, 20, 11])


@pytest.mark.parametrize(("key_heads", "value_heads", "dk", "dv"), [(2, 2, 16, 16), (2, 6, 20, 40), (1, 4, 64, 8)])
def test_groups_of_heads_and_odd_dims(key_heads: int, value_heads: int, dk: int, dv: int) -> None:
    check(random_buffers(key_heads=key_heads, value_heads=value_heads, dk=dk, dv=dv), [[0, 3, 4]], [2])


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_windows_shift_by_less_and_by_more_than_their_width(width: int, length: int) -> None:
    check(random_buffers(width=width, value_heads=1), [[0, 2, 3, 5, 8][:length]], [1])


def test_a_slot_that_is_read_and_then_overwritten_keeps_what_was_read() -> None:
    buffers = random_buffers(layers=0, nodes=12)
    # Slot 3 goes to 1 and is overwritten by 6; 6 goes to 3 and is overwritten by 11.
    check(buffers, [[0, 3, 5, 6, 7, 9, 11]], [4])


def test_a_path_that_lies_in_place_moves_no_rows() -> None:
    buffers = random_buffers(attention=1)
    before = buffers.kv.clone()
    path, lengths = paths([[0, 1, 2, 3]])
    commit(buffers, path, lengths, torch.tensor([6], device=DEVICE))
    assert torch.equal(buffers.kv, before)


def test_a_row_that_accepts_nothing_stays_as_it_is_bit_for_bit() -> None:
    buffers = random_buffers(layers=2, batch=2)
    before = copied(buffers)
    path, lengths = paths([[0, 3, 4, 8], []])
    commit(buffers, path, lengths, torch.tensor([9, 9], device=DEVICE))
    for name, batch_axis in (("state", 1), ("window", 1), ("kv", 2)):
        now, then = getattr(buffers, name), getattr(before, name)
        assert not torch.equal(now.select(batch_axis, 0), then.select(batch_axis, 0))
        assert torch.equal(now.select(batch_axis, 1), then.select(batch_axis, 1))


def test_entries_behind_the_accepted_ones_are_never_read() -> None:
    one = random_buffers()
    other = copied(one)
    for buffers, fill in ((one, 0), (other, 10**12)):
        path, lengths = paths([[0, 2, 5]], size=9, fill=fill)
        commit(buffers, path, lengths, torch.tensor([4], device=DEVICE))
    assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_a_model_without_recurrent_or_without_attention_layers() -> None:
    check(random_buffers(layers=0), [[0, 3]], [4])
    check(random_buffers(attention=0), [[0, 3]], [4])
    empty = random_buffers(0, 1, 0, 0, 0, 0, 0, 0, 0)
    check(empty, [[0, 3]], [4])


def test_no_layers_and_no_rows_are_no_work() -> None:
    path, lengths = paths([[0, 3]])
    commit(random_buffers(layers=0, attention=0), path, lengths, lengths)
    commit(random_buffers(batch=0), path[:0], lengths[:0], lengths[:0])


def test_views_of_larger_buffers_are_changed_in_place() -> None:
    large = random_buffers(layers=2, batch=2, nodes=14, slots=40, attention=2, kv_heads=2, channels=40)
    views = TreeBuffers(
        state=large.state[:, 1:],
        window=large.window[:, 1:, ::2],
        rows=large.rows[:, 1:, 2:12, 20:],
        keys=large.keys[:, 1:, :, 2:12],
        updates=large.updates[:, 1:, :, 2:12],
        decay=large.decay[:, 1:, :, 2:12],
        kv=large.kv[:, :, 1:, :, 3:, 2:9],
    )
    untouched = large.state[:, 0].clone(), large.window[:, :, 1::2].clone(), large.kv[..., 9:].clone()
    check(views, [[0, 2, 9]], [5])
    for before, after in zip(untouched, (large.state[:, 0], large.window[:, :, 1::2], large.kv[..., 9:])):
        assert torch.equal(before, after)


@pytest.mark.parametrize("config", [(8, 16, 16, 1, 1), (16, 32, 32, 8, 4), (4, 8, 64, 2, 2)])
def test_how_it_is_cut_into_programs_changes_no_bit(config: tuple[int, int, int, int, int]) -> None:
    one = random_buffers(value_heads=1)
    other = copied(one)
    path, lengths = paths([[0, 1, 3, 4, 8]])
    commit(one, path, lengths, lengths)
    commit(other, path, lengths, lengths, CommitConfig(*config))
    assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_decays_to_nothing_stay_finite() -> None:
    buffers = random_buffers()
    buffers.decay.mul_(1000)
    check(buffers, [[0, 1, 2, 8]], [3])
    assert buffers.state.isfinite().all()


def test_what_the_kernel_cannot_read_is_refused() -> None:
    path, lengths = paths([[0, 3]])
    buffers = random_buffers()
    with pytest.raises(TypeError, match=r"keys is torch\.float64; the kernel folds torch\.float32"):
        commit(buffers._replace(keys=buffers.keys.double()), path, lengths, lengths)
    with pytest.raises(ValueError, match="last dimension of kv has stride 2"):
        commit(buffers._replace(kv=buffers.kv[..., ::2]), path, lengths, lengths)
    with pytest.raises(ValueError, match="rows of path have stride 2"):
        commit(buffers, path.repeat_interleave(2, 1)[:, ::2], lengths, lengths)


@triton.jit
def _exp_of(x, y, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + place, _exp(tl.load(x + place)))


def test_the_exponential_is_right_to_a_rounding_and_has_no_bias() -> None:
    for low in (-1e-3, -1.0, -80.0):
        x = torch.rand(4096, device=DEVICE) * low
        y = torch.empty_like(x)
        _exp_of[(4,)](x, y, SIZE=1024)
        error = y.double() / x.double().exp() - 1
        assert float(error.abs().max()) < 1e-7
        assert abs(float(error.mean())) < 4e-9
    x = torch.tensor([0.0, -87.0, -100.0, -1e30], device=DEVICE)
    y = torch.empty_like(x)
    _exp_of[(1,)](x, y, SIZE=4)
    torch.testing.assert_close(y, torch.tensor([1.0, 1.6458e-38, 0.0, 0.0], device=DEVICE), rtol=1e-4, atol=0.0)


def drift(rounds: int, heads: int, slow_decay: float) -> float:
    """The largest relative error of the state over rounds of verification and commit, against fp64 token by token.

    The window and KV rows must be exactly those of the accepted text at the end.
    """
    dk, dv, channels, width, nodes = 16, 24, 12, 4, 10
    buffers = random_buffers(1, 1, 1, heads, dk, dv, channels, width, nodes, 1, 1, 8 * rounds + 2 * nodes, 4)
    truth = buffers.state[0, 0].double()
    text_rows, text_kv, worst, lens = [buffers.window[0, 0].t().clone()], [], 0.0, 0
    weight = torch.randn(channels, width, device=DEVICE)
    gen = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(DEVICE)

    for round_ in range(rounds):
        parents = random_parents(nodes, "random", round_)
        topology = reference.tree_topology(torch.tensor([parents], device=DEVICE), width)
        path = tree_path(nodes, "random", round_ % nodes, round_)
        query, key, value = rand(1, nodes, 1, dk), rand(1, nodes, 1, dk), rand(1, nodes, heads, dv)
        g, beta = -slow_decay * rand(1, nodes, heads).abs(), rand(1, nodes, heads).sigmoid()
        _, stash = reference.gated_delta_tree(query, key, value, g, beta, buffers.state[0], topology.ancestors)
        for kept, new in zip((buffers.keys, buffers.updates, buffers.decay), stash):
            kept[0] = new
        rows, kv = rand(1, nodes, channels), rand(1, 2, 1, 1, nodes, 4)
        if round_ % 10 == 0:  # the convolution's kernel leaves the rows that the commit reads
            causal_conv_tree(rows, buffers.window[0], weight, topology.conv_index, stash=buffers.rows[0])
        else:
            buffers.rows[0] = rows
        buffers.kv[..., lens : lens + nodes, :] = kv
        nodes_taken, lengths = paths([path], size=nodes)
        commit(buffers, nodes_taken, lengths, torch.tensor([lens], device=DEVICE))
        lens += len(path)

        text_rows.append(rows[0, path])
        text_kv.append(kv[..., path, :])
        k = reference.l2norm(key[0, path, 0].double())
        chain = list(range(-1, len(path) - 1))
        v, decay, strength = (x[0, path].double() for x in (value, g, beta))
        truth = torch.stack(
            [sequential_delta(k, k, v[:, h], decay[:, h], strength[:, h], truth[h], chain)[1][-1] for h in range(heads)]
        )
        worst = max(worst, relative(buffers.state[0, 0], truth))
    assert torch.equal(buffers.window[0, 0].t(), torch.cat(text_rows)[-width:])
    assert torch.equal(buffers.kv[..., :lens, :], torch.cat(text_kv, -2))
    return worst


def test_rounds_of_verification_and_commit_follow_the_sequential_recurrence() -> None:
    assert drift(rounds=30, heads=1, slow_decay=0.1) < 1e-6


@pytest.mark.slow
@pytest.mark.once
def test_300_rounds_do_not_drift() -> None:
    assert drift(rounds=300, heads=1, slow_decay=0.01) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("slow_decay", [0.1, 0.001])
def test_300_rounds_do_not_drift_on_the_gpu(slow_decay: float) -> None:
    worst = drift(rounds=300, heads=3, slow_decay=slow_decay)
    print(f"commit, 300 rounds, decays about {slow_decay}: {worst:.1e}")
    assert worst < 1e-6


def real_buffers(batch: int = 1) -> TreeBuffers:
    """A 27B model's: 48 layers of 48 heads, 16 attention layers."""
    buffers = random_buffers(48, batch, 16, 48, 128, 128, 10240, 4, 64, 16, 4, 512, 256, torch.bfloat16)
    buffers.decay.mul_(0.05)
    return buffers


@pytest.mark.gpu
def test_real_sizes_on_the_gpu() -> None:
    buffers = real_buffers()
    for leaf in (63, 0, 17):
        check(buffers, [tree_path(64, "random", leaf)], [300])
    check(buffers, [tree_path(64, "chain", 31)], [448])
    check(real_buffers(3), [tree_path(64, "comb", 40), [0], [0, 63]], [300, 0, 200])


@pytest.mark.gpu
def test_a_hundred_repeats_give_the_same_bits() -> None:
    before = real_buffers()
    path, lengths = paths([tree_path(64, "comb", 31)], size=32)
    lens = torch.tensor([300], device=DEVICE)
    first = copied(before)
    commit(first, path, lengths, lens)
    again = copied(before)
    for _ in range(100):
        for target, source in zip(again, before):
            target.copy_(source)
        commit(again, path, lengths, lens)
        assert all(torch.equal(a, b) for a, b in zip(again, first))


@pytest.mark.gpu
def test_a_captured_commit_reads_lengths_and_paths_at_every_replay() -> None:
    buffers = random_buffers(layers=3, batch=2, dk=128, dv=128, value_heads=6, key_heads=2, attention=2)
    path, lengths = paths([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]])
    lens = torch.tensor([4, 9], device=DEVICE)
    commit(buffers, path, lengths, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        commit(buffers, path, lengths, lens)
    for rows in ([[0, 3, 5], [0]], [[0, 8], []], [[], [0, 1, 2, 6, 7]]):
        new_path, new_lengths = paths(rows, size=5)
        path.copy_(new_path)
        lengths.copy_(new_lengths)
        expected = copied(buffers)
        commit(expected, path, lengths, lens)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(buffers, expected))
