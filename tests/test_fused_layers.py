"""The fused decoder layer against the stock one along a tree, and weights that are views of one tensor."""

import copy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import prompt_ids, random_tree, relative, tiny_random_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.target import fused
from weaver_hf.target.attach import _subclass, _swap
from weaver_hf.target.attention import TreeAttention
from weaver_hf.target.cache import LinearStash, TreeCache, TreeKVLayer
from weaver_hf.target.compat import CACHE_KEY
from weaver_hf.target.fused import FusedLayer, fuse_projections, joined, unfuse_projections
from weaver_hf.target.gated_delta import TreeMixer
from weaver_kernels import reference

GDN, ATTENTION = 1, 3  # a layer of each kind in the tiny model


class Verification:
    """One model with a prefilled cache of its own, ready to verify trees with the stock or the fused layers."""

    def __init__(self, model, batch=1, length=9):
        self.model, self.config = model, model.config
        ids = torch.cat([prompt_ids(length, seed=row) for row in range(batch)])
        mask = torch.ones_like(ids)
        if batch > 1:
            mask[0, :3] = 0  # left padding
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=self.config)
        with torch.no_grad():
            kwargs = {} if batch == 1 else {"attention_mask": mask, "position_ids": positions}
            model(ids, use_cache=True, **kwargs, **{CACHE_KEY: self.cache})
        self.starts = (mask == 0).sum(-1)
        self.tree_cache = TreeCache(self.cache, None if batch == 1 else mask, positions[:, -1] + 1, room=64)

    def run(self, tree, fused: bool, **kwargs):
        cache, plan = self.tree_cache, self.tree_cache.plan(tree)
        if fused:
            plan = replace(plan, fused=True, starts=self.starts)
            for layer in cache.cache.layers:
                layer.stash = None
                self.add_buffers(layer, tree)
        with torch.no_grad():
            logits = self.model(
                input_ids=tree.token_ids,
                position_ids=plan.position_ids,
                attention_mask=dict.fromkeys(self.config.layer_types),
                use_cache=True,
                weaver_tree=plan,
                **kwargs,
                **{CACHE_KEY: cache.cache},
            ).logits
        if fused:
            self.attended = plan.attended
            for layer in cache.cache.layers:
                if layer.stash is not None:  # a part that somebody changed, which ran the stock tree forward
                    continue
                layer.stash = tree.num_nodes if isinstance(layer, TreeKVLayer) else LinearStash(layer.rows, layer.delta)
        return logits

    def add_buffers(self, layer, tree):
        batch, nodes = tree.token_ids.shape
        if isinstance(layer, TreeKVLayer):
            for buffer in (layer._keys, layer._values):
                buffer[:, :, layer.length :] = 7.0  # whatever lies there
            layer.keys_buffer, layer.values_buffer = layer._keys, layer._values
            return
        c, dtype = self.config, layer.conv_states[0].dtype
        key_heads, value_heads = c.linear_num_key_heads, c.linear_num_value_heads
        nan = lambda *shape, dtype=torch.float32: torch.full(shape, float("nan"), dtype=dtype)  # noqa: E731
        layer.rows = nan(batch, nodes, layer.conv_states[0].shape[1], dtype=dtype)
        layer.delta = reference.GatedDeltaStash(
            nan(batch, key_heads, nodes, c.linear_key_head_dim),
            nan(batch, value_heads, nodes, c.linear_value_head_dim),
            nan(batch, value_heads, nodes),
        )


def attached(**overrides):
    model = tiny_random_model(**overrides)
    WeaverModel(WeaverConfig()).attach(model)
    return model


def pair(model, batch=1, fuse=True):
    """The same model twice over, the second with fused weights."""
    twin = copy.deepcopy(model)
    WeaverModel(WeaverConfig()).attach(twin)
    if fuse:
        fuse_projections(twin)
    return Verification(model, batch), Verification(twin, batch)


def assert_equal_verifications(stock, mine, tree):
    expected, logits = stock.run(tree, fused=False), mine.run(tree, fused=True)
    scale = expected.abs().max()
    assert (logits - expected).abs().max() < 1e-5 * scale
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    for theirs, ours in zip(stock.cache.layers, mine.cache.layers):
        if isinstance(theirs, TreeKVLayer):
            end = theirs.length + tree.num_nodes
            assert relative(ours._keys[:, :, :end], theirs._keys[:, :, :end]) < 1e-5
            assert relative(ours._values[:, :, :end], theirs._values[:, :, :end]) < 1e-5
        else:
            assert relative(ours.stash.rows, theirs.stash.rows) < 1e-5
            for a, b in zip(ours.stash.delta, theirs.stash.delta):
                assert relative(a, b) < 1e-5


