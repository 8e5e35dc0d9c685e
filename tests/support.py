"""What several test files share. Everything compared against is transformers' own code, run here, never re-written."""

import copy
import functools
import itertools
import json
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from weaver_hf import TokenTree, WeaverConfig, WeaverModel
from weaver_hf.bench import load_prompts
from weaver_hf.configuration_weaver import AdapterConfig
from weaver_hf.proposal import DraftContext
from weaver_hf.target.compat import CACHE_KEY
from weaver_hf.tiny import TARGET

KINDS = ("chain", "star", "comb", "random")
VOCAB = 128


def random_parents(nodes: int, kind: str, seed: int = 0) -> list[int]:
    """Parents of a tree of that kind, the root first."""
    rng = random.Random(seed)
    parents = [-1]
    for i in range(1, nodes):
        if kind == "chain":
            parents.append(i - 1)
        elif kind == "star":
            parents.append(0)
        elif kind == "comb":  # a spine with one leaf at every joint
            parents.append(i - 1 if i % 2 else i - 2)
        else:
            parents.append(rng.randrange(i))
    return parents


def random_tree(nodes: int, kind: str, seed: int = 0, vocab: int = VOCAB, batch: int = 1, **kwargs) -> TokenTree:
    """A tree of that kind with random tokens, distinct among siblings."""
    rng = random.Random(seed)
    rows, all_parents = [], []
    for row in range(batch):
        parents = random_parents(nodes, kind, seed + row)
        taken: dict[int, set[int]] = {}
        tokens = []
        for parent in parents:
            token = rng.choice([t for t in range(vocab) if t not in taken.setdefault(parent, set())])
            taken[parent].add(token)
            tokens.append(token)
        rows.append(tokens)
        all_parents.append(parents)
    return TokenTree.from_lists(rows, all_parents, **kwargs)


def tiny_random_config(**overrides) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "eos_token_id": 127,
            "pad_token_id": 126,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.25,
            },
            **overrides,
        }
    )


def tiny_random_model(attn_implementation: str = "sdpa", seed: int = 0, **overrides) -> Qwen3_5ForCausalLM:
    """Random weights, sharp enough that greedy choices have no ties, and not all the same token."""
    torch.manual_seed(seed)
    config = tiny_random_config(**overrides)
    model = Qwen3_5ForCausalLM._from_config(config, attn_implementation=attn_implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv1d" not in name:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None
    return model


def tiny_dense_model(**overrides) -> Qwen3ForCausalLM:
    """A small random target without recurrent layers."""
    torch.manual_seed(1)
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "eos_token_id": 127,
        "pad_token_id": 126,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**config, **overrides})).eval()


def prompt_ids(length: int = 9, seed: int = 0, vocab: int = VOCAB - 8) -> torch.Tensor:
    return torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


class OracleBuilder:
    """Random trees that hold the true continuation with probability `hit` a depth; a stand-in for a drafter.

    Args:
        text: prompt and true continuation.
        nodes: of each tree, the root included; several are taken in turn, one a step.
        hit: probability, at each depth, that the tree holds the next true token (the first miss ends the spine).
        pad_to: static width, to exercise padding.
    """

    def __init__(self, text, nodes, hit=0.5, seed=0, vocab=VOCAB, pad_to=None):
        self.text, self.hit, self.vocab, self.pad_to = text, hit, vocab, pad_to
        self.sizes = itertools.cycle([nodes] if isinstance(nodes, int) else nodes)
        self.rng = random.Random(seed)
        self.contexts: list[DraftContext] = []

    def __call__(self, context: DraftContext) -> TokenTree:
        self.contexts.append(context)
        nodes = next(self.sizes)
        history = context.history[0]
        future = self.text[len(history) :]
        spine = 0
        while spine < min(nodes - 1, len(future)) and self.rng.random() < self.hit:
            spine += 1
        kinds = [True] * spine + [False] * (nodes - 1 - spine)
        self.rng.shuffle(kinds)
        tokens, parents, true_nodes = [history[-1]], [-1], [0]
        for is_true in kinds:
            if is_true:
                parent, token = true_nodes[-1], future[len(true_nodes) - 1]
                true_nodes.append(len(tokens))
            else:
                parent = self.rng.randrange(len(tokens))
                taken = {t for t, p in zip(tokens, parents) if p == parent}
                if parent in true_nodes and len(future) > (depth := true_nodes.index(parent)):
                    taken.add(future[depth])
                token = self.rng.choice([t for t in range(min(self.vocab, 4 * nodes + 8)) if t not in taken])
            tokens.append(token)
            parents.append(parent)
        return TokenTree.from_lists([tokens], [parents], num_nodes=self.pad_to, device=context.device)


