"""The adapter against an evaluation written from its specification, path by path, and its ways to be evaluated."""

import math
from functools import cached_property

import peft
import pytest
import torch
from support import VOCAB, adapter_config, prompt_ids, random_weaver, relative, tiny_random_model

from weaver_hf import WeaverModel
from weaver_hf.adapter import AdapterScorer, FoldedTables, TopKAdapter, is_plain
from weaver_hf.configuration_weaver import AdapterConfig
from weaver_hf.drafter import DraftBlock
from weaver_hf.errors import CheckpointError, MissingAdapterError, NotAttachedError, TreeConfigError
from weaver_hf.noise import GumbelField, gumbel
from weaver_hf.proposal import BUILDERS, DraftContext, MarginalBuilder, WeaverBuilder
from weaver_hf.proposal.conditional import grow
from weaver_hf.scoring import DraftRule

HIDDEN, DEPTHS = 64, 7
SHAPES = [(generation, layers) for generation in ("learned", "rope") for layers in (1, 2, 3)]


def random_adapter(generation="learned", layers=1, **overrides) -> TopKAdapter:
    return random_weaver(adapter=adapter_config(generation, num_layers=layers, **overrides)).adapter


def spec_query(adapter, target_hidden, hidden, embeddings):
    """The query of the last node of one path, from the specification: fp64, row by row, nothing kept or batched.

    `target_hidden [H]`, `hidden [D, H]`, `embeddings [P, H]` of the path's tokens from the anchor down.
    """
    state = {name: tensor.double() for name, tensor in adapter.state_dict().items()}
    config = adapter.config
    width = config.rank // config.num_heads

    def norm(name, x):
        x = x.double()
        return state[f"{name}.weight"] * x * (x.square().mean() + 1e-6) ** -0.5 + state[f"{name}.bias"]

    def linear(name, x):
        return state[f"{name}.weight"] @ x + state.get(f"{name}.bias", 0.0)

    def turned(x, position):
        for i in range(width // 2):
            angle = position * config.rope_base ** (-2 * i / width)
            a, b = float(x[i]), float(x[i + width // 2])
            x[i], x[i + width // 2] = (
                a * math.cos(angle) - b * math.sin(angle),
                b * math.cos(angle) + a * math.sin(angle),
            )
        return x

    rows = [linear("proposal_in", norm("output_norm", x)) for x in [target_hidden, *hidden]]
    rows += [linear("token_in", norm("embed_norm", x)) for x in embeddings]
    prefix = 1 + len(hidden)
    positions = [*range(prefix), *range(1, len(embeddings) + 1)]
    if config.generation == "learned":
        rows = [x if p == 0 else x + state["pos_emb"][p - 1] for x, p in zip(rows, positions)]
    for layer in range(config.num_layers):
        name = f"blocks.{layer}"
        heads = []
        for x, position in zip(rows, positions):
            parts = linear(f"{name}.qkv_proj", norm(f"{name}.norm_attn", x)).chunk(3)
            q, k, v = (list(part.split(width)) for part in parts)
            if config.generation == "rope":
                q, k = ([turned(h, position) for h in part] for part in (q, k))
            heads.append((q, k, v))
        after = []
        for i, x in enumerate(rows):  # a row sees the rows before it and itself: prefix, then the path
            mixed = []
            for h in range(config.num_heads):
                scores = torch.stack([heads[i][0][h] @ heads[j][1][h] for j in range(i + 1)]) / math.sqrt(width)
                weights = scores.softmax(0)
                mixed.append(sum(w * heads[j][2][h] for j, w in enumerate(weights)))
            x = x + linear(f"{name}.o_proj", torch.cat(mixed))
            z = norm(f"{name}.norm_mlp", x)
            if config.generation == "learned":
                up = linear(f"{name}.fc1", z)
                x = x + linear(f"{name}.fc2", up * 0.5 * (1 + torch.erf(up / math.sqrt(2))))
            else:
                gate, up = linear(f"{name}.gate_up_proj", z).chunk(2)
                x = x + linear(f"{name}.down_proj", gate * torch.sigmoid(gate) * up)
            after.append(x)
        rows = after
    return linear("lm_head_query_in", norm("out_norm", rows[-1]))


@pytest.mark.parametrize(("generation", "layers"), SHAPES)
def test_all_depths_in_one_pass_equal_the_specification(generation, layers):
    adapter = random_adapter(generation, layers)
    target_hidden, hidden, words = (
        torch.randn(2, 3, HIDDEN),
        torch.randn(2, 3, DEPTHS, HIDDEN),
        torch.randn(2, 3, DEPTHS, HIDDEN),
    )
    with torch.no_grad():
        queries = adapter(target_hidden, hidden, words)
        for row, block in ((0, 2), (1, 0)):
            for depth in range(DEPTHS):
                expected = spec_query(
                    adapter, target_hidden[row, block], hidden[row, block], words[row, block, : depth + 1]
                )
                assert relative(queries[row, block, depth], expected) < 1e-5


@pytest.mark.parametrize("depths", [1, 3])
def test_a_block_may_have_fewer_depths_than_the_adapter(depths):
    adapter = random_adapter()
    target_hidden, hidden, words = torch.randn(HIDDEN), torch.randn(depths, HIDDEN), torch.randn(depths, HIDDEN)
    with torch.no_grad():
        queries = adapter(target_hidden, hidden, words)
        assert queries.shape == (depths, HIDDEN)
        assert relative(queries[-1], spec_query(adapter, target_hidden, hidden, words)) < 1e-5


def stepped(adapter, target_hidden, hidden, words, parents, widths):
    """States of the nodes of a tree, scored in batches of `widths`, `[B, N, r]`."""
    nodes, depths = len(parents), []
    ancestors = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        ancestors[node, node] = True
        ancestors[node] |= ancestors[parent] if parent >= 0 else False
    batch, first, out = len(target_hidden), 0, []
    table = adapter.table(adapter.prefix(target_hidden, hidden), nodes)
    for width in widths:
        part = slice(first, first + width)
        out.append(
            adapter.step(
                adapter.token_inputs(words[:, part]),
                torch.tensor(depths[part]).expand(batch, -1),
                table,
                ancestors[part].expand(batch, -1, -1),
                first,
            )
        )
        first += width
    return torch.cat(out, 1)


# Node 0 is the anchor; batches of 1, 3, 2 and 3; node 5 has no child, 7 and 8 are siblings on a branch of depth 3.
PARENTS, WIDTHS = [-1, 0, 0, 0, 1, 2, 4, 4, 4], [1, 3, 2, 3]


def path_to(node):
    return ([] if PARENTS[node] < 0 else path_to(PARENTS[node])) + [node]


@pytest.mark.parametrize(("generation", "layers"), SHAPES)
@torch.no_grad()
def test_a_tree_scored_in_batches_equals_its_paths_recomputed_alone(generation, layers):
    adapter = random_adapter(generation, layers)
    target_hidden, hidden, words = torch.randn(2, HIDDEN), torch.randn(2, DEPTHS, HIDDEN), torch.randn(2, 9, HIDDEN)
    queries = adapter.query(stepped(adapter, target_hidden, hidden, words, PARENTS, WIDTHS))
    for node in range(9):
        path = words[:, path_to(node)]
        along = adapter(target_hidden, hidden, torch.cat([path, words[:, : DEPTHS - path.shape[1]]], 1))
        assert relative(queries[:, node], along[:, path.shape[1] - 1]) < 1e-5
        expected = spec_query(adapter, target_hidden[1], hidden[1], path[1])
        assert relative(queries[1, node], expected) < 1e-5


@torch.no_grad()
def test_unrelated_branches_do_not_change_a_nodes_state():
    adapter = random_adapter("rope", 2)
    target_hidden, hidden, words = torch.randn(1, HIDDEN), torch.randn(1, DEPTHS, HIDDEN), torch.randn(1, 9, HIDDEN)
    states = stepped(adapter, target_hidden, hidden, words, PARENTS, WIDTHS)
    others = words.clone()
    others[:, [2, 3, 5, 7]] += 3  # none of them is above node 6 or node 8
    after = stepped(adapter, target_hidden, hidden, others, PARENTS, WIDTHS)
    for node in (0, 1, 4, 6, 8):
        assert torch.equal(states[:, node], after[:, node])
    assert not torch.allclose(states[:, 7], after[:, 7])
    assert not torch.allclose(states[:, 5], after[:, 5])


@pytest.mark.parametrize("generation", ["learned", "rope"])
def test_every_parameter_is_trained_by_the_one_pass_form(generation):
    adapter = random_adapter(generation, 2)
    adapter(
        torch.randn(3, HIDDEN), torch.randn(3, DEPTHS, HIDDEN), torch.randn(3, DEPTHS, HIDDEN)
    ).square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in adapter.parameters())


@pytest.mark.parametrize(("generation", "count"), [("learned", 56_694_784), ("rope", 60_860_416)])
def test_the_released_geometry_has_the_published_number_of_parameters(generation, count):
    with torch.device("meta"):
        adapter = TopKAdapter(5120, AdapterConfig(generation))
    assert sum(p.numel() for p in adapter.parameters()) == count


# ---- scores over a pool ----


def scoring(adapter, model, batch=1, fold=False, pool=11, head=None):
    """A scorer of a random block on a target, and that block."""
    torch.manual_seed(2)
    logits = torch.randn(batch, DEPTHS, VOCAB) * 2
    ids = logits.topk(pool, -1).indices
    block = DraftBlock(
        torch.randn(batch, DEPTHS, HIDDEN), ids, logits.gather(-1, ids), logits.log_softmax(-1).gather(-1, ids)
    )
    embedding, head = model.get_input_embeddings(), head or model.get_output_embeddings()
    tables = FoldedTables.build(adapter, embedding, head) if fold else None
    target_hidden = torch.randn(batch, HIDDEN)
    warm = torch.linspace(0.7, 1.4, DEPTHS)
    return (
        AdapterScorer(adapter, embedding, head, block, target_hidden, DraftRule(warm.tolist()), tables),
        block,
        target_hidden,
    )


def chain_scores(scorer, tokens):
    """Log-probabilities after every node of a chain of `tokens [B, P]`, `[B, P, K]`."""
    length = tokens.shape[1]
    out = []
    for i in range(length):
        above = (torch.arange(length) <= i).expand(len(tokens), 1, -1)
        out.append(scorer(tokens[:, i : i + 1], torch.full((len(tokens), 1), i), above, i))
    return torch.cat(out, 1)


@torch.no_grad()
def test_scores_are_raw_logits_plus_head_rows_times_query_over_the_pool_alone():
    adapter, model = random_adapter(), tiny_random_model()
    scorer, block, target_hidden = scoring(adapter, model, batch=2)
    tokens = torch.randint(0, VOCAB, (2, 5))
    scores = chain_scores(scorer, tokens)
    words, head = model.get_input_embeddings().weight[tokens], model.get_output_embeddings().weight
    for depth in range(5):
        query = spec_query(adapter, target_hidden[1], block.hidden[1], words[1, : depth + 1])
        residual = head[block.token_ids[1, depth]].double() @ query
        warm = torch.linspace(0.7, 1.4, DEPTHS)[depth].double()
        expected = ((block.logits[1, depth].double() + residual) / warm).log_softmax(-1)
        torch.testing.assert_close(scores[1, depth].double(), expected, atol=1e-4, rtol=1e-5)
    assert torch.allclose(scores.exp().sum(-1), torch.ones(2, 5))


@pytest.mark.parametrize("generation", ["learned", "rope"])
@torch.no_grad()
def test_folded_tables_give_the_same_scores(generation):
    adapter, model = random_adapter(generation, 2), tiny_random_model()
    tokens = torch.randint(0, VOCAB, (1, 6))
    plain = chain_scores(scoring(adapter, model)[0], tokens)
    torch.testing.assert_close(chain_scores(scoring(adapter, model, fold=True)[0], tokens), plain, atol=1e-4, rtol=1e-5)


class Doubled(torch.nn.Module):
    """A head whose rows cannot be gathered: its weight is not what it multiplies with."""

    def __init__(self, head, bias=None):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(head.weight / 2), bias

    def forward(self, x):
        return 2 * torch.nn.functional.linear(x, self.weight) + (0 if self.bias is None else self.bias)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, VOCAB)], ids=["no-bias", "bias"])
