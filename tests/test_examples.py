"""The scripts in examples/: one text, a conversation, the endpoint under the real client, several processes."""

import http.client
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import generate
import pytest
import torch
from chat import Chat

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMPT = "def read_lines(path):\n"


def greedy(trio, prompt, **options):
    """What `generate` writes: the token ids and their text."""
    model, tokenizer, weaver = trio
    inputs = tokenizer(prompt, return_tensors="pt") if isinstance(prompt, str) else prompt
    output = model.generate(**inputs, assistant_model=weaver, **{"do_sample": False, **options})
    new = output[0, inputs["input_ids"].shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


def asked(trio, text):
    return trio[1].apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)


# ---- generate.py ----


@pytest.mark.parametrize("more", [[], ["--stream"], ["--chat"]], ids=["whole", "stream", "chat"])
def test_generate_prints_the_text_and_the_passes(trio, monkeypatch, capsys, more):
    monkeypatch.setattr(sys, "argv", ["generate.py", PROMPT, "--max-new-tokens", "12", *more])
    generate.main()
    new, text = greedy(trio, asked(trio, PROMPT) if "--chat" in more else PROMPT, max_new_tokens=12)
    printed = capsys.readouterr().out
    assert printed.startswith(text)
    assert f"[{len(new)} tokens in" in printed


# ---- chat.py ----


