"""A pytest plugin that runs transformers' own generation tests against the embedded model with a Weaver attached.

    PYTHONPATH=.:kernels:tests/upstream python -m pytest -p attached -p no:cacheprovider --noconftest -c /dev/null \
        --rootdir TRANSFORMERS TRANSFORMERS/tests/generation/test_streamers.py

`TRANSFORMERS` is a checkout of its repository: the released packages do not hold `tests/generation`. Whatever model a
test loads, it gets the embedded one, and whatever it calls `generate` with, the Weaver assists. Which tests apply, and
what they gave: `tests/UPSTREAM.md`.
"""

import copy
import functools
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from weaver_hf import load_tiny


@functools.cache
def _trio() -> Any:
    return load_tiny()


def _model(*args: Any, **kwargs: Any) -> Any:
    """A copy of the embedded model, attached: tests change configs."""
    _, tokenizer, weaver = _trio()
    model, weaver = copy.deepcopy(_trio()[0]), copy.deepcopy(weaver)
    weaver.attach(model)
    model.config.bos_token_id = tokenizer.convert_tokens_to_ids("<|im_start|>")  # a special token for a test that asks
    stock = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **{**kwargs, "assistant_model": weaver})

    model.generate = generate
    return model


def _tokenizer(*args: Any, **kwargs: Any) -> Any:
    return copy.deepcopy(_trio()[1])


@pytest.fixture(autouse=True)
def _embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    _trio()  # with the real classes
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", _model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", _tokenizer)