@torch.no_grad()
def test_a_head_that_is_no_plain_matrix_is_called_and_gives_the_same_scores(fold, bias):
    adapter, model = random_adapter(), tiny_random_model()
    tokens = torch.randint(0, VOCAB, (1, 6))
    plain = chain_scores(scoring(adapter, model)[0], tokens)
    head = Doubled(model.get_output_embeddings(), bias)
    assert not is_plain(head)
    scores = chain_scores(scoring(adapter, model, fold=fold, head=head)[0], tokens)
    torch.testing.assert_close(scores, plain, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_a_lora_on_the_head_counts():
    adapter, model = random_adapter(), tiny_random_model()
    tokens = torch.randint(0, VOCAB, (1, 6))
    before = chain_scores(scoring(adapter, model)[0], tokens)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)).eval()
    base = wrapped.get_base_model()
    assert not is_plain(base.get_output_embeddings())
    scores = chain_scores(scoring(adapter, base)[0], tokens)
    merged = wrapped.merge_and_unload()
    assert is_plain(merged.get_output_embeddings())
    torch.testing.assert_close(scores, chain_scores(scoring(adapter, merged)[0], tokens), atol=1e-4, rtol=1e-5)
    assert not torch.allclose(scores, before, atol=1e-2)


# ---- in a Weaver ----


