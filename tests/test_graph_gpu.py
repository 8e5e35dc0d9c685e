"""The captured step on a GPU, against stock on the same card."""

import gc

import pytest
import torch
from support import bench_prompts
from transformers import AutoModelForCausalLM

from weaver_hf import WeaverModel, graph
from weaver_hf.bench.shapes import random_pair
from weaver_hf.target.attach import attachment_of
from weaver_hf.tiny import TARGET, WEAVER
from weaver_kernels import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
WAYS = (("suffix", 15), ("chain", 15), ("marginal", 31), ("weaver", 63), ("weaver-paper", 63), ("weaver", 0))


def pair(dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype, device_map="cuda")
    return model, WeaverModel.from_pretrained(WEAVER).attach(model)


def decode(model, ids, **options):
    return model.generate(ids.cuda(), **{"max_new_tokens": 80, "do_sample": False, **options})


@pytest.fixture
def never_eager(monkeypatch):
    """Falling back would make these tests say nothing."""

    def checkout(*args, **kwargs):
        step = original(*args, **kwargs)
        assert step is not None, graph._said
        return step

    original = graph.checkout
    monkeypatch.setattr("weaver_hf.generation.checkout", checkout)


@pytest.mark.usefixtures("never_eager")
def test_captured_text_equals_stocks_in_fp32():
    model, weaver = pair()
    for index in range(3, 210, 30):
        ids = bench_prompts()[index][1]
        stock = decode(model, ids)
        for weaver.tree_config.builder, weaver.tree_config.budget in WAYS:
            assert torch.equal(decode(model, ids, assistant_model=weaver), stock), (index, weaver.tree_config.builder)


@pytest.mark.usefixtures("never_eager")
@pytest.mark.parametrize("options", [{"top_k": 0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}, {"min_p": 0.05}])
def test_captured_sampling_does_not_depend_on_the_builder(options):
    model, weaver = pair()
    texts = set()
    for weaver.tree_config.builder, weaver.tree_config.budget in WAYS:
        torch.manual_seed(3)
        text = decode(model, bench_prompts()[95][1], assistant_model=weaver, **{**options, "do_sample": True})
        texts.add(tuple(text[0].tolist()))
    assert len(texts) == 1


@pytest.mark.usefixtures("never_eager")
def test_two_attached_models_and_attaching_again():
    ids = bench_prompts()[3][1]
    (one, first), (two, second) = pair(), pair()
    stock = decode(one, ids)
    assert torch.equal(decode(one, ids, assistant_model=first), stock)
    assert torch.equal(decode(two, ids, assistant_model=second), stock)
    assert torch.equal(decode(one, ids, assistant_model=first), stock)
    first.detach()
    assert torch.equal(decode(one, ids), stock)
    first.attach(one)
    assert torch.equal(decode(one, ids, assistant_model=first), stock)


@pytest.mark.usefixtures("never_eager")
def test_a_thousand_steps_do_not_grow_the_memory():
    model, weaver = pair(torch.bfloat16)
    weaver.tree_config.builder, weaver.tree_config.budget = "chain", 7
    options = {"assistant_model": weaver, "eos_token_id": 8191, "max_new_tokens": 120}
    steps, after = 0, []
    while steps < 1000:
        decode(model, bench_prompts()[3][1], **options)
        steps += weaver.stats.steps
        weaver.stats = None
        gc.collect()
        after.append(torch.cuda.memory_allocated())
    assert after[-1] == after[1], after


@pytest.mark.parametrize("shape", ["9b", "27b"])
def test_a_random_model_of_a_published_shape_writes_what_plain_torch_writes(shape):
    """In fp32: kernels and fused layers against the reference; few layers, so that fp32 fits."""
    model, weaver = random_pair(shape, "cuda", torch.float32, num_hidden_layers=8)
    weaver.tree_config.budget = 31
    ids = torch.randint(2, 200_000, (1, 100), generator=torch.Generator().manual_seed(0))
    kernels = decode(model, ids, assistant_model=weaver)
    assert attachment_of(model).steps
    attachment_of(model).steps.clear()
    with dispatch.forced("reference"):
        plain = decode(model, ids, assistant_model=weaver)
    assert torch.equal(kernels, plain)
