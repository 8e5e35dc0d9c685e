"""Counts what any builder would have accepted of a known text: exact, and far cheaper than to decode it again.

Without `lossy_margin` a tree never changes the text, and a step's tree depends on the text before it alone (and on the
noise, which position and seed fix). So one pass of the target over a finished text gives the drafter's blocks at all of
its anchors, and every builder, budget and rule can be walked along it; the runs are those of `generate`. Several texts
are walked at once.

The oracle is the builder `weaver`, scored by the target itself inside the drafter's pools (study_oracle.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from study_oracle import CommittedTexts, TargetScorer
from torch import Tensor

from weaver_hf import TokenTree, WeaverModel
from weaver_hf.acceptance import follow
from weaver_hf.adapter import head_product
from weaver_hf.bench import Prompt, loop_onset
from weaver_hf.bench.harness import runs_before
from weaver_hf.configuration_weaver import TreeConfig
from weaver_hf.drafter import DraftBlock
from weaver_hf.noise import GumbelField, row_seeds
from weaver_hf.proposal import DraftContext, WeaverBuilder, make_builder
from weaver_hf.scoring import DraftRule
from weaver_hf.target.taps import TapStates
from weaver_hf.training.blocks import BlockNetwork, run_blocks, states_before, target_pass

ORACLE = "oracle"
POOLS = (32, 64, 128, 256)  # whose coverage is counted
CHUNK = 64  # anchors whose logits over the vocabulary are held at once

# The trees at some places of some texts: indices of the texts, and of the anchors in their ids.
Propose = Callable[[Sequence[int], Sequence[int]], TokenTree]


@dataclass(frozen=True)
class Setting:
    """One way to draft. `rule` is `"greedy"` at temperature 0; what is None is the default of `TreeConfig`."""

    builder: str
    budget: int
    rule: str
    pool: int | None = None
    rounds: int | None = None
    parents: int | None = None
    children: int | None = None

    def on(self, config: TreeConfig) -> TreeConfig:
        """The same settings as a `TreeConfig` with the fitted temperatures of another."""
        own = {name: getattr(self, name) for name in ("budget", "pool", "rounds", "parents", "children")}
        builder = "weaver" if self.builder == ORACLE else self.builder
        return replace(config, builder=builder, acceptance=None if self.rule == "greedy" else self.rule, **own)


@dataclass
class Text:
    """A prompt and what the target wrote behind it.

    Attributes:
        ids: both.
        seed: of its noise, int64 `[1]`; None at temperature 0.
        ended: its last token is an EOS; otherwise the length limit cut the last step, which enters no mean.
        written_by: the setting that it was decoded with.
        runs: tokens that each step of that call emitted.
    """

    temperature: float
    ids: list[int]
    prompt_length: int
    seed: Tensor | None
    ended: bool
    written_by: Setting
    runs: list[int]
    onset: int = field(init=False)

    def __post_init__(self) -> None:
        self.onset = loop_onset(self.ids[: self.prompt_length], self.ids[self.prompt_length :])

    @property
    def has_steps(self) -> bool:
        """Whether anything follows the prefill's token."""
        return len(self.ids) > self.prompt_length + 1

    def whole(self, runs: list[int]) -> list[int]:
        """The runs that enter the means."""
        return runs if self.ended else runs[:-1]

    def loop_free(self, runs: list[int]) -> list[int]:
        """Those of them that end before the text starts to loop."""
        return runs_before(self.whole(runs), self.onset)


def write_text(
    model: Any,
    tokenizer: Any,
    weaver: WeaverModel,
    prompt: Prompt,
    setting: Setting,
    *,
    temperature: float,
    new_tokens: int,
    seed: int,
) -> Text:
    """Decode one prompt with the Weaver; under sampling from the target's whole law."""
    inputs = tokenizer(prompt.prompt, return_tensors="pt").to(model.device)
    options: dict[str, Any] = {"do_sample": False}
    noise_seed = None
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)  # as `generate` draws it
        noise_seed = row_seeds(int(torch.randint(2**63 - 1, ())), 1, model.device)
    before, weaver.tree_config = weaver.tree_config, setting.on(weaver.tree_config)
    try:
        torch.manual_seed(seed)
        ids = model.generate(**inputs, assistant_model=weaver, max_new_tokens=new_tokens, **options)[0].tolist()
    finally:
        weaver.tree_config = before
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    assert weaver.stats is not None
    runs = list(weaver.stats.runs)
    length = inputs.input_ids.shape[1]
    return Text(temperature, ids, length, noise_seed, ids[-1] in ends, setting, runs)


