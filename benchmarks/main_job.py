"""Compare the CPU seconds of a training step between this checkout and another, for the tiny main job.

    git worktree add ../before 72792a4a
    python benchmarks/main_job.py --other ../before --pairs 3 --steps 20

Each run is `agentrl train --env simpletir` for ``--steps`` deterministic steps on one rank, from a cold-started policy
(``--policy``, made first if it is missing), without evaluations. The runs alternate, and each has one core. Training is
measured from a step's plan to its optimizer update, without rollouts. CPU seconds are compared, because the machine may
be busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
# The program that runs in both checkouts: the command line, with a timer around the trainer.
TIMED = """
import json, os, sys, time
from agentrl.training.step.trainer import Trainer
plain, output = Trainer.train, sys.argv.pop(1)

def timed(self, plan, **options):
    began = time.process_time(), time.monotonic()
    try:
        return plain(self, plan, **options)
    finally:
        taken = {"cpu": time.process_time() - began[0], "wall": time.monotonic() - began[1]}
        with open(output, "a") as out:
            out.write(json.dumps(taken) + "\\n")

Trainer.train = timed
from agentrl.cli import main
sys.exit(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="another checkout of agentrl")
    parser.add_argument("--policy", type=Path, help="a cold-started policy; by default, a new one is made")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    sides = {"here": HERE, "other": options.other.resolve()}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        policy = options.policy or cold_started(Path(folder))
        for pair in range(options.pairs):
            for name in sorted(sides, reverse=bool(pair % 2)):
                steps = run(sides[name], policy, Path(folder) / f"{name}-{pair}", options.steps)
                taken[name] += steps
                print(f"pair {pair + 1}, {name}: {told(steps)}", flush=True)
    for name, steps in taken.items():
        print(f"{name}: {told(steps)}")
    ratio = middle(taken["here"], "cpu") / middle(taken["other"], "cpu")
    print(f"CPU seconds of this checkout relative to the other: {ratio:.2f}")


def run(tree: Path, policy: Path, folder: Path, steps: int) -> list[dict[str, float]]:
    """Return CPU and wall-clock seconds of training for each step after the first, which is a warm-up."""
    folder.mkdir()
    output = folder / "seconds.jsonl"
    arguments = ["train", "--env", "simpletir", "--config", "arithmetic", f"model.path={policy}", f"runs_dir={folder}"]
    arguments += ["name=run", f"training.steps={steps}", "training.deterministic=true", "training.threads=1"]
    arguments += ["coldstart.demonstrations=null", "data.eval=[]", "evaluation.falsified=false"]
    command = [sys.executable, "-c", TIMED, str(output), *arguments]
    python_path = os.pathsep.join(str(tree / part) for part in (".", "envs", "sandbox"))
    environment = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the run of {tree} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return [json.loads(line) for line in output.read_text().splitlines()][1:]


def cold_started(folder: Path) -> Path:
    """Run the cold start of the preset ``arithmetic``, and return the directory of the policy."""
    policy = folder / "policy"
    command = [sys.executable, "-m", "agentrl.cli", "coldstart", "--config", "arithmetic"]
    subprocess.run([*command, "--output", str(policy)], cwd=HERE, check=True)
    return policy


def middle(steps: list[dict[str, float]], what: str) -> float:
    return statistics.median(step[what] for step in steps)


def told(steps: list[dict[str, float]]) -> str:
    low, _, high = statistics.quantiles([step["cpu"] for step in steps], n=4)
    return (
        f"{middle(steps, 'cpu'):.3f} CPU seconds per training step (quartiles {low:.3f}, {high:.3f}), "
        f"{middle(steps, 'wall'):.3f} wall-clock seconds, medians of {len(steps)} steps"
    )


if __name__ == "__main__":
    main()
