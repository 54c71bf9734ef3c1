"""Pack the GPU benchmark for a machine without network access on which the project is not installed.

    python benchmarks/gpu_pack.py [FOLDER] [--wheels FOLDER]

The machine has Python 3.12 on x86_64 Linux, torch, Triton, transformers and pyarrow. FOLDER (default: gpu-kit) receives
this source tree, wheels of the other packages, and run.sh, which passes its arguments to gpu.py. It is at most 60 MiB.
DeepSpeed is built from its source distribution without compiled operators. run.sh unpacks each wheel whose package
the machine lacks and puts them on PYTHONPATH; pip is not used there. `--wheels` keeps the wheels, so that packing again
needs no network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60 << 20
"""Bytes of the folder."""
SOURCE = ("agentrl", "envs", "sandbox", "benchmarks", "configs", "tests/kernels", "pyproject.toml", "LICENSE")
TEST_FILES = ("tests/conftest.py", "tests/shared.py", "tests/ranks.py", "tests/warm")
DEEPSPEED = "deepspeed==0.19.8"
# fmt: off
PACKAGES = [
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection",
    "gymnasium", "farama-notifications", "math-verify", "latex2sympy2-extended", "antlr4-python3-runtime==4.13.2",
    "einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo",
    "httpx", "httpcore", "h11", "anyio", "idna", "certifi", "stamina", "tenacity", "starlette", "uvicorn", "click",
    "typer", "shellingham", "annotated-doc", "rich", "markdown-it-py", "mdurl", "pygments",
    "cloudpickle", "msgspec", "zstandard", "latex2mathml",
    "jsonschema", "attrs", "referencing", "rpds-py", "jsonschema-specifications",
    "pytest<9.2", "pytest-asyncio", "pytest-xdist", "execnet", "pluggy", "iniconfig", "hypothesis", "sortedcontainers",
]
# fmt: on
"""Includes requirements beyond torch and transformers. pip resolves no dependencies, so it cannot add torch."""
# fmt: off
PRESENT = [
    "torch", "transformers", "numpy", "safetensors", "tokenizers", "tqdm",
    "pyyaml", "sympy", "typing-extensions", "pyarrow",
]
# fmt: on
"""Packages of the machine: torch and transformers with their requirements, and pyarrow, which is too large to pack."""
UNUSED = ["agentrl-sandbox", "docker", "matplotlib"]
"""Requirements of the project that no part imports; the sandbox is part of the source."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")

RUN = """\
#!/bin/sh
# Run benchmarks/gpu.py with its arguments, for example: ./run.sh --only head attention
# PYTHON names the interpreter (default: python3), which must find torch, triton and transformers.
set -e
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [ ! -d "$here/packages" ]; then
    "$python" - "$here" <<'END'
import re, sys, zipfile
from importlib.metadata import distributions
from pathlib import Path

here = Path(sys.argv[1])
plain = lambda name: re.sub("[-_.]+", "_", name).lower()
installed = {plain(one.metadata["Name"]) for one in distributions()}
for wheel in sorted((here / "wheels").glob("*.whl")):
    if plain(wheel.name.split("-")[0]) not in installed:
        zipfile.ZipFile(wheel).extractall(here / "packages.part")
(here / "packages.part").rename(here / "packages")
END
fi
export PYTHONPATH="$here/source:$here/source/envs:$here/source/sandbox:$here/packages${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$here/source/benchmarks/gpu.py" "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("gpu-kit"), help="output folder; replaces an older kit"
    )
    parser.add_argument("--wheels", type=Path, help="folder that keeps the wheels for later calls")
    options = parser.parse_args()
    folder: Path = options.folder
    if folder.exists() and not (folder / "run.sh").exists():
        parser.error(f"{folder} exists and is not a kit: name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    copy_source(folder / "source")
    wheels = options.wheels or folder / "wheels"
    fetch_wheels(wheels)
    if options.wheels:
        shutil.copytree(wheels, folder / "wheels")
    (folder / "run.sh").write_text(RUN, encoding="utf-8")
    (folder / "run.sh").chmod(0o755)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB, {len(list((folder / 'wheels').iterdir()))} wheels")
    if size > LIMIT:
        raise SystemExit(f"{folder} is larger than {LIMIT >> 20} MiB: remove packages from the list in {__file__}")


def copy_source(target: Path) -> None:
    """Copy the tracked and new files that gpu.py, training and the kernel tests read."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *SOURCE, *TEST_FILES],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).exists():  # not deleted since the last commit
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def fetch_wheels(folder: Path) -> None:
    """Download the wheels for Python 3.12 on x86_64 Linux that `folder` lacks, and build DeepSpeed's."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    target = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    held = {path.name.split("-")[0].replace("_", "-").lower() for path in folder.glob("*.whl")}
    missing = [name for name in PACKAGES if name.partition("=")[0].partition("<")[0] not in held]
    if missing:
        subprocess.run([*pip, "download", "--no-deps", *target, "--dest", folder, *missing], check=True)
    if "deepspeed" not in held:
        environment = os.environ | {"DS_BUILD_OPS": "0"}  # needs no compiler or CUDA; torch's AdamW is used
        build = ["wheel", "--no-deps", "--no-build-isolation", "--no-binary", "deepspeed", "--wheel-dir", folder]
        subprocess.run([*pip, *build, DEEPSPEED], check=True, env=environment)


if __name__ == "__main__":
    main()