class Recording:
    """What the target and the drafter say of finished texts of one temperature, at all anchors of all of them.

    Anchors are rows: those of text `i` are `first[i]` and the next; a text's last token is no anchor.

    Args:
        texts: at least one of which has a step.
        pool: candidates of a depth that are kept, at least; budgets and pools of all settings must fit into it.

    Attributes:
        texts: them.
        anchors: int64 `[X]`, the anchors' tokens.
        labels: int64 `[X, D]`, the tokens behind each anchor, -1 behind the text's end.
        hidden: `[X, D, H]`, the drafter's final states.
        before: `[X, H]`, the target's final states whose logits chose the anchors.
        best: int64 `[X, D]`, the target's most probable tokens where the labels stand.
        places: int64 `[X]`, index of each anchor in the output of its text.
        owner: int64 `[X]`, its text.
    """

    @torch.no_grad()
    def __init__(self, model: Any, weaver: WeaverModel, texts: Sequence[Text], pool: int = 256) -> None:
        self.model, self.weaver, self.texts = model, weaver, texts
        self.pool = max(pool, weaver.pool_size(weaver.tree_config))
        self.depths = weaver.config.block_size - 1
        self.temperature = texts[0].temperature
        assert weaver.drafter is not None
        sink = weaver.tap_sink(model.device)
        embedding = model.get_input_embeddings()
        network = BlockNetwork(weaver.drafter)
        self.first: list[int] = []
        parts: dict[str, list[Tensor]] = {name: [] for name in ("anchors", "labels", "hidden", "before", "best")}
        places, owners = [], []
        count = 0
        for number, text in enumerate(texts):
            ids = torch.tensor([text.ids], device=model.device)
            at = torch.arange(text.prompt_length, len(text.ids) - 1, device=model.device)[None]
            self.first.append(count)
            count += at.shape[1]
            taps, logits = target_pass(model, sink, ids)
            for chunk in at.split(CHUNK, 1) if at.numel() else ():
                hidden = run_blocks(
                    network, embedding, weaver.config.mask_token_id, taps.features.to(weaver.dtype), ids, chunk,
                    self.depths,
                )  # fmt: skip
                parts["hidden"].append(hidden[0])
            behind = at[0, :, None] + 1 + torch.arange(self.depths, device=at.device)  # [A, D]
            parts["labels"].append(F.pad(ids[0], (0, self.depths), value=-1)[behind])
            parts["best"].append(F.pad(logits[0].argmax(-1), (0, self.depths))[behind - 1])
            parts["before"].append(states_before(taps, at)[0])
            parts["anchors"].append(ids[0, at[0]])
            places.append(at[0] - text.prompt_length)
            owners.append(torch.full_like(at[0], number))
        self.anchors, self.labels, self.hidden, self.before, self.best = (torch.cat(p) for p in parts.values())
        self.places, self.owner = torch.cat(places), torch.cat(owners)
        self._noise = [self._noise_of(text) for text in texts] if self.temperature > 0 else []
        self._blocks: dict[bool, DraftBlock] = {}

    def _noise_of(self, text: Text) -> Tensor:
        """The noise of all its new tokens and of a block behind them, `[T + D, V]`."""
        assert text.seed is not None
        start = torch.tensor([text.prompt_length], device=text.seed.device)
        count = len(text.ids) - text.prompt_length + self.depths
        return GumbelField(text.seed, start).rows(count, self.model.config.vocab_size)[0]

    def rule(self, coupled: bool, adapter: bool = False) -> DraftRule:
        """How raw scores become log-probabilities, as in a call of `generate`."""
        settings = self.weaver.tree_config
        return DraftRule.of(settings, self.temperature, self.depths, coupled=coupled, adapter=adapter)

    @torch.no_grad()
    def blocks(self, coupled: bool) -> DraftBlock:
        """The drafter's blocks at all anchors, made once."""
        if coupled not in self._blocks:
            head, rule = self.model.get_output_embeddings(), self.rule(coupled)
            depth = torch.arange(1, self.depths + 1, device=self.labels.device)
            chunks = []
            for rows in torch.arange(len(self.anchors), device=self.labels.device).split(CHUNK):
                logits = head(self.hidden[rows]).float()
                noise = None
                if coupled:
                    owner, place = self.owner[rows].tolist(), self.places[rows]
                    noise = torch.stack([self._noise[i][p + depth] for i, p in zip(owner, place, strict=True)])
                log_probs, ids = rule.log_probs(logits, noise).topk(min(self.pool, logits.shape[-1]), -1)
                known = None if noise is None else noise.gather(-1, ids)
                chunks.append((ids, logits.gather(-1, ids), log_probs, known))
            ids, logits, log_probs = (torch.cat([chunk[i] for chunk in chunks]) for i in range(3))
            noises = torch.cat([chunk[3] for chunk in chunks]) if coupled else None
            self._blocks[coupled] = DraftBlock(self.hidden, ids, logits, log_probs, noises)
        return self._blocks[coupled]

    def rows(self, texts: Sequence[int], places: Sequence[int]) -> Tensor:
        """Row of the anchor at index `place` of each text's ids."""
        found = [self.first[i] + place - self.texts[i].prompt_length for i, place in zip(texts, places, strict=True)]
        return torch.tensor(found, device=self.labels.device)


