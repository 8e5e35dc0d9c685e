"""The wheel holds what the repository holds, and nothing shadows another distribution."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import weaver_hf
import weaver_kernels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_on_disk_is_declared():
    packages = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in ROOT.glob("weaver_hf/**/__init__.py")}
    kernels = {
        str(p.parent.relative_to(ROOT / "kernels")).replace("/", ".") for p in ROOT.glob("kernels/**/__init__.py")
    }
    cards = {"weaver_hf.model_cards"}  # data alone: `model_cards/`, which stands inside the package in a wheel
    assert packages | kernels | cards == set(SETTINGS["tool"]["setuptools"]["packages"])


def test_the_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert Path(weaver_kernels.__file__).parent == ROOT / "kernels" / "weaver_kernels"


def test_the_kernels_import_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import weaver_kernels; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['weaver_kernels']"


def test_the_version_is_said_once():
    assert importlib.metadata.version("weaver-hf") == weaver_hf.__version__


def test_the_public_names_are_these():
    assert set(weaver_hf.__all__) == {
        "GenerationStats", "TokenTree", "TreeConfig", "WeaverConfig", "WeaverModel", "__version__", "load_tiny",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-5.24.txt"])
def test_constraints_pin_within_the_ranges(name):
    from packaging.requirements import Requirement

    pins = {
        r.name: r for r in map(Requirement, (x for x in (ROOT / name).read_text().splitlines() if x and x[0] != "#"))
    }
    needed = [r for r in map(Requirement, SETTINGS["project"]["dependencies"]) if r.name != "packaging"]
    assert len(needed) > 5
    for requirement in needed:
        (pin,) = pins[requirement.name].specifier
        assert pin.version in requirement.specifier, requirement.name


def test_tracked_files_stay_small():
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    sizes = {f: (ROOT / f).stat().st_size for f in files if f and (ROOT / f).exists()}
    if not sizes:
        pytest.skip("not a git checkout")
    assert sum(sizes.values()) < 45 * 2**20
    assert max(sizes.values()) < 15 * 2**20
