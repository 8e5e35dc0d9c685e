"""How fast whole calls and their parts are: `weaver-hf bench --speed`.

Methods are timed one after another in one process on the same prompts. A part of a captured step is timed by replaying
its graph between events, beside a floor: the bytes of the weights over the bandwidth that a copy reaches here.

With a planted acceptance a drafted token is accepted with that probability a depth, whatever the target says, while
everything else runs in full: the loop is timed at a chosen acceptance. Such rows are synthetic and say so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..modeling_weaver import WeaverModel
from ..target.attach import attachment_of

__all__ = ["Method", "Row", "acceptance_for", "bandwidth", "measure", "parts_of", "weight_bytes"]

REPLAYS = 20


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        name: of the row.
        builder, budget: of the trees; None for decoding without a Weaver.
        planted: probability a depth that a drafted token is accepted, None for real acceptance.
        options: of `generate`.
        settings: fields of `TreeConfig`.
    """

    name: str
    builder: str | None = None
    budget: int = 0
    planted: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """What a method took on some prompts; seconds are sums over them.

    Attributes:
        tokens: new tokens; steps: passes of the target behind the prefill.
        seconds: of the calls; prefill_seconds: of calls for one token alone.
        parts: milliseconds of each part of a captured step, medians.
        synthetic: the acceptance was planted.
    """

    method: str
    group: str
    prompts: int
    tokens: int
    steps: int
    seconds: float
    prefill_seconds: float
    peak_gib: float
    parts: dict[str, float]
    synthetic: bool

    @property
    def tokens_per_second(self) -> float:
        """Behind the prefill."""
        return (self.tokens - self.prompts) / (self.seconds - self.prefill_seconds)

    def as_dict(self) -> dict[str, Any]:
        behind = self.seconds - self.prefill_seconds
        return {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_with_prefill": self.tokens / self.seconds,
            "tokens_per_step": (self.tokens - self.prompts) / max(self.steps, 1),
            "ms_per_step": 1e3 * behind / max(self.steps, 1),
        }


def measure(
    model: Any,
    weaver: WeaverModel,
    groups: Mapping[str, Sequence[Tensor]],
    methods: Iterable[Method],
    *,
    new_tokens: int,
    fold: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Every method on every group of prompts.

    Args:
        weaver: attached; a method's settings are put on a copy of its `tree_config`.
        groups: name -> prompts, int64 `[1, L]` each.
        fold: how it is attached again behind methods without a Weaver.
    """
    rows = []
    before = weaver.tree_config
    for method in methods:
        if method.builder is None:  # as if there were no Weaver
            weaver.detach()
        elif weaver.target is None:
            weaver.attach(model, fold=fold)
        for group, prompts in groups.items():
            weaver.tree_config = before
            rows.append(_run(model, weaver, method, group, prompts, new_tokens))
            progress(describe(rows[-1]))
    weaver.tree_config, weaver.planted_acceptance = before, None
    return rows


def describe(row: Row) -> str:
    data = row.as_dict()
    parts = " ".join(f"{name} {value:.2f}" for name, value in row.parts.items())
    label = " (synthetic acceptance)" if row.synthetic else ""
    return (
        f"{row.method:28} {row.group:10} {data['tokens_per_second']:8.1f} tok/s, {data['tokens_per_step']:.2f} a step, "
        f"{data['ms_per_step']:.2f} ms a step; {parts}{label}"
    )


def _run(
    model: Any, weaver: WeaverModel, method: Method, group: str, prompts: Sequence[Tensor], new_tokens: int
) -> Row:
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": None, **method.options}
    if method.builder is not None:
        settings = {**asdict(weaver.tree_config), **method.settings, "builder": method.builder, "budget": method.budget}
        weaver.tree_config = type(weaver.tree_config)(**settings)
        weaver.planted_acceptance = method.planted
        options["assistant_model"] = weaver
    cuda = model.device.type == "cuda"

    def call(ids: Tensor, count: int) -> tuple[int, float]:
        _wait(cuda)
        start = perf_counter()
        length = model.generate(ids, max_new_tokens=count, **options).shape[1] - ids.shape[1]
        _wait(cuda)
        return length, perf_counter() - start

    if method.builder is not None and cuda:
        weaver.warmup(new_tokens, max(ids.shape[1] for ids in prompts))
    call(prompts[0], new_tokens if method.options else min(new_tokens, 4))  # a compiled stock model compiles here
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    tokens = steps = 0
    seconds = prefill = 0.0
    for ids in prompts:
        prefill += min(call(ids, 1)[1] for _ in range(2))
        count, time = call(ids, new_tokens)
        tokens, seconds = tokens + count, seconds + time
        steps += weaver.stats.steps if method.builder is not None and weaver.stats is not None else count - 1
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    parts = parts_of(model, weaver, method.budget + 1) if method.builder is not None and cuda else {}
    return Row(method.name, group, len(prompts), tokens, steps, seconds, prefill, peak, parts, bool(method.planted))


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def parts_of(model: Any, weaver: WeaverModel, nodes: int) -> dict[str, float]:
    """Milliseconds of the parts of the step that was captured last with `nodes` rows, and of the parts in a row."""
    attachment = attachment_of(model)
    assert attachment is not None
    steps = [s for key, s in attachment.steps.items() if key[1:3] == (id(weaver), nodes)]
    if not steps or steps[-1].accept is None:
        return {}
    step = steps[-1]
    step.cache.lengths.fill_(1)
    step.cache.lens.clamp_(max=step.cache.capacity - nodes - 3 * REPLAYS - 1)
    parts: dict[str, list[Callable[[], None]]] = {
        "draft": [step.draft],
        "verify": [step.verify],
        "accept": [step.accept],
        "step": [step.verify, step.accept, step.draft],
    }
    return {name: _milliseconds(step, part) for name, part in parts.items()}


def _milliseconds(step: Any, part: Sequence[Callable[[], None]]) -> float:
    times, lens = [], step.cache.lens.clone()
    context = None if step.context is None else (step.context.lens.clone(), step.context.positions.clone())
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for run in part:
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        step.cache.lens.copy_(lens)  # the text does not grow while it is timed
        if context is not None:
            step.context.lens.copy_(context[0])
            step.context.positions.copy_(context[1])
    return median(times)


def acceptance_for(tokens_per_step: float, depths: int) -> float:
    """The probability a depth that gives so many tokens a step (the bonus token counted) in trees of these depths."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        expected = 1 + sum(middle**depth for depth in range(1, depths + 1))
        low, high = (middle, high) if expected < tokens_per_step else (low, middle)
    return low


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a pass reads: all but a separate embedding, of which it reads rows."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if head is not None and head.weight.data_ptr() != embedding.weight.data_ptr():
        total -= embedding.weight.numel() * embedding.weight.element_size()
    return total


def bandwidth(device: torch.device) -> float:
    """Bytes a second that reading 4 GiB reaches on a CUDA device."""
    x = torch.ones(2**30, device=device)
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        x.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return x.numel() * x.element_size() / median(times) * 1e3
