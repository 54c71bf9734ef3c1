"""Train runs of the tiny preset that fail in known ways, and healthy runs, and print a table of their alerts.

    python benchmarks/alerts.py [--cases healthy frozen ...] [--seeds 0 1 2] [KEY=VALUE ...]
    python benchmarks/alerts.py --replay RUN ...

Runs are short: 8 problems x 8 trajectories per step, without evaluation. ``--replay`` applies the current rules, step
by step, to the metrics of existing runs; RUN is a run or a folder of runs. Its table also shows the alerts that fired
in training (``alerts.jsonl``), including disk and memory. The exit status is 1 if any alert fired.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from agentrl.telemetry.alerts import Alert, find_alerts, select_training_rows
from agentrl.telemetry.run_directory import RunDirectory

BROKEN_MASK = '''
from agentrl import register_loss


@register_loss("shifted_rows")
def shifted_rows(inputs, options):
    """Compute reinforce with the mask and the advantages of another trajectory, the row above."""
    mask, advantages = inputs.mask.roll(1, 0), inputs.advantages.roll(1, 0)
    return -(advantages * mask) * inputs.log_probs, {}
'''
SHORT = (
    "rollout.problems_per_step=8",
    "training.steps=120",
    "checkpoint.every=1000",
    "algorithm.head_exact_every=0",
    "data.eval=[]",
    "telemetry.plots=false",
    "telemetry.plain_every=10",
)
CASES = {
    "healthy": (),
    "learning rate 3e-2": ("optimizer.learning_rate=3e-2",),
    "learning rate 1e-2": ("optimizer.learning_rate=1e-2",),
    "mask of another row": ("algorithm.loss=shifted_rows",),
    "frozen weights": ("optimizer.learning_rate=1e-12",),
    "groups of one": ("rollout.group_size=1", "algorithm.drop_zero_variance=true"),
    "turns of 12 tokens": ("rollout.max_turn_tokens=12",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--replay", type=Path, nargs="+", default=[], help="run directories, or folders of runs")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.replay:
        sys.exit(replay(options.replay))
    print("| run | steps | alerts, with the step at which they began |\n|---|---|---|", flush=True)
    for case in options.cases:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                print(line(f"{case}, seed {seed}", train(case, seed, Path(folder), options.overrides)), flush=True)


def replay(paths: Iterable[Path]) -> int:
    """Print the table for existing runs. Returns 1 if an alert fired, otherwise 0."""
    runs = [file.parent for path in paths for file in sorted(path.rglob("metrics.jsonl"))]
    print("| run | steps | alerts, with the step at which they began | fired in training |\n|---|---|---|---|")
    silent = bool(runs)
    for path in runs:
        run = RunDirectory(path)
        recorded = run.alerts()
        told = "; ".join(f"`{alert.alert}` {alert.step}" for alert in recorded) or "none"
        print(f"{line(str(path), run)} {told} |", flush=True)
        silent = silent and not recorded and not first_alerts(run)
    return 0 if silent else 1


def train(case: str, seed: int, folder: Path, overrides: Iterable[str]) -> RunDirectory:
    """Train one run in ``folder``. Its output goes to standard error."""
    plugin = folder / "broken_mask.py"
    plugin.write_text(BROKEN_MASK)
    own = (f"plugins=[{plugin}]", f"runs_dir={folder}", "name=run", f"seed={seed}")
    command = [sys.executable, "-m", "agentrl.cli", "train", "--env", "simpletir", "--config", "arithmetic"]
    command += [*own, *SHORT, *CASES[case], *overrides]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return RunDirectory(folder / "run")


def line(name: str, run: RunDirectory) -> str:
    """Return a row of the table from the metrics of a run."""
    fired = "; ".join(f"`{alert.alert}` {alert.step}: {alert.message}" for alert in first_alerts(run))
    return f"| {name} | {len(select_training_rows(run.metrics()))} | {fired or 'none'} |"


def first_alerts(run: RunDirectory) -> list[Alert]:
    """Return the first alert of each name for the metrics of a run."""
    rows = select_training_rows(run.metrics())
    first: dict[str, Alert] = {}
    for count in range(1, len(rows) + 1):
        for alert in find_alerts(rows[:count]):
            first.setdefault(alert.alert, alert)
    return list(first.values())


if __name__ == "__main__":
    main()
