# mypy: allow-untyped-defs
"""Times of the noise and of the choice at every node beside plain torch and transformers' warpers: JSON lines.

Run: `python -m weaver_kernels.benchmarks.bench_sampling`. Results that are wrong are not timed. The logits come cold
from memory, as they are read after a whole forward.
"""

from functools import partial
from typing import Any

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from weaver_hf import noise
from weaver_kernels.benchmarks.timing import copies, report, time_captured
from weaver_kernels.gumbel import gumbel
from weaver_kernels.sampling import choose_tokens

VOCAB, NODES, DEPTHS = 248_320, 64, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"temperature": 0.7},
    "top-k": {"temperature": 0.7, "top_k": 20},
    "top-k top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k top-p min-p": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "top-k 1000": {"top_k": 1000},
}
SWEEP: list[dict[str, dict[str, int]]] = [
    {"scan": {"CHUNK": chunk, "num_warps": warps}, "choose": {"TILE": tile, "num_warps": choose_warps}}
    for chunk, warps, tile, choose_warps in ((4096, 4, 32, 8), (4096, 8, 32, 4), (8192, 8, 64, 8), (2048, 4, 64, 16))
]


def stock(logits, depths, gumbels, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Transformers' processors on all rows at once, then the best sum."""
    scores = logits.flatten(0, 1).float()
    processors: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    processors += [TopKLogitsWarper(top_k)] if top_k else []
    processors += [TopPLogitsWarper(top_p)] if top_p else []
    processors += [MinPLogitsWarper(min_p)] if min_p else []
    for processor in processors:
        scores = processor(None, scores)
    scores = scores.view(logits.shape)
    if gumbels is not None:
        scores = gumbels[torch.arange(len(gumbels), device=gumbels.device)[:, None], depths] + scores
    return scores.argmax(-1)


def main() -> None:
    """Print one line a setting, dtype and configuration."""
    torch.manual_seed(0)
    seeds, positions = torch.tensor([7], device="cuda"), torch.arange(DEPTHS, device="cuda")[None] + 1000
    drawn, plain = gumbel(seeds, positions, VOCAB), noise.gumbel(seeds, positions, VOCAB)
    wrong = int((drawn != plain).sum())
    report(part="gumbel", values=drawn.numel(), different=wrong)
    if wrong == 0:
        for blocks in ({"BLOCKS": 128}, {"BLOCKS": 256}, {"BLOCKS": 512, "num_warps": 8}):
            calls = [partial(gumbel, seeds, positions, VOCAB, config=blocks)] * 16
            report(part="gumbel", config=blocks, us=time_captured(calls))
        report(part="gumbel", config="torch", us=time_captured([partial(noise.gumbel, seeds, positions, VOCAB)] * 4))
    for dtype in (torch.bfloat16, torch.float32):
        count = min(6, copies(NODES * VOCAB * dtype.itemsize))
        # A peak of some tokens above a wide bulk, as a language model's logits are.
        logits = [torch.randn(1, NODES, VOCAB, device="cuda") for _ in range(count)]
        logits = [(2 * x + 6 * torch.rand_like(x).pow(64)).to(dtype) for x in logits]
        depths = torch.randint(0, DEPTHS, (1, NODES), device="cuda")
        for name, setting in SETTINGS.items():
            gumbels = None if name == "greedy" else drawn
            got = choose_tokens(logits[0], depths, gumbels, **setting)
            different = int((got != stock(logits[0], depths, gumbels, **setting)).sum())
            report(part="choose", setting=name, dtype=str(dtype), different=different)
            if different > ("top_p" in setting):  # a cumulative probability can lie within rounding of its bound
                continue
            best = None
            for config in SWEEP:
                calls = [partial(choose_tokens, x, depths, gumbels, **setting, config=config) for x in logits]
                us = time_captured(calls)
                report(part="choose", setting=name, dtype=str(dtype), config=config, us=us)
                best = us if best is None else min(best, us)
            calls = [partial(stock, x, depths, gumbels, **setting) for x in logits[:2]]
            report(part="choose", setting=name, dtype=str(dtype), best_us=best, stock_us=time_captured(calls, 10))


if __name__ == "__main__":
    main()
