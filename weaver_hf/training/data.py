"""Training data: prompts cut from text, completed by the target itself.

A drafter must predict what its target writes, so the text is the target's own, at a mix of temperatures. On disk a data
set is a folder of safetensors shards (one a batch) and `data.json`, which says how it was made and for which tokenizer.
"""

import hashlib
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..bench.harness import load_prompts, loop_onset
from ..errors import WeaverError

__all__ = [
    "DataConfig",
    "TrainingDataError",
    "describe_data",
    "load_data",
    "make_data",
    "read_documents",
    "tokenizer_fingerprint",
]

ANSWER = "<|im_start|>assistant\n"  # opens an answer in ChatML
OVERLAP = 13  # a prompt that shares this many tokens in a row with a bench prompt is dropped


class TrainingDataError(WeaverError, ValueError):
    """Training text or a data set that cannot be used."""


@dataclass
class DataConfig:
    """How a data set is made.

    Attributes:
        sequences: how many completions.
        prompt_tokens: smallest and largest length of a prompt cut from a long document.
        own_share: share of prompts that the target writes itself: a few tokens of text, then `own_tokens` drawn at
            temperature 1. What it has learned by heart is too easy to draft for, and the text it was trained on is
            mostly that; a drafter that sees nothing else does badly on new text.
        own_tokens: smallest and largest number of those tokens.
        ask_share: share of the prompts cut from plain text that are asked as a user's turn, where the tokenizer has a
            chat template: a chat model is asked about everything, not only what its chats were about.
        max_new_tokens: of each completion.
        temperatures: (temperature, share) pairs; greedy completions are cut where they start to loop.
        batch_size: sequences generated at once, of similar prompt lengths.
    """

    sequences: int = 1024
    prompt_tokens: tuple[int, int] = (32, 192)
    own_share: float = 0.7
    own_tokens: tuple[int, int] = (48, 160)
    ask_share: float = 0.4
    max_new_tokens: int = 256
    temperatures: tuple[tuple[float, float], ...] = ((1.0, 0.45), (0.7, 0.20), (0.0, 0.35))
    batch_size: int = 256
    seed: int = 0


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary, token by token: two tokenizers of one size are not taken for each other."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def read_documents(paths: Sequence[Path]) -> list[str]:
    """Documents of text files (`.xz` is unpacked), separated by NUL characters.

    Raises:
        TrainingDataError: no text in them, or something else than text.
    """
    documents = []
    for path in paths:
        raw = path.read_bytes()
        try:
            text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
        except (lzma.LZMAError, UnicodeDecodeError) as error:
            raise TrainingDataError(
                f"a file {path} that is no text ({error})",
                "UTF-8 text, packed where it ends in .xz",
                "Give other files.",
            ) from error
        documents += [document for document in text.split("\0") if document.strip()]
    if not documents:
        raise TrainingDataError(
            f"no text in {', '.join(map(str, paths))}",
            "UTF-8 text, documents separated by NUL characters",
            "Give other files.",
        )
    return documents


def cut_prompts(documents: Sequence[str], tokenizer: Any, config: DataConfig) -> tuple[list[list[int]], int]:
    """Prompts as token lists, and how many were dropped because they overlap with the bench prompts.

    A chat document is cut before the assistant's turn, any other at a random place; half of the prompts come from each
    kind where both are there.

    Raises:
        TrainingDataError: no document is long enough.
    """
    rng = random.Random(config.seed)
    chats = [document for document in documents if ANSWER in document]
    others = [document for document in documents if ANSWER not in document]
    weights = [len(document) for document in others]
    forbidden = bench_ngrams(tokenizer)
    prompts: list[list[int]] = []
    dropped = tries = 0
    low, high = config.prompt_tokens
    while len(prompts) < config.sequences:
        tries += 1
        if tries > 20 * config.sequences + 1000:
            raise TrainingDataError(
                f"{len(prompts)} usable prompts in {len(documents)} documents",
                f"{config.sequences} prompts of at least {low} tokens that are not bench prompts",
                "Give more or longer text, or lower the number of sequences.",
            )
        if chats and (not others or rng.random() < 0.5):
            document = rng.choice(chats)
            turns = document.split(ANSWER)
            turn = rng.randrange(1, len(turns))
            ids = tokenizer(ANSWER.join(turns[:turn]) + ANSWER).input_ids
        else:
            document = rng.choices(others, weights)[0]
            start = rng.randrange(max(len(document) - 4 * low, 1))
            ids = tokenizer(document[start : start + 8 * high]).input_ids[: rng.randint(low, high)]
            if len(ids) < low:
                continue
            if tokenizer.chat_template and rng.random() < config.ask_share:
                question = tokenizer.decode(ids[: rng.randint(8, len(ids))], skip_special_tokens=True).strip()
                turn_text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
                )
                ids = tokenizer(turn_text).input_ids
        if len(ids) > 2 * high:
            continue
        if any(tuple(ids[i : i + OVERLAP]) in forbidden for i in range(len(ids) - OVERLAP + 1)):
            dropped += 1
            continue
        prompts.append(ids)
    return prompts, dropped


