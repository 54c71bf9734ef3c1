"""Measure the GPU code on this machine in ten minutes, and compare each figure with a calculated expectation.

    python benchmarks/gpu.py                          all parts, the most informative first
    python benchmarks/gpu.py --only head attention    these parts
    python benchmarks/gpu.py --device cpu             the same code with tiny shapes; no time or size is judged

Each part runs in a separate process, so that its memory is released. A part that lacks a package or a device is
skipped. A part that raises has failed, and a part that exceeds its seconds is cut off. The next part runs in any case.
`--output` (default: gpu.json) receives all results in one file, rewritten after each part. The exit code is 1 if a part
failed or was cut off, or a figure is not as expected. `gpu_pack.py` packs the benchmark for a machine without a
network.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

TOTAL = 600.0
"""Seconds of all parts together."""
_GRACE = 8.0
"""Seconds that a part may take to end its own processes after its time is over."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A row of the table of parts. The function in ``module`` with the name of the part yields figures and remarks."""

    module: str
    seconds: float
    about: str


PARTS = {
    "head": Part(module="gpu_kernels", seconds=60, about="token statistics against the bare matrix product"),
    "attention": Part(module="gpu_kernels", seconds=50, about="lengths that are new in each call"),
    "step_1_5b": Part(module="gpu_step", seconds=65, about="training steps of a 1.5B model"),
    "step_7b": Part(module="gpu_step", seconds=105, about="training steps of a 7B model, as many layers as fit"),
    "accumulation": Part(module="gpu_kernels", seconds=30, about="sums over micro-batches and products in float32"),
    "shortage": Part(module="gpu_step", seconds=35, about="errors of torch and cuBLAS for lack of memory"),
    "energies": Part(module="gpu_kernels", seconds=30, about="exact energies against forward plus backward"),
    "determinism": Part(module="gpu_kernels", seconds=30, about="the same gradients twice, bit by bit"),
    "kernel_tests": Part(module="gpu_train", seconds=75, about="tests/kernels on CUDA tensors"),
    "train_tiny": Part(module="gpu_train", seconds=50, about="a training of the tiny policy"),
    "train_0_5b": Part(module="gpu_train", seconds=70, about="a training of a random 0.5B model"),
    "colocated": Part(module="gpu_train", seconds=150, about="a training beside vLLM on the same GPU"),
}
"""The parts in the order in which they run. ``colocated`` needs vLLM and uses the rest of the ten minutes."""


class Skip(Exception):
    """Raised by a part that cannot run on this machine, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measurement and the range in which it is expected.

    >>> print(Figure(name="forward", value=13.2, unit="ms", low=12.5, high=14))
    forward: 13.2 ms, expected 12.5 to 14: ok
    >>> print(Figure(name="energies", value=1.8, high=1.5, why="one forward and one backward"))
    energies: 1.8, expected at most 1.5 (one forward and one backward): NOT AS EXPECTED
    """

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    why: str = ""  # where the expectation comes from
    judged: bool = True  # False for a time or size that was measured with tiny shapes

    @property
    def verdict(self) -> str:
        """``ok``, ``NOT AS EXPECTED``, or ``not judged`` if no range is expected or ``judged`` is False."""
        if not self.judged or (self.low is None and self.high is None):
            return "not judged"
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        return "ok" if low <= self.value <= high else "NOT AS EXPECTED"

    def __str__(self) -> str:
        text = f"{self.name}: {self.value:.4g}" + (f" {self.unit}" if self.unit else "")
        if self.low is not None and self.high is not None:
            text += f", expected {self.low:.4g} to {self.high:.4g}"
        elif self.low is not None:
            text += f", expected at least {self.low:.4g}"
        elif self.high is not None:
            text += f", expected at most {self.high:.4g}"
        return text + (f" ({self.why})" if self.why else "") + f": {self.verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument(
        "--stretch", type=float, default=1.0, metavar="FACTOR", help="factor for the time limits of parts"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)  # module:function, for the process of one part
    options = parser.parse_args()
    if options.part is not None:
        measure(options.part, options.device, options.output)
        return
    results: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "parts": {},
    }
    began = time.monotonic()
    for name in options.only:
        part, left = PARTS[name], TOTAL * options.stretch - (time.monotonic() - began)
        print(f"\n{name}: {part.about}", flush=True)
        found = run_part(f"{part.module}:{name}", options.device, min(part.seconds * options.stretch, left))
        results["parts"][name] = found
        for line in found["lines"]:
            print(f"  {line}")
        print(f"  {found['state']}, {found['seconds']:.0f} s" + (f": {found['reason']}" if found["reason"] else ""))
        partial = options.output.with_suffix(".part")
        partial.write_text(json.dumps(results, indent=1), encoding="utf-8")
        partial.replace(options.output)
    print(f"\nfinished after {time.monotonic() - began:.0f} s; results: {options.output}")
    raise SystemExit(0 if all(map(good, results["parts"].values())) else 1)


