"""Compare the speed of the grader (with a cold cache) to that of math-verify alone in one process.

    AGENTRL_DATA_DIR=DIR python benchmarks/grading.py [--workers 2] [--limit 1500]

*Integers*: pairs of whole numbers, half of them equal, spelled in different ways. *MATH*: answers of ``math500`` and
``math35_train`` that are not plain numbers, respelled or as calculations (``math_pairs``), without repeated pairs.
Targets through the pool on two cores: 2,000 gradings per second on integers, 300 on MATH. The other side is
``math_verify.parse`` of both answers and ``verify``, on every fifth pair, in this process. On a busy machine, compare
the gradings per CPU second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import time
from collections import Counter
from pathlib import Path

from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.grading.grader import is_plain_number
from agentrl_envs.types import Verdict

Pairs = list[tuple[str, str]]


def integer_pairs(count: int, rng: random.Random) -> Pairs:
    """Return distinct pairs ``(answer, gold)``."""
    numbers = rng.sample(range(10_000_000), count)
    return [
        (rng.choice(["{:,}", "{}.0", "{:09d}", "${}$"]).format(number + index % 2), str(number))
        for index, number in enumerate(numbers)
    ]


def math_pairs(data_dir: Path, limit: int, rng: random.Random) -> tuple[Pairs, Pairs]:
    """Return pairs ``(answer, gold)`` for answers of MATH that are not plain numbers: respelled, and as calculations.

    Half of the calculations are another problem's answer, and half are the same answer plus a term with the value 0.
    """
    rows = [json.loads(line) for name in ("math500", "math35_train") for line in (data_dir / f"{name}.jsonl").open()]
    golds = sorted({row["answer"] for row in rows if row["answer"] and not is_plain_number(row["answer"])})
    rng.shuffle(golds)
    spelled = [(spell_otherwise(gold), gold) for gold in golds[:limit]]
    golds = golds[limit : 2 * limit]
    calculated = [(f"{gold} + 0" if index % 2 else golds[index - 1], gold) for index, gold in enumerate(golds)]
    return spelled, calculated


def spell_otherwise(answer: str) -> str:
    """Respell an answer as models write it: other fraction commands and blanks, no size commands, ``$`` around it."""
    answer = answer.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "")
    return f"$ {answer.replace(',', ', ')} $"


async def through_the_pool(pairs: Pairs, workers: int) -> tuple[float, float, Counter[Verdict]]:
    """Return wall-clock seconds, CPU seconds (with the workers') and verdicts. The workers' start is not timed."""
    grader = Grader(GraderSettings(workers=workers))
    await asyncio.gather(*(grader.grade(f"sqrt({index})", "7") for index in range(2, 2 + workers)))
    pids = grader.idle_worker_pids
    cpu, wall = time.process_time() + sum(map(cpu_seconds, pids)), time.perf_counter()
    verdicts = await asyncio.gather(*(grader.grade(answer, gold) for answer, gold in pairs))
    wall = time.perf_counter() - wall
    before = {*pids}
    cpu = time.process_time() + sum(cpu_seconds(pid) for pid in grader.idle_worker_pids if pid in before) - cpu
    await grader.close()
    return wall, cpu, Counter(verdicts)


def alone(pairs: Pairs) -> tuple[float, float, Counter[bool]]:
    """Run math-verify in this process, unchanged except for its timeouts."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    parse(r"\boxed{\frac12}", parsing_timeout=None)
    found: Counter[bool] = Counter()
    cpu, wall = time.process_time(), time.perf_counter()
    for answer, gold in pairs:
        forms = [parse("\\boxed{" + text + "}", parsing_timeout=None) for text in (gold, answer)]
        found[verify(*forms, timeout_seconds=None)] += 1
    return time.perf_counter() - wall, time.process_time() - cpu, found


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print one row for each workload and side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, default=800)
    arguments = parser.parse_args()
    rng = random.Random(0)
    spelled, calculated = math_pairs(Path(os.environ["AGENTRL_DATA_DIR"]), arguments.limit, rng)
    workloads = {
        "integers": integer_pairs(20_000, rng),
        "MATH, spelled otherwise": spelled,
        "MATH, calculated": calculated,
        "MATH, half of each": [*spelled[: len(spelled) // 2], *calculated[len(calculated) // 2 :]],
    }
    print("| answers | by | gradings | per second | per CPU second | verdicts |\n" + "|---" * 6 + "|")
    for name, pairs in workloads.items():
        wall, cpu, verdicts = asyncio.run(through_the_pool(pairs, arguments.workers))
        said = ", ".join(f"{verdict.value} {count}" for verdict, count in verdicts.most_common())
        side = f"the pool, {arguments.workers} processes"
        print(
            f"| {name} | {side} | {len(pairs)} | {len(pairs) / wall:.0f} | {len(pairs) / cpu:.0f} | {said} |",
            flush=True,
        )
        some = pairs[::5]
        wall, cpu, found = alone(some)
        said = f"correct {found[True]}, other {found[False]}"
        print(f"| {name} | math-verify alone | {len(some)} | {len(some) / wall:.0f} | {len(some) / cpu:.0f} | {said} |")
    print(f"\npeak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")


if __name__ == "__main__":
    main()
