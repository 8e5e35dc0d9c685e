"""The attention implementation `weaver_tree`."""

import pytest
import torch
from support import prompt_ids, tiny_random_model

from weaver_hf.target.attention import tree_attention


def test_a_plain_forward_under_it_equals_sdpa():
    """Another thread may run a plain forward while a verification has the implementation switched."""
    model, ids = tiny_random_model(), prompt_ids(7)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        for attention_mask in (None, mask):
            expected = model(ids, attention_mask=attention_mask).logits[:, 2:]
            with tree_attention(model):
                torch.testing.assert_close(model(ids, attention_mask=attention_mask).logits[:, 2:], expected)


def test_the_implementation_comes_back_after_an_error():
    model = tiny_random_model("eager")
    with pytest.raises(RuntimeError), tree_attention(model):
        assert model.config._attn_implementation == "weaver_tree"
        raise RuntimeError
    assert model.config._attn_implementation == "eager"
