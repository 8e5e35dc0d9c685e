"""A file of prompts over all GPUs: each process holds target and Weaver and writes its share.

    accelerate launch --multi_gpu --num_processes 8 examples/multi_gpu.py prompts.txt --out answers.jsonl
    torchrun --nproc-per-node 2 examples/multi_gpu.py prompts.txt --out answers.jsonl     # without GPUs: gloo

A prompt a line. Each has a seed of its own, so in fp32 the texts do not depend on the number of processes.
"""

import json
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from generate import arguments, load


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    options = parser.parse_args()
    state = PartialState(cpu=not torch.cuda.is_available())  # else accelerate would run apart without GPUs
    model, tokenizer, weaver = load(options, state.device)
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line]
    rows = []
    with state.split_between_processes(list(enumerate(prompts))) as share:
        for index, prompt in share:
            torch.manual_seed(options.seed + index)
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            output = model.generate(**inputs, assistant_model=weaver, max_new_tokens=options.max_new_tokens, **sampling)
            text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            assert weaver.stats is not None
            rows.append({"prompt": prompt, "text": text, "process": state.process_index, **weaver.stats.as_dict()})
    rows = gather_object(rows)  # in the order of the processes, which is the prompts'
    if state.is_main_process:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        passes, tokens = (sum(row[name] for row in rows) for name in ("target_passes", "new_tokens"))
        print(f"{len(rows)} texts by {state.num_processes} processes: {tokens} tokens in {passes} passes")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
