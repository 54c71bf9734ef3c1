"""Write demonstrations of the three easiest tasks into ``data/``: ``python make_demonstrations.py``. Deterministic.

``demonstrations.jsonl`` is for the built-in agent, ``commands.jsonl`` for ``agent/agent.py``. Most of them contain a
wrong command, so that the policy starts with a low reward.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

COMMANDS = {
    "write-word": (
        "echo hello > /app/out.txt",
        "echo hello > /app/in.txt",
        "echo hello",
        "cat /app/out.txt > hello",
    ),
    "copy-file": (
        "cp /app/in.txt /app/out.txt",
        "cp /app/out.txt /app/in.txt",
        "cat /app/in.txt",
        "ls /app > /app/out.txt",
    ),
    "count-lines": (
        "wc -l < /app/in.txt > /app/out.txt",
        "wc -c < /app/in.txt > /app/out.txt",
        "wc -l < /app/out.txt > /app/in.txt",
        "wc -l > /app/out.txt",
    ),
}
"""Commands per task. The first one is right."""
WRONG = 0.65


def demonstration(name: str, random: Random, *, called: bool) -> dict[str, object]:
    """Return a row: one command without output, as a tool call or as text, then the end of the rollout."""
    right, *wrong = COMMANDS[name]
    command = random.choice(wrong) if random.random() < WRONG else right
    turn = {"model": command, "observation": "\nexit code 0\n"}
    if called:
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        turn = {
            "model": f"<tool_call>\n{call}\n</tool_call>",
            "observation": "\n<tool_response>\n\n</tool_response>\n",
        }
    directory = Path("tasks") / name
    return {
        "problem": (directory / "instruction.md").read_text(encoding="utf-8").strip(),
        "task": str(directory),
        "turns": [turn, {"model": "done"}],
    }


def main() -> None:
    """Write the same number of demonstrations for each task."""
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    for file, called in (("demonstrations.jsonl", True), ("commands.jsonl", False)):
        random = Random(0)
        rows = [demonstration(name, random, called=called) for _ in range(200) for name in COMMANDS]
        lines = [json.dumps({"id": f"demonstration-{number}", **row}) for number, row in enumerate(rows)]
        (folder / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