def attached(generation="learned", fold=False, **overrides):
    model = tiny_random_model()
    return model, random_weaver(adapter=adapter_config(generation), tree_config={}, **overrides).attach(
        model, fold=fold
    )


def test_an_untrained_adapter_scores_as_the_drafter_does_inside_the_pool():
    model = tiny_random_model()
    weaver = random_weaver().init_adapter(adapter_config())
    assert weaver.tree_config.builder == "weaver"
    scorer, block, _ = scoring(weaver.adapter, model)
    warm = torch.linspace(0.7, 1.4, DEPTHS)
    marginals = DraftRule(warm.tolist()).log_probs(block.logits)
    tokens = torch.randint(0, VOCAB, (1, DEPTHS))
    torch.testing.assert_close(chain_scores(scorer, tokens), marginals)
    # So with enough passes its tree is the one of the marginals.
    anchors = torch.tensor([[3]])
    tree = grow(block.token_ids, anchors, scoring(weaver.adapter, model)[0], 12, [1] * 13, 11, prune=True)
    expected = MarginalBuilder(12).grow(block._replace(log_probs=marginals), anchors)
    assert paths_of(tree) == paths_of(expected)


@torch.no_grad()
def test_a_coupled_adapter_adds_to_each_depth_the_noise_that_decides_there():
    """Candidates of depth `d + 1` are drawn at a node of depth `d`, with the noise of the position `d` further on."""
    model = tiny_random_model()
    weaver = random_weaver().init_adapter(adapter_config())
    _, block, target_hidden = scoring(weaver.adapter, model)
    noise = GumbelField(torch.tensor([11]), torch.tensor([23]))
    block = block._replace(gumbels=noise.rows(DEPTHS, VOCAB).gather(-1, block.token_ids))
    rule = DraftRule(torch.linspace(0.7, 1.4, DEPTHS).tolist(), torch.linspace(0.5, 2.0, DEPTHS).tolist())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    scores = chain_scores(
        AdapterScorer(weaver.adapter, embedding, head, block, target_hidden, rule), torch.tensor([[3, 1, 4]])
    )
    for depth in range(3):
        log_q = (block.logits[0, depth] / rule.temperatures[depth]).log_softmax(-1)
        drawn_with = gumbel(torch.tensor([11]), torch.tensor([[23 + depth]]), VOCAB)[0, 0][block.token_ids[0, depth]]
        expected = ((log_q + drawn_with) / rule.couplings[depth]).log_softmax(-1)
        torch.testing.assert_close(scores[0, depth], expected, atol=1e-5, rtol=1e-5)


