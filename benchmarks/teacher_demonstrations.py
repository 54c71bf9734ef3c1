"""Write the solved rollouts of a teacher's run as demonstrations for supervised fine-tuning.

    python benchmarks/teacher_demonstrations.py RUN OUTPUT N [N ...]

writes OUTPUT_N.jsonl from the first N rollouts of the run's first step for each N, and prints the tokens that the
teacher sampled for them. See benchmarks/studies/distill_sft_2.yaml.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import agentrl
from agentrl.trajectory import Trajectory


def demonstration(trajectory: Trajectory) -> dict[str, object]:
    """Return the rollout as a row of a file of demonstrations."""
    turns: list[dict[str, str]] = []
    for segment in trajectory.segments:
        if segment.origin == "model":
            turns.append({"model": segment.text, "observation": ""})
        else:
            turns[-1]["observation"] += segment.text
    problem = trajectory.problem
    return {
        "id": problem.id, "problem": problem.statement, "answer": problem.answer, "setup": problem.setup,
        "family": problem.family, "turns": turns,
    }  # fmt: skip


if __name__ == "__main__":
    rollouts = list(agentrl.load_run(sys.argv[1]).trajectories(1))
    for count in map(int, sys.argv[3:]):
        chosen = rollouts[:count]
        solved = [json.dumps(demonstration(item)) for item in chosen if item.reward >= 1]
        Path(f"{sys.argv[2]}_{count}.jsonl").write_text("\n".join(solved) + "\n")
        print(f"{count} rollouts: {len(solved)} solved, {sum(item.model_tokens for item in chosen)} sampled tokens")