def good(found: dict[str, Any]) -> bool:
    """Return True if a part ran or was skipped, and all its figures are as expected."""
    verdicts = [figure["verdict"] for figure in found["figures"]]
    return found["state"] in ("ran", "skipped") and "NOT AS EXPECTED" not in verdicts


def run_part(function: str, device: str, seconds: float) -> dict[str, Any]:
    """Run ``module:function`` in a separate process group, and end the group after ``seconds``. Returns its record."""
    if seconds <= 0:
        return outcome([], "cut off", 0.0, "no time was left")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        record, log = Path(folder) / "record.jsonl", Path(folder) / "log"
        command = [sys.executable, __file__, "--part", function, "--device", device, "--output", str(record)]
        hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        with log.open("wb") as out:
            child = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | hidden, start_new_session=True, cwd=folder
            )
            late = False
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                late = True
            for kind, grace in ((signal.SIGTERM, _GRACE if late else 0.0), (signal.SIGKILL, _GRACE)):
                try:
                    os.killpg(child.pid, kind)  # the part and the processes that it started
                    child.wait(grace)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
        entries = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        state, reason = "ran", ""
        if entries and "state" in entries[-1]:
            state, reason = entries[-1]["state"], entries[-1]["reason"]
        elif late:
            state, reason = "cut off", f"it took longer than {seconds:.0f} s"
        else:
            tail = log.read_text(errors="replace").strip()[-1500:]
            state, reason = "failed", f"the process ended with {child.returncode}: {tail}"
        return outcome([one for one in entries if "state" not in one], state, time.monotonic() - began, reason)


def outcome(entries: Sequence[dict[str, Any]], state: str, seconds: float, reason: str) -> dict[str, Any]:
    return {
        "state": state,
        "reason": reason,
        "seconds": round(seconds, 1),
        "lines": [one["line"] for one in entries],
        "figures": [one["figure"] for one in entries if "figure" in one],
    }


def measure(function: str, device: str, record: Path) -> None:
    """Run ``module:function`` in this process. Appends each figure and remark to ``record``, then how it ended."""

    def write(**entry: object) -> None:
        with record.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")

    try:
        import torch

        if device == "cuda" and not torch.cuda.is_available():
            raise Skip("torch finds no GPU")
        about = torch.cuda.get_device_name() if device == "cuda" else "CPU, tiny shapes"
        write(line=f"torch {torch.__version__}, {about}")
        module, _, name = function.partition(":")
        for found in getattr(importlib.import_module(module), name)(torch.device(device)):
            if isinstance(found, Figure):
                write(line=str(found), figure=asdict(found) | {"verdict": found.verdict})
            else:
                write(line=found)
    except Skip as reason:
        write(state="skipped", reason=str(reason))
    except Exception as error:  # noqa: BLE001 - the record says why the part ended, whatever ended it
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("agentrl"):
            write(state="skipped", reason=f"{error.name} is not installed")
            return
        write(state="failed", reason=f"{type(error).__name__}: {error} {traceback.format_exc()[-1200:]}")
    else:
        write(state="ran", reason="")


if __name__ == "__main__":
    sys.modules["gpu"] = sys.modules["__main__"]  # the parts import Figure and Skip from here
    main()