def paths_of(tree, row=0):
    return {tuple(tree.token_ids[row, tree.path(node, row)[1:]].tolist()) for node in range(1, int(tree.sizes[row]))}


@pytest.mark.parametrize(
    ("builder", "generation", "options"),
    [
        ("weaver", "learned", {}),
        ("weaver", "rope", {"prefill_chunk_size": 4}),
        ("weaver-paper", "rope", {"repetition_penalty": 1.2}),
    ],
    ids=["plain", "chunks", "penalty"],
)
def test_greedy_text_equals_stock_with_a_random_adapter(builder, generation, options):
    model, weaver = attached(generation)
    assert weaver.tree_config.builder == "weaver", "the default with an adapter"
    weaver.tree_config.builder = builder
    options = {"max_new_tokens": 24, "do_sample": False, **options}
    stock = tiny_random_model().generate(prompt_ids(), **options)
    assert torch.equal(model.generate(prompt_ids(), assistant_model=weaver, **options), stock)
    assert weaver.stats.drafted_nodes == 15 * weaver.stats.steps


def test_folding_is_lazy_gives_the_same_trees_and_is_freed_on_detach():
    drafted = {}
    for fold in (False, True):
        model, weaver = attached(fold=fold)
        assert weaver._tables is None
        model.generate(prompt_ids(), max_new_tokens=12, do_sample=False, assistant_model=weaver)
        assert (weaver._tables is not None) == fold
        drafted[fold] = weaver.stats.best_tree
        assert weaver.detach()._tables is None
    assert torch.equal(drafted[False].token_ids, drafted[True].token_ids)
    torch.testing.assert_close(drafted[False].log_probs, drafted[True].log_probs, atol=1e-4, rtol=1e-4)


