r"""Count accepted wrong answers that resemble real gold answers, and refused respellings of gold answers.

    AGENTRL_DATA_DIR=DIR python benchmarks/grading_neighbours.py [--each 3] [--seed 0] [--workers 2]

The gold answers are all answers of MATH, AIME and AMC that are not plain integers, and as many integers. From the text
of a gold answer alone, each kind of change makes a wrong answer (``WRONG``), an equal answer (``SAME``), or nothing.
Accepted wrong neighbours and refused respellings are printed. ``LOOKED_AT`` lists inspected cases in which the grader
was right after all, with the reason. These cases are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from grading_same import SAME
from grading_texts import INTEGER, Maker
from grading_wrong import WRONG

from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.types import Verdict

LOOKED_AT: dict[tuple[str, str], str] = {
    (r"33\%", "033"): "a percentage is its number",
    ("27", r"27^\circ"): "the sign of degrees left out",
}


def gold_answers(data_dir: Path, rng: random.Random) -> list[str]:
    """Return all gold answers that are not plain integers, and as many integers."""
    found: set[str] = set()
    for name in ("math500", "math35_train", "aime24", "aime25", "amc23"):
        rows = (data_dir / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        found |= {answer for row in rows if (answer := json.loads(row)["answer"].strip())}
    integers = sorted(answer for answer in found if INTEGER.fullmatch(answer))
    others = sorted(answer.rstrip(".") for answer in found.difference(integers, ["None"]))
    return [*others, *rng.sample(integers, min(len(others), len(integers)))]


def made(golds: list[str], makers: Iterable[Maker], each: int, rng: random.Random) -> list[tuple[str, str, str]]:
    """Return distinct triples ``(kind, answer, gold)``."""
    found: dict[tuple[str, str], str] = {}
    for gold in golds:
        for maker in makers:
            for _ in range(each):
                answer = maker(gold, rng.choice(golds), rng)
                if answer is not None and answer.strip() != gold and (answer, gold) not in LOOKED_AT:
                    found.setdefault((answer, gold), maker.__name__)
    return [(kind, answer, gold) for (answer, gold), kind in found.items()]


async def graded(cases: list[tuple[str, str, str]], workers: int) -> list[Verdict]:
    """Return the verdict of every case."""
    grader = Grader(GraderSettings(workers=workers))
    slots = asyncio.Semaphore(256)

    async def one(answer: str, gold: str) -> Verdict:
        async with slots:
            return await grader.grade(answer, gold)

    try:
        return await asyncio.gather(*(one(answer, gold) for _, answer, gold in cases))
    finally:
        await grader.close()


def report(title: str, cases: list[tuple[str, str, str]], verdicts: list[Verdict], *, correct: bool) -> None:
    """Print a line for each kind, and every case with a wrong verdict."""
    totals = Counter(kind for kind, _, _ in cases)
    missed = [
        (case, verdict)
        for case, verdict in zip(cases, verdicts, strict=True)
        if (verdict is Verdict.CORRECT) != correct
    ]
    bad = Counter(case[0] for case, _ in missed)
    for (kind, answer, gold), verdict in missed:
        print(f"{verdict.value}: {kind} {answer!r} for {gold!r}")
    print(f"\n| {title} | made | {'refused' if correct else 'accepted'} |\n|---|---:|---:|")
    for kind, count in totals.items():
        print(f"| {kind.replace('_', ' ')} | {count} | {bad[kind]} |")
    slow = sum(verdict in (Verdict.ANSWER_TIMEOUT, Verdict.GRADER_TIMEOUT) for verdict in verdicts)
    print(f"| all | {len(cases)} | {len(missed)} |\n\n{slow} timeouts\n")


def main() -> None:
    """Print the cases with wrong verdicts, and two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--each", type=int, default=3, help="attempts to make each kind of change to each gold answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    golds = gold_answers(Path(os.environ["AGENTRL_DATA_DIR"]), rng)
    begun = time.monotonic()
    for title, makers, correct in (("wrong neighbours", WRONG, False), ("respellings", SAME, True)):
        cases = made(golds, makers, arguments.each, rng)
        report(title, cases, asyncio.run(graded(cases, arguments.workers)), correct=correct)
    print(f"{len(golds)} gold answers, seed {arguments.seed}, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