def part_of(block: DraftBlock, rows: Tensor, pool: int) -> DraftBlock:
    """Some rows of a block and the best `pool` candidates of each depth."""
    hidden, *others = (None if x is None else x[rows] for x in block)
    return DraftBlock(hidden, *(None if x is None else x[..., :pool].contiguous() for x in others))


def some_rows(tree: TokenTree, rows: Sequence[int]) -> TokenTree:
    """Some of the trees of a batch."""
    index = torch.tensor(rows, device=tree.device)
    tensors = {name: getattr(tree, name)[index] for name in ("token_ids", "parents", "log_probs", "sizes")}
    return replace(tree, **tensors)


def replay(recording: Recording, setting: Setting) -> list[list[int]]:
    """Tokens that each step of each text would have emitted under a setting, the cut last step included."""
    return walk(recording.texts, proposer(recording, setting))


@torch.no_grad()
def walk(texts: Sequence[Text], propose: Propose) -> list[list[int]]:
    """Walk along the texts as `generate` does: each step accepts the longest prefix of the rest that its tree holds."""
    places = [text.prompt_length for text in texts]
    runs: list[list[int]] = [[] for _ in texts]
    while alive := [i for i, text in enumerate(texts) if places[i] < len(text.ids) - 1]:
        tree = propose(alive, [places[i] for i in alive])
        reach = tree.depth_limit + 1
        rest = [texts[i].ids[places[i] + 1 : places[i] + 1 + reach] for i in alive]
        future = torch.tensor([row + [-1] * (reach - len(row)) for row in rest], device=tree.device)
        lengths = follow(tree, future.gather(1, tree.depths)).lengths.tolist()
        for i, length in zip(alive, lengths, strict=True):
            runs[i].append(min(length, len(texts[i].ids) - 1 - places[i]))
            places[i] += runs[i][-1]
    return runs


# ---- who proposes --------------------------------------------------------------------------------------------------


def proposer(recording: Recording, setting: Setting) -> Propose:
    """The trees of a setting along recorded texts."""
    if setting.builder == ORACLE:
        return gold_paths(recording, setting) if setting.rule != "sample" else oracle_trees(recording, setting)
    weaver, texts = recording.weaver, recording.texts
    config = setting.on(weaver.tree_config)
    build = make_builder(config, setting.budget, has_drafter=True, has_adapter=weaver.has_adapter)
    device = recording.labels.device
    if not getattr(build, "needs_block", False):  # it keeps an index of each text, so it must always be asked for all
        current = [text.prompt_length for text in texts]

        def from_text(alive: Sequence[int], places: Sequence[int]) -> TokenTree:
            for i, place in zip(alive, places, strict=True):
                current[i] = place
            history = [text.ids[: place + 1] for text, place in zip(texts, current, strict=True)]
            return some_rows(build(DraftContext(history, None, device)), alive)

        return from_text
    conditional = getattr(build, "needs_adapter", False)
    pool = weaver.pool_size(config) if conditional else setting.budget
    coupled = setting.rule == "coupled"
    blocks, rule = recording.blocks(coupled), recording.rule(coupled, adapter=True)

    def from_block(alive: Sequence[int], places: Sequence[int]) -> TokenTree:
        rows = recording.rows(alive, places)
        block = part_of(blocks, rows, pool)
        history = [texts[i].ids[place : place + 1] for i, place in zip(alive, places, strict=True)]
        taps = TapStates(recording.before[rows, None], recording.before[rows, None])  # its features are not read
        score = weaver.scorer(block, taps, rule) if conditional else None
        return build(DraftContext(history, None, device, block, score))

    return from_block