# ---- the forward ----


@pytest.mark.parametrize("batch", [1, 2], ids=["one", "two-left-padded"])
@pytest.mark.parametrize("nodes", [1, 17])
def test_fused_layers_verify_as_the_stock_tree_forward(nodes, batch):
    stock, mine = pair(attached(), batch)
    assert_equal_verifications(stock, mine, random_tree(nodes, "random", batch=batch))
    assert mine.attended == {0, 1, 2, 3}


def test_rounds_of_verify_and_commit_stay_together():
    stock, mine = pair(attached())
    for round_ in range(4):
        tree = random_tree(7, "random", seed=round_)
        assert_equal_verifications(stock, mine, tree)
        path = torch.tensor([tree.path([6, 0, 3][round_ % 3])])
        for side in (stock, mine):
            side.tree_cache.defer(path, torch.tensor([path.shape[1]]), path.shape[1])
            side.tree_cache.commit()


def test_weights_that_are_not_fused_give_the_same():
    stock, mine = pair(attached(), fuse=False)
    assert_equal_verifications(stock, mine, random_tree(9, "comb"))


def test_biases_of_the_attention_projections_are_fused_too():
    model = attached(attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj.bias" in name:
                parameter.normal_()
    stock, mine = pair(model)
    attention = mine.model.model.layers[ATTENTION].self_attn
    assert joined([attention.q_proj, attention.k_proj, attention.v_proj])[1] is not None
    assert_equal_verifications(stock, mine, random_tree(9, "random"))


def test_bf16_stays_as_close_to_fp32_as_the_stock_tree_forward():
    exact = attached()
    tree = random_tree(17, "random")
    expected = Verification(exact).run(tree, fused=False)
    stock, mine = pair(attached().bfloat16())
    theirs, ours = stock.run(tree, fused=False), mine.run(tree, fused=True)
    assert ours.dtype == torch.bfloat16
    assert relative(ours, expected) < 1.3 * relative(theirs, expected)


def test_the_layers_input_is_left_alone_for_taps():
    _, mine = pair(attached())
    seen = []
    for layer in mine.model.model.layers:
        layer.register_forward_hook(lambda m, args, output: seen.append((output, output.clone())))
    mine.run(random_tree(5, "random"), fused=True)
    assert len(seen) == 4
    assert all(torch.equal(output, copied) for output, copied in seen)


def test_hidden_states_can_be_recorded():
    stock, mine = pair(attached())
    tree = random_tree(5, "random")
    before = mine.run(tree, fused=True, output_hidden_states=True)
    calls = count_calls(mine.model, lambda: mine.run(tree, fused=True))
    assert calls == called_anyway(mine.model), "hooks that transformers leaves behind switch nothing off"
    assert relative(before, stock.run(tree, fused=False)) < 1e-5


def test_without_a_fused_plan_the_layer_is_the_stock_layer():
    stock, model = tiny_random_model(), attached()
    with torch.no_grad():
        assert torch.equal(model(prompt_ids()).logits, stock(prompt_ids()).logits)
        fuse_projections(model)
        torch.testing.assert_close(model(prompt_ids()).logits, stock(prompt_ids()).logits)


def count_calls(model, run) -> set[str]:
    """Names of the leaf modules whose forward ran."""
    called = set()
    original = torch.nn.Module.__call__
    names = {module: name for name, module in model.named_modules()}

    def call(self, *args, **kwargs):
        if not any(True for _ in self.children()):
            called.add(names.get(self, ""))
        return original(self, *args, **kwargs)

    torch.nn.Module.__call__ = call
    try:
        run()
    finally:
        torch.nn.Module.__call__ = original
    return called


def called_anyway(model) -> set[str]:
    """Leaf modules that the fused forward calls: what lies outside the layers, and the product that ends a mixer."""
    ends = {f"model.layers.{i}.{'self_attn.o_proj' if i == ATTENTION else 'linear_attn.out_proj'}" for i in range(4)}
    return {"model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"} | ends


def test_a_fused_layer_calls_one_module_and_launches_ten_kernels(monkeypatch):
    _, mine = pair(attached())
    assert count_calls(mine.model, lambda: mine.run(random_tree(5, "comb"), fused=True)) == called_anyway(mine.model)

    launches: list[str] = []
    inside: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not inside and not func.is_view and not any(name in str(func) for name in ("_unsafe_view", "empty")):
                launches.append(str(func))
            return func(*args, **(kwargs or {}))

    def one_launch(module, name):
        function = getattr(module, name)

        def run(*args, **kwargs):
            if not inside:
                launches.append(name)
            inside.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                inside.pop()

        monkeypatch.setattr(module, name, staticmethod(run) if isinstance(module, type) else run)

    for name in ("rms_norm", "gated_rms_norm", "silu_mul", "qk_norm_rope"):
        one_launch(fused.fused_reference, name)
    for name in ("causal_conv_tree", "gated_delta_tree", "tree_attention"):
        one_launch(fused.ops, name)
    per_layer = []

    def start(*_):
        launches.clear()

    def stop(*_):
        per_layer.append(len(launches))

    for layer in mine.model.model.layers:
        layer.register_forward_pre_hook(start)
        layer.register_forward_hook(stop)
    with Count():
        mine.run(random_tree(5, "comb"), fused=True)
    assert per_layer == [10, 10, 10, 9], "attention's own second launch, the merge, is not seen here"


# ---- parts that somebody changed ----


def hooked(module):
    module.seen = []
    module.register_forward_hook(lambda m, args, output: m.seen.append(1))


@pytest.mark.parametrize(
    "path",
    [
        "1.input_layernorm", "1.post_attention_layernorm", "1.linear_attn", "1.linear_attn.norm", "1.linear_attn.conv1d",
        "1.linear_attn.in_proj_z", "1.linear_attn.out_proj", "3.self_attn", "3.self_attn.q_norm", "3.self_attn.k_proj",
        "3.self_attn.o_proj", "2.mlp", "2.mlp.up_proj", "2.mlp.act_fn", "2.mlp.down_proj",
    ],
)  # fmt: skip
def test_a_module_with_a_hook_is_called(path):
    stock, mine = pair(attached())
    module = mine.model.get_submodule(f"model.layers.{path}")
    hooked(module)
    tree = random_tree(5, "random")
    if "conv1d" not in path:  # its hook is none of a forward's: nobody calls it
        assert_equal_verifications(stock, mine, tree)
        assert module.seen
    else:
        assert relative(mine.run(tree, fused=True), stock.run(tree, fused=False)) < 1e-5


def test_a_forward_on_the_instance_is_called():
    stock, mine = pair(attached())
    mlp = mine.model.model.layers[GDN].mlp
    forward = mlp.forward
    mlp.forward = lambda x: 0 * forward(x)
    tree = random_tree(5, "random")
    assert relative(mine.run(tree, fused=True), stock.run(tree, fused=False)) > 1e-3


def test_lora_is_applied_and_its_layers_are_left_alone():
    model = tiny_random_model()
    targets = ["in_proj_z", "q_proj", "up_proj", "out_proj", "down_proj"]
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=targets, layers_to_transform=[1, 2, 3]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    WeaverModel(WeaverConfig()).attach(wrapped)
    stock = Verification(model)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert fuse_projections(model) == 2, "the mixer and the MLP of layer 0"
    moved = {name for name, parameter in model.named_parameters() if parameter.data_ptr() != before[name]}
    assert all(name.startswith("model.layers.0.") for name in moved)
    assert len(moved) == 6
    assert_equal_verifications(stock, Verification(model), random_tree(9, "random"))


def test_a_mixture_of_experts_is_called_as_a_module():
    config = Qwen3_5MoeTextConfig(
        **{k: v for k, v in tiny_random_model().config.to_dict().items() if k not in ("model_type", "architectures")},
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3_5MoeForCausalLM(config).eval()
    for layer in model.model.layers:
        mixer = getattr(layer, "linear_attn", None)
        module, mixin = (layer.self_attn, TreeAttention) if mixer is None else (mixer, TreeMixer)
        _swap(module, _subclass(type(module), mixin))
        _swap(layer, _subclass(type(layer), FusedLayer))
    sides = Verification(model), Verification(model)
    assert_equal_verifications(*sides, random_tree(9, "random"))


# ---- weights ----


def groups(model):
    return list(fused._groups(model))


def storages(linears) -> set[int]:
    return {m.weight.untyped_storage().data_ptr() for m in linears}


def test_fusing_shares_one_memory_and_leaves_no_second_copy():
    model = tiny_random_model()
    parameters, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    assert fuse_projections(model) == len(groups(model)) == 8
    assert fuse_projections(model) == 8
    for linears in groups(model):
        assert len(storages(linears)) == 1
        sizes = sum(m.weight.numel() * m.weight.element_size() for m in linears)
        assert linears[0].weight.untyped_storage().nbytes() == sizes
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_unfusing_gives_every_parameter_memory_of_its_own():
    model = tiny_random_model()
    state = copy.deepcopy(model.state_dict())
    fuse_projections(model)
    unfuse_projections(model)
    for linears in groups(model):
        assert joined(linears) is None
        assert len(storages(linears)) == len(linears)
        assert all(m.weight.untyped_storage().nbytes() == m.weight.numel() * 4 for m in linears)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "change", [lambda m: m.to(torch.float64), lambda m: m.bfloat16(), copy.deepcopy], ids=["to", "bfloat16", "deepcopy"]
)
def test_what_moves_the_parameters_ends_the_sharing_until_fused_again(change):
    model = tiny_random_model()
    fuse_projections(model)
    changed = change(model)
    assert all(joined(linears) is None for linears in groups(changed))
    assert fuse_projections(changed) == 8


def test_a_cast_model_still_verifies_and_loading_keeps_the_sharing():
    stock, mine = pair(attached())
    mine.model.double().float()
    assert_equal_verifications(stock, mine, random_tree(5, "random"))
    fuse_projections(mine.model)
    mine.model.load_state_dict(tiny_random_model(seed=3).state_dict())
    assert all(joined(linears) is not None for linears in groups(mine.model))
    other = attached(seed=3)
    assert_equal_verifications(Verification(other), Verification(mine.model), random_tree(5, "random"))


def test_save_pretrained_after_fusing_writes_the_same_model(tmp_path):
    model = attached()
    fuse_projections(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert sum(f.stat().st_size for f in tmp_path.glob("*.safetensors")) < 1.1 * sum(
        p.numel() * 4 for p in model.parameters()
    )


def test_torch_save_of_a_fused_state_dict_loads_into_a_stock_model(tmp_path):
    model = tiny_random_model()
    fuse_projections(model)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    stock = tiny_random_model(seed=1)
    stock.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())


def test_groups_that_cannot_be_one_product_are_left_alone():
    model = tiny_random_model()
    layers = model.model.layers
    layers[0].linear_attn.in_proj_b.double()  # dtypes differ
    layers[1].linear_attn.in_proj_z.bias = torch.nn.Parameter(torch.zeros(64))  # one bias among none
    layers[2].mlp.gate_proj.register_forward_pre_hook(lambda m, args: None)
    layers[3].self_attn.q_proj.to("meta")  # offloaded
    layers[0].mlp.up_proj = torch.nn.utils.parametrizations.orthogonal(layers[0].mlp.up_proj)
    assert fuse_projections(model) == 3
    fused_now = [joined(linears) is not None for linears in groups(model)]
    assert fused_now == [False, False, False, True, True, False, False, True]


def test_neighbours_in_memory_that_are_not_one_tensor_are_not_joined():
    whole = torch.randn(6, 4)
    linears = [torch.nn.Linear(4, 2, bias=False) for _ in range(3)]
    for i, linear in enumerate(linears):
        linear.weight.data = whole[2 * i : 2 * i + 2]
    assert torch.equal(joined(linears)[0], whole)
    assert joined([linears[0], linears[2]]) is None  # a gap
    assert joined([linears[1], linears[0]]) is None  # the wrong order
    linears[1].weight.data = whole[2:4].clone()
    assert joined(linears) is None


def test_training_a_fused_model_moves_the_shared_memory():
    model = tiny_random_model()
    with torch.inference_mode():
        fuse_projections(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [joined(linears)[0].clone() for linears in groups(model)]
    model(prompt_ids(), labels=prompt_ids()).loss.backward()
    optimizer.step()
    for linears, old in zip(groups(model), before):
        new, _ = joined(linears)
        assert not torch.equal(new, old)
        assert torch.equal(new, torch.cat([m.weight for m in linears]))
