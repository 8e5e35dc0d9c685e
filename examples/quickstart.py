"""The README's snippet on the embedded model: load, attach, generate, look at what happened.

python examples/quickstart.py
"""

from weaver_hf import load_tiny

model, tokenizer, weaver = load_tiny()  # the target, its tokenizer, and a Weaver that is attached to it
weaver.tree_config.budget = 15  # drafted nodes a step

inputs = tokenizer("def read_lines(path):\n    with open(path) as file:\n", return_tensors="pt")
output = model.generate(**inputs, assistant_model=weaver, max_new_tokens=64, do_sample=False)

print(tokenizer.decode(output[0]))
stats = weaver.stats
print(f"\n{stats.new_tokens} tokens in {stats.target_passes} passes of the target")
print(f"{stats.accepted_per_step:.2f} drafted tokens accepted a step")
print(stats.best_tree.annotate(tokenizer.decode))
