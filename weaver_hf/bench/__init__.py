"""The measuring harness behind `weaver-hf bench`."""

from .harness import DOMAINS, Prompt, load_prompts, loop_onset, run_bench, summarize

__all__ = ["DOMAINS", "Prompt", "load_prompts", "loop_onset", "run_bench", "summarize"]