def bench_ngrams(tokenizer: Any) -> set[tuple[int, ...]]:
    """The 13-grams that stand in exactly one bench prompt: what several share is boilerplate, not content."""
    counts: Counter[tuple[int, ...]] = Counter()
    for prompt in load_prompts():
        ids = tokenizer(prompt.prompt).input_ids
        counts.update({tuple(ids[i : i + OVERLAP]) for i in range(len(ids) - OVERLAP + 1)})
    return {gram for gram, count in counts.items() if count == 1}


def make_data(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    folder: Path,
    config: DataConfig,
    progress: Any = lambda items, total: items,
) -> dict[str, Any]:
    """Write a data set; a folder that already holds some of its shards is completed.

    Returns:
        What `data.json` holds: settings, fingerprint, counts.

    Raises:
        TrainingDataError: the folder holds a data set made otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "settings": json.loads(json.dumps(asdict(config))),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }
    described = folder / "data.json"
    if described.exists():
        before = json.loads(described.read_text())
        different = [key for key in facts if before.get(key) != facts[key]]
        if different:
            raise TrainingDataError(
                f"a data set in {folder} with other {' and '.join(different)}",
                "an empty folder, or one of the same settings to resume",
                "Choose another folder.",
            )
    prompts, dropped = cut_prompts(documents, tokenizer, config)
    facts |= {"prompts_dropped_for_overlap": dropped, "complete": False}
    described.write_text(json.dumps(facts, indent=1) + "\n")
    rng = random.Random(config.seed)
    answer = tokenizer(ANSWER).input_ids
    for index, temperature, batch in progress(list(batches(prompts, config)), None):
        shard = folder / f"shard-{index:05d}.safetensors"
        own, count = rng.random() < config.own_share, rng.randint(*config.own_tokens)
        if not shard.exists():
            torch.manual_seed(config.seed + index)
            if own:
                batch = write_prompts(model, batch, count, tokenizer.pad_token_id, answer)
            tensors = complete(model, batch, temperature, config.max_new_tokens, tokenizer.pad_token_id)
            partial = shard.with_suffix(".partial")
            save_file(tensors, partial)
            partial.rename(shard)
    facts["complete"] = True
    described.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def batches(prompts: Sequence[list[int]], config: DataConfig) -> Iterator[tuple[int, float, list[list[int]]]]:
    """Index, temperature and prompts of each batch: similar lengths together, temperatures by their shares."""
    rng = random.Random(config.seed)
    order = list(prompts)
    rng.shuffle(order)
    index, start = 0, 0
    for temperature, share in config.temperatures:
        end = start + round(share * len(order)) if temperature != config.temperatures[-1][0] else len(order)
        part = sorted(order[start:end], key=len)
        start = end
        for i in range(0, len(part), config.batch_size):
            yield index, temperature, part[i : i + config.batch_size]
            index += 1


@torch.no_grad()
def write_prompts(
    model: Any, prompts: Sequence[list[int]], count: int, pad: int, answer: Sequence[int] = ()
) -> list[list[int]]:
    """Prompts of the target's own: the first 4 to 23 tokens of each, and up to `count` more drawn at temperature 1.

    An end of a turn does not end them: a chat model goes on to write the answer to the question that it made up. A
    prompt is cut behind the last `answer` (the tokens that open an answer) that was drawn, so that the question is what
    stays, and at the end of a document, which `pad` marks in the text of base models.
    """
    starts = [prompt[: 4 + i % 20] for i, prompt in enumerate(prompts)]
    ids, mask = left_padded(starts, pad, model.device)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=pad,
        pad_token_id=pad,
    )
    return [start + cut_own(row, pad, answer) for start, row in zip(starts, out[:, ids.shape[1] :].tolist())]


def cut_own(row: list[int], pad: int, answer: Sequence[int]) -> list[int]:
    """What stays of drawn tokens: up to the document's end, and no further than behind the last `answer`."""
    row = row[: row.index(pad)] if pad in row else row
    for end in range(len(row), len(answer) - 1, -1):
        if answer and row[end - len(answer) : end] == list(answer):
            return row[:end]
    return row


