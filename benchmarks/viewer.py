"""Measure the viewer on a large run: seconds to start, seconds to draw its pages in Chromium, and memory.

``python benchmarks/viewer.py [FOLDER [STEPS TRAJECTORIES TOKENS]]`` (default: a temporary folder, 1000 steps of 512
trajectories of 4096 tokens). The generated run has the size of a real run in everything that the viewer reads: every
step has a file of trajectories and a file of token statistics of full size. Four steps are different; the files of all
other steps are hard links to them, so that the run takes some hundred megabytes of disk instead of 60 gigabytes. The
first trajectory of every step has 16384 tokens. A folder that holds a run already is measured as it is.

For every page, it prints the seconds from the click until the page is drawn, and the CPU time of the server and of the
page's main thread in these seconds. The sum of both CPU times is the time on an idle machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml
from made_tokens import TURNS, VOCABULARY, made_record, made_tokens
from playwright.sync_api import Page, sync_playwright
from tokenizers import Tokenizer, decoders, models

from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import TokenMetadata, write_tokens
from agentrl.viewer.runs import RunLibrary

LONG = 16_384  # tokens of each step's first trajectory
DIFFERENT = 4  # steps that are written; the others are links to them
DEADLINE = 300_000  # milliseconds that a page may take before the measurement is aborted


def make_run(folder: Path, steps: int, trajectories: int, tokens: int) -> RunDirectory:
    """Write a run in the layout of training."""
    run = RunDirectory.create(folder, yaml.safe_dump({"name": folder.name, "algorithm": {"estimator": "tir_otb"}}))
    run.tokens.mkdir(exist_ok=True)
    words = {f" word{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" word0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    draw = np.random.default_rng(0)
    for step in range(1, steps + 1):
        if step <= DIFFERENT:
            _write_step(run, step, [LONG, *[tokens] * (trajectories - 1)], draw)
        else:
            written = (step - 1) % DIFFERENT + 1
            os.link(run.trajectory_file(written), run.trajectory_file(step))
            os.link(run.token_statistics_file(written, 0), run.token_statistics_file(step, 0))
    rows = [{"step": step, **{name: float(draw.uniform()) for name in METRICS}} for step in range(1, steps + 1)]
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run.close()
    return run


METRICS = (
    *("reward/mean", "reward/stderr", "policy/entropy", "policy/gradient_norm", "policy/tokens"),
    *("rollout/turns_mean", "rollout/model_tokens_mean", "rollout/ended/answered", "rollout/ended/void_turn"),
    *("time/step_s", "time/train_s", "time/transfer_s", "time/train_idle_s"),
    *(f"other/{number}" for number in range(80)),
)


def _write_step(run: RunDirectory, step: int, lengths: Sequence[int], draw: np.random.Generator) -> None:
    run.write_trajectories(step, (made_record(step, number, length, draw) for number, length in enumerate(lengths)))
    facts = TokenMetadata(
        step=step, version=step - 1, rank=0, ranks=1, estimator="tir_otb", loss="ppo", aggregation="token_mean"
    )
    rows = [
        made_tokens(number, length // TURNS * TURNS, draw, loss_weight=1e-6) for number, length in enumerate(lengths)
    ]
    write_tokens(run.token_statistics_file(step, 0), facts, rows)


def measure(run: RunDirectory) -> None:
    """Start the viewer as a user does, open its pages, and print the measurements."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "agentrl.cli", "view", str(run.path), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with urllib.request.urlopen(address, timeout=60) as answer:
                answer.read()
            print(f"first page {time.perf_counter() - began:.2f} s after the start")
            walk(run, address, server.pid)
            status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            peak = next(line for line in status if line.startswith("VmHWM"))
            print(f"peak memory of the viewer: {int(peak.split()[1]) / 1024:.0f} MB")
        finally:
            server.terminate()


def walk(run: RunDirectory, address: str, server: int) -> None:
    """Open every kind of page for the first time, then the long trajectory twice more."""
    (place,) = RunLibrary([run.path]).folders()
    newest = run.steps_with_trajectories()[-1]
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(DEADLINE)
        page.goto(address)
        page.wait_for_selector("[data-ready]")
        watch = Watch(page, server)
        own, step = f"#/run/{place.id}", f"first={newest}&last={newest}"
        watch.show("run", own)
        watch.show(f"step {newest}", f"{own}/trajectories?{step}")
        for times in ("first", "second", "third"):
            watch.show(f"a trajectory of {LONG} tokens, {times} time", f"{own}/{newest}/0")
            watch.show("back to its step", f"{own}/trajectories?{step}")
        watch.show("its sibling", f"{own}/{newest}/1")
        watch.show("a trajectory of another group", f"{own}/{newest}/9")
        watch.show("a search of conversations over all steps, its first answer", f"{own}/trajectories?text=nowhere")
        browser.close()


class Watch:
    """Opens pages, and prints how long each page took."""

    def __init__(self, page: Page, server: int) -> None:
        self._page = page
        self._server = server
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def show(self, name: str, place: str) -> None:
        """Go to ``place``, and wait until the page is complete and two frames are drawn."""
        server, thread = self._server_seconds(), self._page_seconds()
        seconds = self._page.evaluate(
            """async (place) => {
                const began = performance.now();
                location.hash = place;
                const main = document.getElementById("page");
                while (main.dataset.ready !== place) await new Promise((resolve) => setTimeout(resolve, 5));
                await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
                return (performance.now() - began) / 1000;
            }""",
            place,
        )
        server, thread = self._server_seconds() - server, self._page_seconds() - thread
        print(
            f"{name}: {seconds:.2f} s; processor time {server + thread:.2f} s (server {server:.2f}, page {thread:.2f})"
        )

    def _server_seconds(self) -> float:
        fields = Path(f"/proc/{self._server}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _page_seconds(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def main() -> None:
    given = [int(text) for text in sys.argv[2:5]] or [1000, 512, 4096]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "large"
        run = RunDirectory(folder)
        if not run.metrics_file.exists():
            run = make_run(folder, *given)
        files = [path for path in run.path.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{len(files)} files with {size / 1e9:.1f} GB, counting every link")
        measure(run)


if __name__ == "__main__":
    main()