def test_the_adapter_reads_the_target_state_whose_logits_chose_the_anchor(monkeypatch):
    model, weaver = attached()
    seen = []
    honest = TopKAdapter.prefix
    monkeypatch.setattr(
        TopKAdapter, "prefix", lambda self, state, hidden: seen.append(state) or honest(self, state, hidden)
    )
    out = model.generate(prompt_ids(), max_new_tokens=24, do_sample=False, assistant_model=weaver)[0].tolist()
    anchors, position = [], len(prompt_ids()[0])
    for run in [0, *weaver.stats.runs][: len(seen)]:
        position += run
        anchors.append(out[position])
    with torch.no_grad():
        chosen = [int(model.get_output_embeddings()(state).argmax(-1)) for state in seen]
    assert chosen == anchors
    assert len(set(anchors)) > 3


@pytest.mark.parametrize("builder", ["suffix", "marginal", "weaver"])
@pytest.mark.parametrize("budget", [0, 5])
def test_anchors_are_uploaded_once_a_step(monkeypatch, builder, budget):
    model, weaver = attached()
    uploads = []
    counted = cached_property(lambda self: uploads.append(self) or torch.tensor([row[-1:] for row in self.history]))
    counted.__set_name__(DraftContext, "anchors")
    monkeypatch.setattr(DraftContext, "anchors", counted)
    weaver.tree_config.builder, weaver.tree_config.budget = builder, budget
    model.generate(prompt_ids(), max_new_tokens=8, do_sample=False, assistant_model=weaver)
    assert len(uploads) == weaver.stats.steps


