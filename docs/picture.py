"""Draw the README's picture from a run: ``python docs/picture.py RUN STEP TRAJECTORY``.

Left: training reward and held-out score. Right: a trajectory in the viewer, which needs Chromium and playwright. The
picture in the README is ``python docs/picture.py runs/tiny-1 1 118`` after ``make train``.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot
from playwright.sync_api import sync_playwright

TARGET = Path(__file__).parent / "images" / "overview.png"


def main(run: Path, step: str, trajectory: str) -> None:
    """Draw curve and conversation side by side."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
    scores = {row["step"]: row["eval/avg_at_k"] for row in rows if "eval/avg_at_k" in row}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), width_ratios=(1, 1.3))
    left.plot(list(rewards), list(rewards.values()), color="#b8c7e6", label="training reward of each step")
    left.plot(list(scores), list(scores.values()), "o", color="#1f4e9c", label="score on held-out problems")
    for number, score in scores.items():
        left.annotate(f"{score:.2f}", (number, score), (0, 9), textcoords="offset points", ha="center")
    left.set(xlabel="step", ylim=(0, 1.05))
    left.legend(loc="lower right", frameon=False)
    left.spines[["top", "right"]].set_visible(False)
    right.imshow(pyplot.imread(io.BytesIO(screenshot(run, step, trajectory))))
    right.axis("off")
    figure.subplots_adjust(left=0.04, right=1, bottom=0.1, top=0.98, wspace=0.05)
    figure.savefig(TARGET, dpi=130)


def screenshot(run: Path, step: str, trajectory: str) -> bytes:
    """Return a PNG of the trajectory's page, coloured by share of the gradient, with the strongest token selected."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "run.html"
        subprocess.run(["agentrl", "view", str(run), "--export", str(page_file), "--steps", step], check=True)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 1200}, device_scale_factor=2)
        page.goto(f"file://{page_file}")
        page.evaluate("path => { location.hash = path }", f"#/run/run/{step}/{trajectory}")
        page.get_by_label("Color by").select_option(label="Share of the gradient")
        page.get_by_role("button", name="Largest").click()
        page.evaluate("scrollTo(0, 0)")
        prompt = page.get_by_text("prompt ·").bounding_box()
        end = page.get_by_text("observation ·").last.bounding_box()
        top = prompt["y"] - 12
        return page.screenshot(clip={"x": prompt["x"] - 16, "y": top, "width": 556, "height": end["y"] - top - 4})


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
