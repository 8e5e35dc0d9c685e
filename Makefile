# Two commands on a fresh machine: `make demo` and `make test`. Python 3.10 to 3.12.
PYTHON ?= python3
PYTEST = -m pytest -n 2 --dist loadgroup -p no:cacheprovider

.PHONY: demo test test-slow test-gpu lint bench clean

demo: .venv/ready
	.venv/bin/weaver-hf demo

test: .venv/ready
	.venv/bin/python $(PYTEST) -m "not slow and not gpu"

# All 210 prompts here, then everything again under the newest transformers but what one version answers.
test-slow: .venv/ready .venv-5.24/ready
	.venv/bin/python $(PYTEST) -m "slow and not gpu"
	.venv-5.24/bin/python $(PYTEST) -m "not gpu and not once"

# On a machine with a GPU, with that machine's own Python and torch: make test-gpu PYTHON=python3
test-gpu:
	PYTHONPATH=.:kernels $(PYTHON) tests/gpu/run.py

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: .venv/ready
	.venv/bin/weaver-hf bench

clean:
	rm -rf .venv .venv-5.24 build dist *.egg-info

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv-5.24/ready: pyproject.toml constraints-5.24.txt
	$(PYTHON) -m venv .venv-5.24
	.venv-5.24/bin/python -m pip install --quiet --constraint constraints-5.24.txt --editable ".[test]"
	touch $@