def test_the_settings_of_the_tree_reach_the_builder(monkeypatch):
    model, weaver = attached()
    made = []

    class Spy(WeaverBuilder):
        def __call__(self, context: DraftContext):
            made.append((self.widths, self.children, context.block.token_ids.shape[-1]))
            return super().__call__(context)

    monkeypatch.setitem(BUILDERS, "weaver", Spy)
    weaver.tree_config.rounds, weaver.tree_config.parents, weaver.tree_config.children = 3, 4, 5
    weaver.tree_config.pool = 9
    model.generate(prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=weaver)
    assert made[0] == ([1, 4, 4], 5, 9)
    weaver.tree_config.pool = 41
    with pytest.raises(TreeConfigError, match="pool of 41 candidates; expected at most 40"):
        model.generate(prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=weaver)


@pytest.mark.parametrize("builder", ["weaver", "weaver-paper"])
@pytest.mark.parametrize("declared", [False, True])
def test_without_adapter_weights_the_builder_is_refused(builder, declared):
    overrides = {"adapter": adapter_config(), "adapter_initialized": False} if declared else {}
    model = tiny_random_model()
    weaver = random_weaver(**overrides).attach(model)
    assert weaver.tree_config.builder == "marginal"
    weaver.tree_config.builder = builder
    with pytest.raises(MissingAdapterError, match=f"builder '{builder}'"):
        model.generate(prompt_ids(), max_new_tokens=4, do_sample=False, assistant_model=weaver)


def test_outside_our_loop_there_is_no_state_to_start_from():
    model, weaver = attached()
    _, block, _ = scoring(weaver.adapter, model)
    with pytest.raises(NotAttachedError, match="no state of the target"):
        weaver.scorer(block, None, DraftRule([1.0] * DEPTHS))


def test_without_an_adapter_none_of_its_work_is_done(monkeypatch):
    model = tiny_random_model()
    weaver = random_weaver().attach(model)
    monkeypatch.setattr(WeaverModel, "scorer", lambda *a, **k: pytest.fail("no adapter, no scorer"))
    model.generate(prompt_ids(), max_new_tokens=8, do_sample=False, assistant_model=weaver)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_depth": 15}, "15 depths beside a drafter of block_size 8; expected 7"),
        ({"pool_size": 129}, "pool_size 129 beside a vocabulary of 128"),
        ({"rank": 25}, "rank 25 and 3 heads"),
        ({"generation": "rope", "num_heads": 8}, "heads of width 3"),
        ({"generation": "spiral"}, "generation 'spiral'"),
        ({"num_layers": 0}, "num_layers 0"),
        ({"rope_base": 0.0}, "rope_base 0.0"),
        ({"depth": 7}, r"adapter settings \['depth'\]"),
    ],
    ids=lambda value: str(next(iter(value.items()))) if isinstance(value, dict) else "",
)
def test_an_adapter_that_does_not_fit_is_refused_with_both_values(change, match):
    fields = {"rank": 24, "num_heads": 3, "mlp_dim": 20, "max_depth": 7, "pool_size": 40, **change}
    with pytest.raises(CheckpointError, match=match):
        random_weaver(adapter=fields)
    if set(change) <= {"max_depth", "pool_size"}:
        weaver = random_weaver()
        with pytest.raises(CheckpointError, match=match):
            weaver.init_adapter(AdapterConfig(**fields))
        assert weaver.adapter is None
        assert weaver.config.adapter is None


def test_an_adapter_needs_a_drafter():
    with pytest.raises(CheckpointError, match="an adapter without a drafter"):
        random_weaver(adapter=adapter_config(), num_hidden_layers=0)
