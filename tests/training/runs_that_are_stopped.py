"""One training rank of runs that are stopped again and again: ``CASE``, a JSON object. Run by test_signals.py.

Everything happens in one process a rank, under no launcher: the libraries take longer to load than a run. What each
call of :func:`agentrl.training.run.start.train` returned is written to ``codes-RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from stopping_env import ORDER, TAKEN, UPDATED, wait_for

from agentrl.config import load_settings
from agentrl.errors import AgentRLError
from agentrl.training.run.start import train

PROCESSES = Path("processes.json")
ENVIRONMENT = "stopping_env:StoppingEnv"


def main() -> None:
    case = json.loads(sys.argv[1])
    rank = os.environ["RANK"]
    codes: dict[str, list[int]] = {}
    wait_for(PROCESSES)
    for name, orders in case["runs"].items():
        codes[name] = [attempt(case, name, number, order, rank) for number, order in enumerate([*orders, None])]
        Path(f"codes-{rank}.json").write_text(json.dumps(codes))


def attempt(case: dict[str, list[str]], name: str, number: int, order: dict[str, str] | None, rank: str) -> int:
    """Start or resume a run with an order for one moment of it; its exit code, -1 if the moment was never reached."""
    if rank == "0":
        give(order)
    Path(f"ready-{name}-{number}-{rank}").touch()
    for other in range(int(os.environ["WORLD_SIZE"])):
        wait_for(Path(f"ready-{name}-{number}-{other}"))
    if number == 0:
        settings = load_settings(ENVIRONMENT, overrides=[*case["settings"], f"name={name}"])
    else:
        settings = load_settings(overrides=[f"name={name}"], resume=True)
    try:
        code = train(settings, resume=number > 0)
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    return code if order is None or TAKEN.exists() else -1


def give(order: dict[str, str] | None) -> None:
    for path in (ORDER, TAKEN, UPDATED):
        path.unlink(missing_ok=True)
    if order is None:
        return
    processes = json.loads(PROCESSES.read_text())
    told = [processes[int(place)] for place in order["tell"]]
    partial = ORDER.with_suffix(".partial")
    partial.write_text(json.dumps({**order, "processes": told}))
    partial.rename(ORDER)


if __name__ == "__main__":
    main()
