r"""Measure how often the grader, and math-verify alone, return the right verdict for pairs of answers.

    python benchmarks/grading_agreement.py tests/answer_families.py
    python benchmarks/grading_agreement.py math_verify-0.9.0/tests/*.py

A file contains a table ``FAMILIES``, as ``tests/answer_families.py`` does, or pytest parametrizations whose first three
values are ``(gold, answer, expected)``, as math-verify's own tests do (``pip download --no-binary :all: --no-deps
math-verify``). Of these, only cases with one gold answer and one box count: math-verify reads several boxes as a list
and searches texts without a box for an answer, but episodes do neither. The output lists every wrong verdict of the
grader, then a table of right verdicts, false positives and false negatives.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from math_verify import parse, verify

from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.protocols.texts import last_boxed_answer
from agentrl_envs.types import Verdict

Case = tuple[str, str, str, bool]
"""``(family, answer, gold, equal)``"""


def cases_in(path: Path) -> Iterator[Case]:
    """Yield the cases of a table of families and of all parametrizations in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "FAMILIES":
            assert node.value is not None
            yield from family_cases(ast.literal_eval(node.value))
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(decorator, ast.Call) and len(decorator.args) == 2:
                yield from parametrized(path.name, decorator.args[1])


def family_cases(families: dict[str, str]) -> Iterator[Case]:
    """Yield the cases in lines such as ``= answer | gold`` (equal) and ``! answer | gold`` (different)."""
    for family, lines in families.items():
        for line in lines.strip().splitlines():
            answer, _, gold = line.strip()[2:].rpartition(" | ")
            yield family, answer, gold, line.strip()[0] == "="


def parametrized(family: str, table: ast.expr) -> Iterator[Case]:
    """Yield the literal rows of a parametrization that have one gold answer and one box."""
    for row in table.elts if isinstance(table, ast.List) else ():
        try:
            values = ast.literal_eval(row)
        except ValueError:
            continue
        if isinstance(values, tuple) and len(values) >= 3 and all(isinstance(text, str) for text in values[:2]):
            gold, answer, expected = values[:3]
            if is_one_box(gold, answer):
                yield family, last_boxed_answer(answer) or "", last_boxed_answer(gold) or gold, bool(expected)


def is_one_box(gold: str, answer: str) -> bool:
    """Return True if the answer has one box, and the gold answer one box or one formula."""
    boxes = gold.count(r"\boxed")
    formulas = len(re.findall(r"(?<!\\)\$+", gold)) // 2
    one_gold = boxes == 1 if boxes else formulas <= 1 and len(gold) < 200
    return one_gold and answer.count(r"\boxed") == 1


async def ours(cases: list[Case]) -> list[Verdict]:
    """Return the grader's verdict on each case."""
    grader = Grader(GraderSettings())
    try:
        return [await grader.grade(answer, gold) for _, answer, gold, _ in cases]
    finally:
        await grader.close()


def by_math_verify(answer: str, gold: str) -> bool:
    """Return whether math-verify alone, without its timeouts, accepts the answer."""
    forms = [parse("\\boxed{" + text + "}", parsing_timeout=None) for text in (gold, answer)]
    return bool(verify(*forms, timeout_seconds=None))


def main() -> None:
    """Print the wrong verdicts and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    cases = [case for path in parser.parse_args().files for case in cases_in(path)]
    logging.disable(logging.CRITICAL)
    counts: Counter[tuple[str, str]] = Counter()
    for (family, answer, gold, equal), verdict in zip(cases, asyncio.run(ours(cases)), strict=True):
        if (verdict is Verdict.CORRECT) != equal:
            print(f"{verdict.value}, expected {'equal' if equal else 'different'}: {answer!r} for {gold[:200]!r}")
        for side, said in (("ours", verdict is Verdict.CORRECT), ("alone", by_math_verify(answer, gold))):
            wrong = "" if said == equal else " false positive" if said else " false negative"
            for row in (family, "all"):
                counts[row, side + wrong] += 1
    columns = [side + kind for side in ("ours", "alone") for kind in ("", " false positive", " false negative")]
    print("\n| family | pairs | right | false positives | false negatives | math-verify right | f. p. | f. n. |")
    print("|---|" + "---:|" * 7)
    for row in [*dict.fromkeys(family for family, *_ in cases), "all"]:
        numbers = [counts[row, column] for column in columns]
        print(f"| {row} | {sum(numbers[:3])} | {' | '.join(map(str, numbers))} |")


if __name__ == "__main__":
    main()