@pytest.mark.parametrize("limit", [40, 3], ids=["ended", "cut"])
def test_a_second_turn_writes_what_the_whole_conversation_would_and_reads_the_new_turn_alone(trio, limit):
    _, tokenizer, _ = trio
    chat = Chat(*trio, system="Be kind.")
    first = chat.ask("Hello!", limit)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (chat.tokens[0, -1] == end) == (limit == 40), "the model ends its answer within 40 tokens, not within 3"
    held = chat.cache.get_seq_length()
    assert held == chat.tokens.shape[1] - 1
    second = chat.ask("And you?", 8)
    turns = [
        {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": first}, {"role": "user", "content": "And you?"},
    ]  # fmt: skip
    whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert second == greedy(trio, whole, max_new_tokens=8)[1]
    assert tokenizer.decode(chat.tokens[0]).startswith(whole)
    assert chat.cache.get_seq_length() > held


# ---- serve.py ----


@pytest.fixture(scope="module")
def server(trio):
    serve = pytest.importorskip("serve")
    server = serve.Server(serve.Engine(*trio, "tiny", 16))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def engine(server):
    return server.RequestHandlerClass.engine


@pytest.fixture
def jobs(engine, monkeypatch):
    """The requests that arrive, as the engine queues them."""
    seen, read = [], engine.job

    def job(*args, **kwargs):
        seen.append(read(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(engine, "job", job)
    return seen


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def wait(condition, seconds=30):
    end = monotonic() + seconds
    while not condition():
        assert monotonic() < end, "waited in vain"
        sleep(0.02)


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_completion_is_what_generate_writes(client, trio):
    new, text = greedy(trio, PROMPT, max_new_tokens=20)
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == len(new)
    ids = trio[1](PROMPT).input_ids
    assert answer.usage.prompt_tokens == len(ids)
    assert client.completions.create(model="tiny", prompt=ids, max_tokens=20).choices[0].text == text
    default = client.completions.create(model="tiny", prompt=PROMPT)
    assert default.usage.completion_tokens == 16, "the server's own limit"


@pytest.mark.parametrize("sampling", [{"temperature": 1.0, "top_p": 0.7}, {"top_p": 0.9}], ids=str)
def test_a_seed_gives_the_text_of_generate_under_that_seed(client, trio, sampling):
    torch.manual_seed(7)
    _, text = greedy(trio, "Once upon", max_new_tokens=16, do_sample=True, **sampling)
    create = {"model": "tiny", "prompt": "Once upon", "max_tokens": 16, **sampling}
    assert client.completions.create(**create, seed=7).choices[0].text == text
    assert client.completions.create(**create).choices[0].text != text, "without a seed every text is another one"


def test_a_streamed_chat_arrives_in_pieces_that_make_up_the_whole(client, trio):
    question = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    create = {"model": "tiny", "messages": question, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**create)
    new, text = greedy(trio, asked(trio, "Hello!"), max_new_tokens=40)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop", "by the end of the turn"
    chunks = list(client.chat.completions.create(**create, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(new) == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_the_text_and_no_part_of_it_is_sent(client, trio):
    new, text = greedy(trio, PROMPT, max_new_tokens=32)
    stop = text[31:38]  # across tokens, and long enough to have a beginning that must be held back
    create = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "stop": ["@@@", stop]}
    answer = client.completions.create(**create)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < len(new)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**create, stream=True)]
    assert "".join(pieces) == text[: text.index(stop)]
    almost = client.completions.create(**{**create, "stop": text[-3:] + "@"})
    assert almost.choices[0].text == text, "what only began like a stop string is sent in the end"


def test_characters_of_several_tokens_arrive_whole(client, trio):
    prompt = "naïve – 漢字 ☃ naïve – 漢字 ☃ naïve – 漢字 ☃ naïve –"
    _, text = greedy(trio, prompt, max_new_tokens=12)
    chunks = client.completions.create(model="tiny", prompt=prompt, max_tokens=12, stream=True)
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces[:-2]) or "\ufffd" in text


def test_two_clients_at_once_are_served_in_the_order_they_came(client, trio, jobs):
    prompts, answers, order = ["Once upon a time", PROMPT], {}, []

    def ask(prompt):
        answers[prompt] = client.completions.create(model="tiny", prompt=prompt, max_tokens=24).choices[0].text
        order.append(prompt)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait(lambda number=number: len(jobs) == number)
    for thread in threads:
        thread.join(60)
    assert order == prompts
    assert answers == {prompt: greedy(trio, prompt, max_new_tokens=24)[1] for prompt in prompts}


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_stops_its_text_and_the_next_one_is_served(server, client, jobs, streamed):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    body = {"prompt": "Once upon a time", "max_tokens": 3000, "stream": streamed}
    connection.request("POST", "/v1/completions", json.dumps(body))
    if streamed:
        assert b"data: " in connection.getresponse().readline()
    wait(lambda: jobs and jobs[0].completion_tokens > 0)
    queued = http.client.HTTPConnection("127.0.0.1", server.server_port)
    queued.request("POST", "/v1/completions", json.dumps({**body, "prompt": PROMPT}))
    wait(lambda: len(jobs) == 2)
    queued.close()
    wait(lambda: jobs[1].left.is_set())
    connection.close()
    assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3).usage.completion_tokens == 3
    assert 0 < jobs[0].completion_tokens < 3000
    assert jobs[1].completion_tokens == 0, "nobody waits for it any more"


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "gpt-5"}, 404, "'gpt-5' is not here"),
        ({"n": 2}, 400, "n=2"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"temperature": -1}, 400, "temperature=-1"),
        ({"top_p": 0}, 400, "top_p=0"),
        ({"stop": [""]}, 400, "stop"),
        ({"prompt": ""}, 400, "0 tokens"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": [5] * 5000}, 400, "5000 tokens"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_by_name(client, change, status, message):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **change})
    assert refused.value.status_code == status
    assert message in str(refused.value)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_error_while_writing_reaches_its_client_alone(client, trio, monkeypatch, streamed):
    openai = pytest.importorskip("openai")
    with monkeypatch.context() as patch:
        patch.setattr(trio[2].tree_config, "builder", "oak")
        with pytest.raises(openai.APIError, match="oak"):
            list(client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, stream=streamed))
    assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4).usage.completion_tokens == 4


# ---- multi_gpu.py ----


@pytest.mark.slow
@pytest.mark.once
def test_two_processes_write_what_one_writes_in_the_order_of_the_prompts(tmp_path):
    (tmp_path / "prompts.txt").write_text("Once upon a time\ndef f(x):\nTom has 3\n")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(processes):
        out = tmp_path / f"{processes}.jsonl"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        script = [EXAMPLES / "multi_gpu.py", tmp_path / "prompts.txt", "--out", out, "--temperature", "1"]
        command = [sys.executable, *launch, *map(str, script), "--max-new-tokens", "12"]
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=300)
        return [json.loads(line) for line in out.read_text().splitlines()]

    one, two = run(1), run(2)
    assert [row["prompt"] for row in two] == ["Once upon a time", "def f(x):", "Tom has 3"]
    assert [row["text"] for row in two] == [row["text"] for row in one]
    assert [row["process"] for row in two] == [0, 0, 1]
