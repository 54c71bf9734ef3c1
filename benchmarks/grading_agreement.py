r"""How far the grader agrees with test cases of another one: ``(gold, answer, expected)`` in pytest parametrizations.

    python benchmarks/grading_agreement.py math_verify-0.9.0/tests/*.py

Made for math-verify's own tests, which are in its source distribution (``pip download --no-binary :all: --no-deps
math-verify``). Taken are the cases with one gold answer and one box: math-verify reads several boxes as a list and
searches texts without a box for something readable, both of which an episode here does not do. Every difference is
printed; ``docs/grading.md`` lists them with their reasons.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

from agentrl_envs.answers import last_boxed
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.types import Verdict


def cases_in(path: Path) -> Iterator[tuple[str, str, bool]]:
    """``(gold, answer, expected)`` of every parametrization whose first three values they are."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and len(decorator.args) == 2:
                yield from rows_of(decorator.args[1])


def rows_of(table: ast.expr) -> Iterator[tuple[str, str, bool]]:
    """The rows that are written out."""
    for row in table.elts if isinstance(table, ast.List) else ():
        try:
            values = ast.literal_eval(row)
        except ValueError:
            continue
        if isinstance(values, tuple) and len(values) >= 3 and all(isinstance(text, str) for text in values[:2]):
            yield values[0], values[1], bool(values[2])


def is_one_box(gold: str, answer: str) -> bool:
    """Whether the answer has one box, and the gold answer one box or one formula."""
    boxes = gold.count(r"\boxed")
    formulas = len(re.findall(r"(?<!\\)\$+", gold)) // 2
    one_gold = boxes == 1 if boxes else formulas <= 1 and len(gold) < 200
    return one_gold and answer.count(r"\boxed") == 1


async def compare(cases: list[tuple[str, str, bool]]) -> int:
    """Print every difference; their number."""
    grader = Grader(GraderSettings())
    different = 0
    for gold, answer, expected in cases:
        verdict = await grader.grade(last_boxed(answer), last_boxed(gold) or gold)
        if (verdict is Verdict.CORRECT) != expected:
            different += 1
            print(
                f"{verdict.value}, expected {expected}: {last_boxed(answer)!r} for {(last_boxed(gold) or gold)[:200]!r}"
            )
    await grader.close()
    return different


def main() -> None:
    """Print the differences and their number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    found = [case for path in parser.parse_args().files for case in cases_in(path)]
    cases = [case for case in found if is_one_box(case[0], case[1])]
    different = asyncio.run(compare(cases))
    print(f"{len(found)} cases, {len(cases)} with one gold answer and one box: {len(cases) - different} agree")


if __name__ == "__main__":
    main()