def gold_paths(recording: Recording, setting: Setting) -> Propose:
    """The oracle where the draw is known, at temperature 0 or given the noise: the text itself inside the pools.

    The target then gives its choice the probability 1, and the builder's best path is that of the choices, up to the
    first one outside its pool, the budget, or the block's depth.
    """
    pool = recording.weaver.pool_size(setting.on(recording.weaver.tree_config))
    block = recording.blocks(setting.rule == "coupled")
    inside = (block.token_ids[..., :pool] == recording.labels[..., None]).any(-1)
    count = inside.cumprod(1).sum(1).clamp(max=setting.budget)

    def propose(alive: Sequence[int], places: Sequence[int]) -> TokenTree:
        rows = recording.rows(alive, places)
        anchors = recording.anchors[rows].tolist()
        lists = zip(anchors, recording.labels[rows].tolist(), count[rows].tolist(), strict=True)
        chains = [[anchor, *labels[:length]] for anchor, labels, length in lists]
        return TokenTree.from_lists(chains, [list(range(-1, len(c) - 1)) for c in chains], device=rows.device)

    return propose


def oracle_trees(recording: Recording, setting: Setting) -> Propose:
    """The oracle where the draw is not known: the builder `weaver` on the target's own conditionals."""
    config = setting.on(recording.weaver.tree_config)
    build = WeaverBuilder(setting.budget, setting.rounds, setting.parents, setting.children)
    pool = recording.weaver.pool_size(config)
    # A text without an anchor has no block either; it is never asked for, and its neighbour's row stands in.
    starts = [text.prompt_length for text in recording.texts]
    target = CommittedTexts(recording.model, [text.ids for text in recording.texts], starts)
    everyone = range(len(recording.texts))
    most = len(recording.anchors) - 1

    def propose(alive: Sequence[int], places: Sequence[int]) -> TokenTree:
        target.move(alive, places)
        rows = recording.rows(everyone, target.places).clamp(max=most)
        block = part_of(recording.blocks(coupled=False), rows, pool)
        history = [text.ids[place : place + 1] for text, place in zip(recording.texts, target.places, strict=True)]
        score = TargetScorer(target, block.token_ids, recording.temperature)
        return some_rows(build(DraftContext(history, None, rows.device, block, score)), alive)

    return propose


# ---- what the pools and the first choices hold ----


@torch.no_grad()
def by_depth(recording: Recording, loop_free: bool) -> dict[str, Tensor]:
    """Counts `[D]` over all anchors, of the tokens that the texts hold at each depth behind them.

    `tokens`, and of these `pool <K>`: those among the drafter's best `K`. Where all tokens before are in the pool, so
    that a tree could hold them: `spine`, where they are the drafter's best throughout, as in a chain that is right so
    far, and `sibling`, where the last one is not; in both how often the next token is the first choice of the
    `marginals`, of the `adapter` given the path, and of the `target` itself.
    """
    weaver, model, labels = recording.weaver, recording.model, recording.labels
    depths, adapter = recording.depths, weaver.adapter
    assert adapter is not None
    counted = labels >= 0
    if loop_free:
        onsets = torch.tensor([text.onset for text in recording.texts], device=labels.device)[recording.owner]
        place = recording.places[:, None] + 1 + torch.arange(depths, device=labels.device)
        counted = counted & (place < onsets[:, None])
    block = recording.blocks(coupled=False)
    ids = block.token_ids[..., : adapter.config.pool_size]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    path = torch.cat([recording.anchors[:, None], labels[:, :-1].clamp(min=0)], 1)
    choices = []
    for rows in torch.arange(len(labels), device=labels.device).split(32):
        queries = adapter(recording.before[rows], recording.hidden[rows], embedding(path[rows]).to(recording.hidden))
        residual = head_product(head, queries).float().gather(-1, ids[rows])
        chosen = (block.logits[rows, :, : ids.shape[-1]] + residual).argmax(-1, keepdim=True)
        choices.append(ids[rows].gather(-1, chosen)[..., 0])
    firsts = {"marginals": ids[..., 0], "adapter": torch.cat(choices), "target": recording.best}

    counts = {"tokens": counted}
    for pool in POOLS:
        counts[f"pool {pool}"] = counted & (block.token_ids[..., :pool] == labels[..., None]).any(-1)

    def before(right: Tensor) -> Tensor:  # of all depths before each, [X, D]
        return torch.cat([torch.ones_like(right[:, :1]), right.cumprod(1)[:, :-1].bool()], 1)

    first = labels == firsts["marginals"]
    reached = counted & before((ids == labels[..., None]).any(-1))
    last_first = torch.cat([torch.ones_like(first[:, :1]), first[:, :-1]], 1)
    for group, where in (("spine", counted & before(first)), ("sibling", reached & ~last_first)):
        counts[group] = where
        counts |= {f"{group} {name}": where & (choice == labels) for name, choice in firsts.items()}
    return {name: count.sum(0).cpu() for name, count in counts.items()}
