"""An OpenAI-compatible endpoint for one model on one machine; needs nothing that weaver_hf does not.

    python examples/serve.py --target Qwen/Qwen3.5-4B --weaver z-lab/Qwen3.5-4B-DFlash --port 8000
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 32, "stream": true}'

`/v1/models`, `/v1/chat/completions` and `/v1/completions`, whole or streamed, with `max_tokens`, `temperature`,
`top_p`, `seed`, `stop` and usage. What a request leaves out is as in `generate`: the model's own generation config. The
model writes one text at a time, first come, first served; a client that leaves stops its text, or gives up its place.
(`transformers serve` takes no assistant, in 5.17 and in 5.24.) No access control: it listens on this machine alone
unless --host says otherwise.
"""

import json
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from generate import arguments, load
from transformers import StoppingCriteria, StoppingCriteriaList

from weaver_hf import WeaverModel
from weaver_hf.errors import WeaverError

# Accepted at these values, which ask for nothing; refused at any other.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},),
    "logprobs": (False, 0), "echo": (False,), "tools": ([],), "response_format": ({"type": "text"},),
}  # fmt: skip
READ = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop"}
READ |= {"stream", "stream_options", "user", "store", "metadata"}  # the last three are about the client


class RequestError(Exception):
    """A request that cannot be served: `message`, the parameter at fault, and an HTTP status."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(eq=False)
class Job(StoppingCriteria):
    """One request on its way through the queue; `generate` asks it after every token whether to stop.

    Attributes:
        ids: the prompt, int64 `[1, L]`.
        options: for `generate`.
        stops: strings that end the text and are left out of it.
        left: set when the client has gone.
        pieces: what the client is to see, piece by piece; None at the end, or the error that ended it.
        finish: "stop" or "length", once it is over.
    """

    tokenizer: Any
    ids: torch.Tensor
    options: dict[str, Any]
    stops: list[str]
    seed: int
    left: threading.Event = field(default_factory=threading.Event)
    pieces: "queue.SimpleQueue[str | Exception | None]" = field(default_factory=queue.SimpleQueue)
    completion_tokens: int = 0
    finish: str = "length"
    _text: str = ""  # whole characters so far
    _sent: int = 0
    _read: int = 0  # tokens behind the prompt whose text is in `_text`
    _from: int = 0  # where their last piece began: a token's text can depend on the one before it

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = input_ids[0, self.ids.shape[1] :].tolist()
        self.completion_tokens = len(new)
        before, now = self._decode(new[self._from : self._read]), self._decode(new[self._from :])
        if not now.endswith("\ufffd"):  # half a character: wait for the rest
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(new)
        ends = [end for stop in self.stops if (end := self._text.find(stop, max(self._sent - len(stop), 0))) >= 0]
        if ends:
            self._text, self.finish = self._text[: min(ends)], "stop"
        held = 0 if ends else max((_overlap(self._text, stop) for stop in self.stops), default=0)
        self._send(len(self._text) - held)
        return torch.tensor([bool(ends) or self.left.is_set()], device=input_ids.device)

    def close(self, new: list[int], ended: bool) -> None:
        """Send what was held back; `ended`: by a token that ends texts."""
        if self.finish == "length":
            self._text += self._decode(new[self._from :])[len(self._decode(new[self._from : self._read])) :]
            self.finish = "stop" if ended else "length"
        self._send(len(self._text))

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _send(self, end: int) -> None:
        if end > self._sent:
            self.pieces.put(self._text[self._sent : end])
            self._sent = end


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which `stop` could begin."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Engine:
    """The model and its queue: one thread writes one text after another."""

    def __init__(self, model: Any, tokenizer: Any, weaver: WeaverModel, name: str, max_new_tokens: int) -> None:
        self.model, self.tokenizer, self.weaver, self.name = model, tokenizer, weaver, name
        self.max_new_tokens = max_new_tokens
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.created, self.threads = int(time.time()), torch.get_num_threads()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        torch.set_num_threads(self.threads)  # counts for one thread of Python alone
        while True:
            job = self.jobs.get()
            try:
                if not job.left.is_set():
                    self._write(job)
                job.pieces.put(None)
            except Exception as error:  # of this request: the next one is not to suffer from it
                job.pieces.put(error)

    def _write(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        ids = job.ids.to(self.model.device)
        start = time.perf_counter()
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.weaver,
            stopping_criteria=StoppingCriteriaList([job]),
            **job.options,
        )
        new = output[0, ids.shape[1] :].tolist()
        eos = self.model.generation_config.eos_token_id
        job.close(new, ended=bool(new) and new[-1] in (eos if isinstance(eos, list) else [eos]))
        seconds, passes = time.perf_counter() - start, self.weaver.stats.target_passes if self.weaver.stats else 0
        print(f"{len(new)} tokens, {passes} passes, {seconds:.2f} s, {job.finish}", file=sys.stderr, flush=True)

    def job(self, request: dict[str, Any], chat: bool) -> Job:
        """Read a request.

        Raises:
            RequestError: names what cannot be served.
        """
        for name, value in request.items():
            if name not in READ and value is not None and value not in NEUTRAL.get(name, ()):
                raise RequestError(f"{name}={value!r} is not supported; leave it out.", name)
        if request.get("model") not in (None, self.name):
            raise RequestError(f"The model {request['model']!r} is not here; {self.name!r} is.", "model", 404)
        ids = self._chat(request.get("messages")) if chat else self._prompt(request.get("prompt"))
        limit = number(request, "max_completion_tokens", 1, int) or number(request, "max_tokens", 1, int)
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", 2**31) - ids.shape[1]
        if ids.shape[1] == 0 or room <= 0:
            raise RequestError(f"Found a prompt of {ids.shape[1]} tokens; expected 1 to {ids.shape[1] + room - 1}.")
        options: dict[str, Any] = {"max_new_tokens": min(limit or self.max_new_tokens, room)}
        temperature, top_p = number(request, "temperature", 0, float), number(request, "top_p", 0, float)
        if temperature == 0:
            options["do_sample"] = False
        elif temperature is not None or top_p is not None:
            options["do_sample"] = True
            options |= {k: v for k, v in (("temperature", temperature), ("top_p", top_p)) if v is not None}
        stops = request.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"Found stop={stops!r}; expected a string or a list of strings.", "stop")
        seed = number(request, "seed", None, int)
        return Job(self.tokenizer, ids, options, stops, secrets.randbits(63) if seed is None else seed % 2**63)

    def _chat(self, messages: Any) -> torch.Tensor:
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise RequestError("Found no list of messages.", "messages")
        if not self.tokenizer.chat_template:
            raise RequestError(f"{self.name} has no chat template; use /v1/completions.", "messages")
        plain = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list) and all(
                isinstance(part, dict) and part.get("type") == "text" for part in content
            ):
                content = "".join(str(part.get("text", "")) for part in content)
            if not isinstance(content, str):
                raise RequestError(f"Found content {content!r}; expected text.", "messages")
            plain.append({**message, "content": content})
        text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids

    def _prompt(self, prompt: Any) -> torch.Tensor:
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self.tokenizer(prompt, return_tensors="pt").input_ids.long()
        if isinstance(prompt, list) and all(isinstance(i, int) and 0 <= i < len(self.tokenizer) for i in prompt):
            return torch.tensor([prompt], dtype=torch.long)
        raise RequestError("Found a prompt that is neither a text nor a list of token ids.", "prompt")


def number(request: dict[str, Any], name: str, least: float | None, kind: type) -> Any:
    """A number of the request, None where it is left out."""
    value = request.get(name)
    if value is None:
        return None
    right = isinstance(value, int | kind) and not isinstance(value, bool)
    if not right or (least is not None and value < least) or (name == "top_p" and not 0 < value <= 1):
        raise RequestError(f"Found {name}={value!r}; expected a number in its range.", name)
    return value


class Handler(BaseHTTPRequestHandler):
    """One request: its own thread, which waits for the engine's pieces and watches the client."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        """The engine logs what it writes."""

    def do_GET(self) -> None:
        model = {"id": self.engine.name, "object": "model", "created": self.engine.created, "owned_by": "local"}
        if self.path == "/v1/models":
            self.answer({"object": "list", "data": [model]})
        elif self.path == f"/v1/models/{self.engine.name}":
            self.answer(model)
        else:
            self.fail(RequestError(f"There is nothing at {self.path}.", status=404))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.path not in ("/v1/chat/completions", "/v1/completions"):
                raise RequestError(f"There is nothing at {self.path}.", status=404)
            try:
                request = json.loads(body)
            except ValueError as error:
                raise RequestError(f"The body is no JSON: {error}.") from error
            if not isinstance(request, dict):
                raise RequestError("The body is no JSON object.")
            job = self.engine.job(request, chat="chat" in self.path)
        except RequestError as error:
            self.fail(error)
            return
        self.engine.jobs.put(job)
        try:
            self.stream(job, request) if request.get("stream") else self.whole(job)
        except OSError:  # the client has gone
            self.close_connection = True
        except Exception as error:
            self.fail(RequestError(str(error), status=400 if isinstance(error, WeaverError) else 500))
        finally:
            job.left.set()

    def pieces(self, job: Job) -> Iterator[str]:
        """What the engine writes, while the client is there.

        Raises:
            ConnectionError: it is not.
        """
        while True:
            try:
                piece = job.pieces.get(timeout=0.1)
            except queue.Empty:
                piece = ""
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                return
            if piece:
                yield piece
            elif select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionError("the client has closed the connection")

    def whole(self, job: Job) -> None:
        text = "".join(self.pieces(job))
        chat = "chat" in self.path
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        self.answer(self.frame("", [{"index": 0, **said, "finish_reason": job.finish}], usage=usage(job)))

    def stream(self, job: Job, request: dict[str, Any]) -> None:
        chat, told = "chat" in self.path, bool((request.get("stream_options") or {}).get("include_usage"))
        frame = self.frame(".chunk" if chat else "", [], **({"usage": None} if told else {}))

        def event(piece: dict[str, Any] | str, finish: str | None = None) -> None:
            choice = {"index": 0, **({"delta": piece} if chat else {"text": piece}), "finish_reason": finish}
            self.send({**frame, "choices": [choice]})

        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")  # its end is the end of the stream
        self.end_headers()
        try:
            if chat:
                event({"role": "assistant", "content": ""})
            for piece in self.pieces(job):
                event({"content": piece} if chat else piece)
            event({} if chat else "", job.finish)
            if told:
                self.send({**frame, "usage": usage(job)})
        except OSError:
            raise
        except Exception as error:  # too late for a status
            self.send({"error": {"message": str(error), "type": "server_error"}})
        self.wfile.write(b"data: [DONE]\n\n")

    def frame(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        chat = "chat" in self.path
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"chat.completion{kind}" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.engine.name,
            "choices": choices,
            **more,
        }

    def send(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def answer(self, data: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, error: RequestError) -> None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        said = {"message": str(error), "type": kind, "param": error.param, "code": None}
        self.answer({"error": said}, error.status)


def usage(job: Job) -> dict[str, int]:
    prompt, new = job.ids.shape[1], job.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class Server(ThreadingHTTPServer):
    """Listens; `server_port` is the port, also where 0 was asked for."""

    daemon_threads = True

    def __init__(self, engine: Engine, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__((host, port), type("EngineHandler", (Handler,), {"engine": engine}))

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave at any time
            super().handle_error(request, client_address)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--name", help="of the model, for clients; by default the target's")
    options = parser.parse_args()
    name = options.name or (Path(options.target).name if Path(options.target).exists() else options.target)
    server = Server(Engine(*load(options), name, options.max_new_tokens), options.host, options.port)
    print(f"{name} at http://{options.host}:{server.server_port}/v1", file=sys.stderr, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