def left_padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of rows of different lengths."""
    longest = max(map(len, rows))
    ids = [[pad] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@torch.no_grad()
def complete(
    model: Any, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, pad: int
) -> dict[str, Tensor]:
    """Completions of left-padded prompts as flat tensors: `tokens`, `lengths`, `prompt_lengths`, `temperatures`."""
    ids, mask = left_padded(prompts, pad, model.device)
    longest = ids.shape[1]
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options).cpu()
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    tokens, lengths = [], []
    for prompt, row in zip(prompts, out[:, longest:].tolist(), strict=True):
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        answer = row[:stop]
        if temperature == 0:
            answer = answer[: loop_onset(prompt, answer)]
        tokens += prompt + answer
        lengths.append(len(prompt) + len(answer))
    dtype = torch.int16 if model.config.vocab_size < 2**15 else torch.int32
    return {
        "tokens": torch.tensor(tokens, dtype=dtype),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(p) for p in prompts], dtype=torch.int32),
        "temperatures": torch.full((len(prompts),), temperature),
    }


@dataclass
class Sequences:
    """A data set in memory: flat tokens, and for each sequence its offset, length, prompt length and temperature."""

    tokens: Tensor
    offsets: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    temperatures: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Iterable[int], width: int, pad: int) -> dict[str, Tensor]:
        """`input_ids [B, width]` (cut or padded right), and `lengths`, `prompt_lengths`, `temperatures` `[B]`."""
        chosen = torch.as_tensor(list(indices))
        lengths = self.lengths[chosen].clamp(max=width).long()
        columns = torch.arange(width)
        flat = (self.offsets[chosen, None] + columns).clamp(max=len(self.tokens) - 1)
        ids = self.tokens[flat].long().masked_fill(columns >= lengths[:, None], pad)
        return {
            "input_ids": ids,
            "lengths": lengths,
            "prompt_lengths": self.prompt_lengths[chosen].long(),
            "temperatures": self.temperatures[chosen],
        }


def load_data(folders: Sequence[Path], tokenizer: Any, block_size: int) -> Sequences:
    """Read data sets (several processes can have made one each) and check that they fit.

    Raises:
        TrainingDataError: no data, data of another tokenizer, or no sequence longer than a block.
    """
    parts = []
    mine = tokenizer_fingerprint(tokenizer)
    for folder in folders:
        described = folder / "data.json"
        shards = sorted(folder.glob("shard-*.safetensors"))
        if not described.exists() or not shards:
            raise TrainingDataError(
                f"no data set in {folder}", "data.json and shards of `weaver-hf train data`", "Make the data first."
            )
        try:
            fingerprint = json.loads(described.read_text())["tokenizer"]
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingDataError(
                f"a damaged {described} ({error!r})", "what `weaver-hf train data` wrote", "Make the data again."
            ) from error
        if fingerprint != mine:
            raise TrainingDataError(
                f"data of the tokenizer {fingerprint[:12]} in {folder}",
                f"data of the target's tokenizer {mine[:12]}",
                "Make the data with this target.",
            )
        parts += [load_file(shard) for shard in shards]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    lengths = joined["lengths"].long()
    # Shards hold one temperature and similar lengths each; shuffled once, so that any piece is a sample of the whole.
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    if int((lengths - joined["prompt_lengths"]).max()) < block_size:
        raise TrainingDataError(
            f"completions of at most {int((lengths - joined['prompt_lengths']).max())} tokens",
            f"some of at least a block of {block_size}",
            "Make the data with a larger --max-new-tokens.",
        )
    return Sequences(
        tokens=joined["tokens"],
        offsets=(lengths.cumsum(0) - lengths)[order],
        lengths=lengths[order],
        prompt_lengths=joined["prompt_lengths"][order],
        temperatures=joined["temperatures"][order],
    )


def describe_data(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """What a run was trained on, for its record: each data set's name, `data.json`, and what its shards hold."""
    facts = []
    for folder in folders:
        lengths = [load_file(shard)["lengths"] for shard in sorted(folder.glob("shard-*.safetensors"))]
        counts = {"sequences": sum(map(len, lengths)), "tokens": sum(int(part.sum()) for part in lengths)}
        described = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        facts.append({"folder": folder.name, **described, **counts})
    return facts
