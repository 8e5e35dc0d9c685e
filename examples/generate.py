"""One text from any target and Weaver.

python examples/generate.py "Once upon a time"
python examples/generate.py "What is a tree?" --chat --stream --target Qwen/Qwen3.5-4B --weaver z-lab/Qwen3.5-4B-DFlash
"""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from weaver_hf import WeaverConfig, WeaverModel
from weaver_hf.tiny import TARGET, WEAVER


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all of these scripts share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TARGET), help="a folder or Hub id; by default the embedded model")
    parser.add_argument("--weaver", help="a folder or Hub id; by default the embedded one, or one without weights")
    parser.add_argument("--adapter", help="of another source than the Weaver, e.g. trymirai/weaver")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    return parser


def load(options: argparse.Namespace, device: torch.device | str | None = None) -> tuple[Any, Any, WeaverModel]:
    """Target, tokenizer and attached Weaver: fp32 on a CPU, otherwise in the checkpoint's dtype over all GPUs."""
    device = device or ("auto" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if str(device) == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype, device_map=device)
    name = options.weaver or (str(WEAVER) if options.target == str(TARGET) else None)
    weaver = WeaverModel(WeaverConfig()) if name is None else WeaverModel.from_pretrained(name, adapter=options.adapter)
    return model, AutoTokenizer.from_pretrained(options.target), weaver.attach(model)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--chat", action="store_true", help="ask the prompt as a user's turn")
    parser.add_argument("--stream", action="store_true", help="print while it is written")
    options = parser.parse_args()
    model, tokenizer, weaver = load(options)
    text = options.prompt
    if options.chat:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if options.stream else None
    output = model.generate(**inputs, assistant_model=weaver, max_new_tokens=options.max_new_tokens, streamer=streamer)
    if streamer is None:
        print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    stats = weaver.stats
    assert stats is not None
    print(f"\n[{stats.new_tokens} tokens in {stats.target_passes} passes of the target]")


if __name__ == "__main__":
    main()
