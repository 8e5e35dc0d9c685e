"""Tree attention, chosen call by call."""

import threading

import pytest
import torch
from support import prompt_ids, tiny_random_model

from weaver_hf import WeaverConfig, WeaverModel


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_plain_forwards_of_another_thread_are_untouched_while_a_tree_is_verified(attention):
    """A switch of the shared config for the time of a verification once gave them wrong logits."""
    model = tiny_random_model(attention)
    weaver = WeaverModel(WeaverConfig()).attach(model)
    ids, mask = prompt_ids(24), torch.tensor([[0] * 3 + [1] * 21])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    wrong, stop = [], threading.Event()

    def forwards():
        while not stop.is_set():
            with torch.no_grad():
                wrong.append(not torch.allclose(model(ids, attention_mask=mask).logits, expected, atol=1e-4))

    thread = threading.Thread(target=forwards)
    thread.start()
    try:
        for _ in range(3):
            model.generate(prompt_ids(), max_new_tokens=40, do_sample=False, assistant_model=weaver)
    finally:
        stop.set()
        thread.join()
    assert len(wrong) > 5
    assert not any(wrong)


def test_without_a_tree_the_attached_module_runs_the_models_own_implementation():
    for attention in ("sdpa", "eager"):
        stock, model = tiny_random_model(attention), tiny_random_model(attention)
        WeaverModel(WeaverConfig()).attach(model)
        with torch.no_grad():
            assert torch.equal(model(prompt_ids()).logits, stock(prompt_ids()).logits)
        assert model.config._attn_implementation == attention