def chain_then(text, lengths):
    """A builder factory: step `i` drafts the next `lengths[i] - 1` true tokens as a chain, so that its path has that length."""
    plan = iter(lengths)

    def build(context):
        history = context.history[0]
        depth = next(plan, 1) - 1
        chain = text[len(history) : len(history) + depth]
        return TokenTree.from_lists([[history[-1], *chain]], [list(range(-1, len(chain)))], device=context.device)

    return build


@functools.cache
def stock_model():
    """The embedded target, never attached."""
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)


@functools.cache
def bench_prompts():
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [(p.domain, tokenizer(p.prompt, return_tensors="pt").input_ids) for p in load_prompts()]


@functools.cache
def stock_output(index: int, max_new_tokens: int = 64) -> tuple[list[int], list[float]]:
    """Greedy tokens (prompt included) of stock transformers for a bench prompt, and its own top-2 gap at each new token."""
    ids = bench_prompts()[index][1]
    out = stock_model().generate(
        ids, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    gaps = [float(top[0] - top[1]) for top in (logits[0].topk(2).values for logits in out.logits)]
    return out.sequences[0].tolist(), gaps


def prefilled(model, ids):
    """A stock cache that holds `ids`."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, use_cache=True, **{CACHE_KEY: cache})
    return cache


def path_logits(model, cache, tokens: list[int]) -> torch.Tensor:
    """Stock logits after `tokens`, decoded one by one from a copy of the cache; and that copy."""
    cache = copy.deepcopy(cache)
    with torch.no_grad():
        for token in tokens:
            logits = model(torch.tensor([[token]]), use_cache=True, **{CACHE_KEY: cache}).logits
    return logits[0, -1], cache


def sequential_delta(q, k, v, g, beta, state, parents):
    """The gated delta rule node by node, each from its parent's state: outputs, and the state after every node.

    One head: q, k `[T, dk]` (normalised and scaled already), v `[T, dv]`, g, beta `[T]`, state `[dk, dv]`.
    """
    states, outputs = [], []
    for i, parent in enumerate(parents):
        s = (state if parent < 0 else states[parent]) * g[i].exp()
        u = beta[i] * (v[i] - s.T @ k[i])
        states.append(s + torch.outer(k[i], u))
        outputs.append(states[-1].T @ q[i])
    return torch.stack(outputs), torch.stack(states)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def read_json(path):
    return json.loads(path.read_text())


def drafter_config(**overrides) -> WeaverConfig:
    """A small drafter for `tiny_random_model`."""
    return WeaverConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "target_layer_ids": [0, 2],
            "num_hidden_layers": 2,
            "block_size": 8,
            "mask_token_id": 125,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "rope_theta": 10000.0,
            "tree_config": {"builder": "marginal"},
            **overrides,
        }
    )


def adapter_config(generation: str = "learned", **overrides) -> AdapterConfig:
    """A small adapter for `drafter_config`."""
    fields = {"rank": 24, "num_layers": 1, "num_heads": 3, "mlp_dim": 20, "max_depth": 7, "pool_size": 40}
    return AdapterConfig(generation, **{**fields, **overrides})


def random_weaver(**overrides) -> WeaverModel:
    """Random weights of visible size, norms included."""
    torch.manual_seed(5)
    weaver = WeaverModel(drafter_config(**overrides)).eval()
    with torch.no_grad():
        for parameter in weaver.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.3) + (parameter.ndim == 1))
    return weaver


def chi_square_p(counts: torch.Tensor, law: torch.Tensor) -> float:
    """How probable counts at least as far from a law are under it; neighbouring cells are pooled up to 10 expected."""
    counts, expected = counts.double().flatten(), law.double().flatten() * counts.sum()
    assert float(expected.sum()) == pytest.approx(float(counts.sum())), "the law covers everything that was drawn"
    assert not counts[expected == 0].any(), "something was drawn that the law excludes"
    pools = [[0.0, 0.0]]
    for count, mean in zip(counts.tolist(), expected.tolist()):
        if pools[-1][1] >= 10:
            pools.append([0.0, 0.0])
        pools[-1][0] += count
        pools[-1][1] += mean
    if pools[-1][1] < 10:
        last = pools.pop()
        pools[-1] = [pools[-1][0] + last[0], pools[-1][1] + last[1]]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pools)
    freedom = torch.tensor((len(pools) - 1) / 2.0).double()
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2).double()))
