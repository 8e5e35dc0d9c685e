"""A conversation in the terminal: streamed, and each turn goes on from the cache that the last one returned.

    python examples/chat.py --target Qwen/Qwen3.5-4B --weaver z-lab/Qwen3.5-4B-DFlash --system "Be brief."

An empty line ends it. The conversation is its tokens: a turn is appended as the chat template writes it behind an
answer, and nothing before it is written anew, so the whole cache stays valid (the template of a thinking model would
drop old thoughts, and the recurrent state of a hybrid cannot be wound back to there).
"""

from dataclasses import dataclass
from typing import Any

import torch
from generate import arguments, load
from transformers import TextStreamer

from weaver_hf import WeaverModel
from weaver_hf.target.compat import CACHE_KEY

MARK = "<answer>"  # stands for an answer while the template writes what comes behind one


@dataclass
class Chat:
    """A conversation so far: its tokens `[1, L]`, and the cache of all but the last of them."""

    model: Any
    tokenizer: Any
    weaver: WeaverModel
    system: str | None = None
    tokens: torch.Tensor | None = None
    cache: Any = None

    def ask(self, question: str, max_new_tokens: int, streamer: Any = None) -> str:
        """The answer; `weaver.stats` is about it."""
        new = self.tokenizer(self.turn(question), return_tensors="pt", add_special_tokens=False).input_ids
        new = new.to(self.model.device)
        ids = new if self.tokens is None else torch.cat([self.tokens, new], 1)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.weaver,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            return_dict_in_generate=True,
            **{CACHE_KEY: self.cache},
        )
        self.tokens, self.cache = output.sequences, output[CACHE_KEY]
        return self.tokenizer.decode(self.tokens[0, ids.shape[1] :], skip_special_tokens=True)

    def turn(self, question: str) -> str:
        """A user's turn and the opening of the answer, as the chat template writes them here."""
        messages = [{"role": "user", "content": question}]
        if self.tokens is None:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            return self.write([*system, *messages])
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        behind = self.write([*before, *messages]).partition(MARK)[2]
        # An answer that was ended, and not cut, has written the end of its turn itself.
        return behind.removeprefix(self.tokenizer.decode(self.tokens[0, -1:]))

    def write(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--system", help="the system's message")
    options = parser.parse_args()
    model, tokenizer, weaver = load(options)
    chat = Chat(model, tokenizer, weaver, options.system)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    while question := input("> "):
        held = 0 if chat.cache is None else chat.cache.get_seq_length()
        chat.ask(question, options.max_new_tokens, streamer)
        stats = weaver.stats
        assert stats is not None
        print(f"[{stats.new_tokens} tokens in {stats.target_passes} passes; {held} tokens were in the cache]")


if __name__ == "__main__":
    main()
