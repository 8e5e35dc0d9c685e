"""Streamers of transformers behind the assistant: they get whole runs of tokens and must say what stock says."""

import asyncio
import threading

import pytest
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

PROMPT = "Once upon a time"
OPTIONS = {"max_new_tokens": 14, "do_sample": False}


@pytest.fixture
def call(trio):
    """`call(streamer, assisted)` decodes PROMPT into it."""
    model, tokenizer, weaver = trio
    inputs = tokenizer(PROMPT, return_tensors="pt")
    return lambda streamer, assisted=True: model.generate(
        **inputs, **OPTIONS, streamer=streamer, **({"assistant_model": weaver} if assisted else {})
    )


@pytest.fixture
def new_text(trio, call):
    _, tokenizer, weaver = trio
    sequences = call(None)
    assert weaver.stats.tokens_per_step > 1.5, "runs of several tokens are what is tested here"
    return tokenizer.decode(sequences[0, len(tokenizer(PROMPT).input_ids) :])


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_a_text_streamer_prints_what_it_prints_without_the_assistant(trio, call, capsys, skip_prompt):
    printed = []
    for assisted in (False, True):
        call(TextStreamer(trio[1], skip_prompt=skip_prompt), assisted)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith(PROMPT) != skip_prompt


def test_a_text_iterator_in_a_thread_yields_the_text_and_ends(trio, call, new_text):
    streamer = TextIteratorStreamer(trio[1], skip_prompt=True, timeout=60)
    thread = threading.Thread(target=call, args=(streamer,))
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == new_text
    assert len(pieces) > 2, "handed over as it was written, not at the end"


def test_an_async_text_iterator_yields_the_text_and_ends(trio, call, new_text):
    async def read():
        streamer = AsyncTextIteratorStreamer(trio[1], skip_prompt=True, timeout=60)
        thread = threading.Thread(target=call, args=(streamer,))
        thread.start()
        pieces = [piece async for piece in streamer]
        thread.join()
        return pieces

    pieces = asyncio.run(read())
    assert "".join(pieces) == new_text
    assert len(pieces) > 2


def test_special_tokens_are_the_streamers_business(trio, call):
    model, tokenizer, weaver = trio
    inputs = tokenizer("<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n", return_tensors="pt")
    texts = []
    for assistant in ({}, {"assistant_model": weaver}):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
        out = model.generate(**inputs, **OPTIONS, streamer=streamer, **assistant)
        texts.append("".join(streamer))
    assert texts[0] == texts[1] == tokenizer.decode(out[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
