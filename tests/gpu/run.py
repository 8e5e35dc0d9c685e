"""`make test-gpu`: the tests marked `gpu` on this machine's card; the log with date, card and versions stays beside this.

Works with the machine's own Python, torch and transformers, without an installed package: the repository's folders are
put on the path.
"""

import contextlib
import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def header() -> str:
    versions = []
    for name in ("torch", "triton", "transformers", "accelerate", "peft", "flash-linear-attention", "fla-core"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return f"{date}\n{card}, Python {platform.python_version()}, {', '.join(versions)}\ncommit {commit or 'unknown'}\n"


def main() -> int:
    path = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-q",
        "-s",
        "tests",
        *sys.argv[1:],
    ]
    result = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = header() + "\n" + result.stdout.replace(str(ROOT), ".")
    print(log)
    (HERE / "last.log").write_text(log, encoding="utf-8")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
