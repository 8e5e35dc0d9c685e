"""Fixtures. One torch thread a worker: two-thread torch on a busy two-core machine was 30 times slower."""

import os

import torch

# Without a GPU the Triton kernels run in its interpreter, which is chosen when triton is first imported: by what follows.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import transformers
from hypothesis import settings
from support import tiny_random_model

from weaver_hf import WeaverConfig, WeaverModel, load_tiny

torch.set_num_threads(1)
# Fixed examples, and no deadline: a busy machine is no fault.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.load_profile("fixed")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


# What these ask does not depend on transformers: they run under one version of it.
ONCE = (
    "test_kernel_", "test_conditional_kernels", "test_reference", "test_tree", "test_noise", "test_acceptance_law",
    "test_marginal", "test_suffix", "test_study", "test_training_", "test_speed",
    "test_cli_convert", "test_doctor",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name.startswith(ONCE):
            item.add_marker(pytest.mark.once)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def trio():
    """The embedded model, tokenizer and Weaver. Tests must leave them attached and as they were."""
    return load_tiny()


@pytest.fixture
def model():
    """A small random hybrid of its own for each test: two periods of (GDN, GDN, GDN, attention) would be too slow."""
    return tiny_random_model()


@pytest.fixture
def weaver(model):
    """A weightless Weaver attached to `model`."""
    return WeaverModel(WeaverConfig()).attach(model)
