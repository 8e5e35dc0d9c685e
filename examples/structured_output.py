"""JSON that follows a schema: a grammar library's own LogitsProcessor, unchanged, beside the Weaver.

    pip install "weaver-hf[structured]"
    python examples/structured_output.py

xgrammar's processor keeps the state of its grammar between calls, so it must see every prefix of the text exactly once
and in order, and none that is thrown away. That is what decoding with trees gives a custom processor; the text is token
for token the one without the Weaver. On a CPU it prints:

    {"name": ", ", "age": 10, "tags": ["blue", "blue"], "alive": false}
    44 tokens in 25 passes of the target, the same as without the Weaver: True

(The embedded model knows how to write, and nothing else.)
"""

import json

import torch
import xgrammar

from weaver_hf import load_tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 3},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "alive"],
    "additionalProperties": False,
}

model, tokenizer, weaver = load_tiny()
vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
grammar = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

chat = [{"role": "user", "content": "Describe a person as JSON."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def generate(**assistant):
    processor = xgrammar.contrib.hf.LogitsProcessor(grammar)  # its state is that of one text: a new one each time
    return model.generate(**inputs, logits_processor=[processor], max_new_tokens=80, do_sample=False, **assistant)


output, plain = generate(assistant_model=weaver), generate()
print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print(
    f"{weaver.stats.new_tokens} tokens in {weaver.stats.target_passes} passes of the target, "
    f"the same as without the Weaver: {torch.equal(output, plain)}"
)
