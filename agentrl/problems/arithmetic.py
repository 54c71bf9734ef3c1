"""Families of ``builtin:arithmetic``: word problems with statements, answers, hidden values and solutions.

Plain families state every number, and a program computes the answer. Reveal families hide two-digit values behind
functions defined in ``Problem.setup``. These functions **print** the value and return None, so the model can write the
answer only in a later turn. A guess is correct with a probability of about 1 in 90.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from agentrl.problems.demonstrations import DemonstrationTurn, boxed_answer_turn, final_answer_turn
from agentrl.problems.exercises import (
    SECRET_RANGE,
    ExerciseFamily,
    ExerciseSource,
    Numbers,
    Solution,
    call_turn,
    draw_descending_pair,
    lookup_function_code,
)
from agentrl.problems.word_problems import Formula


def _expression_family(
    name: str, draw: Callable[[Random], Numbers], expression: str, *phrasings: str
) -> ExerciseFamily:
    """Build a family whose answer is the value of ``expression``."""

    def solve(rng: Random, numbers: Numbers) -> Solution:
        written = expression.format(**numbers)
        answer = Formula.parse(written).value()
        return Solution(answer, _answer_turns(rng, written, answer))

    return ExerciseFamily(name=name, phrasings=phrasings, draw=draw, solve=solve)


def _answer_turns(rng: Random, expression: str, answer: int) -> tuple[DemonstrationTurn, ...]:
    """Return a turn that submits the answer (probability 0.7), or a turn that prints it and a turn that states it."""
    if rng.random() < 0.7:
        return (final_answer_turn(expression),)
    return (
        call_turn(f"print({expression})", answer),
        boxed_answer_turn(answer),
    )


def _draw_secret(rng: Random) -> int:
    return rng.randint(*SECRET_RANGE)


def _one_secret_family(
    name: str,
    function: str,
    draw: Callable[[Random], Numbers],
    sign: str,
    *phrasings: str,
) -> ExerciseFamily:
    """Build a family whose answer combines the hidden value of object ``a`` and the stated ``b`` in one operation."""

    def solve(rng: Random, numbers: Numbers) -> Solution:
        a, b, secret = numbers["a"], numbers["b"], _draw_secret(rng)
        written = f"{secret}{sign}{b}"
        turns = (call_turn(f"{function}({a})", secret), final_answer_turn(written))
        return Solution(Formula.parse(written).value(), turns, lookup_function_code(function, {a: secret}))

    return ExerciseFamily(name=name, phrasings=phrasings, draw=draw, solve=solve)


def _solve_two_boxes(rng: Random, numbers: Numbers) -> Solution:
    a, b, first, second = numbers["a"], numbers["b"], _draw_secret(rng), _draw_secret(rng)
    turns = (call_turn(f"box({a})", first), call_turn(f"box({b})", second), final_answer_turn(f"{first}+{second}"))
    return Solution(first + second, turns, lookup_function_code("box", {a: first, b: second}))


def _solve_note(rng: Random, numbers: Numbers) -> Solution:
    a, box, held = numbers["a"], _draw_secret(rng), _draw_secret(rng)
    turns = (call_turn(f"note({a})", box), call_turn(f"box({box})", held), boxed_answer_turn(held))
    return Solution(held, turns, lookup_function_code("note", {a: box}) + lookup_function_code("box", {box: held}))


def _draw_uniform(**bounds: tuple[int, int]) -> Callable[[Random], Numbers]:
    return lambda rng: {key: rng.randint(low, high) for key, (low, high) in bounds.items()}


def _draw_divisible(rng: Random) -> Numbers:
    b, quotient = rng.randint(2, 9), rng.randint(2, 99)
    return {"a": b * quotient, "b": b}


def _draw_shared_then_more(rng: Random) -> Numbers:
    return {**_draw_divisible(rng), "c": rng.randint(2, 99)}


def _draw_boxes_then_less(rng: Random) -> Numbers:
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    return {"a": a, "b": b, "c": rng.randint(2, min(99, a * b))}


def _draw_price_and_payment(rng: Random) -> Numbers:
    a, b = rng.randint(2, 20), rng.randint(2, 9)
    return {"a": a, "b": b, "c": a * b + rng.randint(1, 50)}


def _draw_gathered_then_packed(rng: Random) -> Numbers:
    d, each, c, b = rng.randint(2, 9), rng.randint(2, 20), rng.randint(2, 40), rng.randint(2, 40)
    a = d * each + c - b
    return {"a": a, "b": b, "c": c, "d": d} if a >= 2 else _draw_gathered_then_packed(rng)


def _draw_distinct_pair(rng: Random) -> Numbers:
    a, b = rng.sample(range(2, 100), 2)
    return {"a": a, "b": b}


_draw_two_numbers = _draw_uniform(a=(2, 99), b=(2, 99))

_ALL_FAMILIES = (
    _expression_family(
        "add", _draw_two_numbers, "{a}+{b}",
        "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?",
        "There are {a} {t} here. {n} brings {b} more. How many {t} are there?",
    ),
    _expression_family(
        "subtract", draw_descending_pair, "{a}-{b}",
        "{n} has {a} {t} and gives away {b}. How many {t} are left?",
        "{n} had {a} {t} but lost {b} of them. How many {t} are left?",
    ),
    _expression_family(
        "multiply", _draw_two_numbers, "{a}*{b}",
        "{n} buys {a} boxes of {b} {t}. How many {t} is that?",
        "Each of {a} boxes holds {b} {t}. How many {t} are there?",
    ),
    _expression_family(
        "divide", _draw_divisible, "{a}//{b}",
        "{n} shares {a} {t} among {b} friends. How many {t} does each get?",
        "{n} packs {a} {t} into {b} equal boxes. How many {t} are in each?",
    ),
    _expression_family(
        "difference", draw_descending_pair, "{a}-{b}",
        "{n} has {a} {t}. {m} has {b}. How many more {t} does {n} have?",
        "{n} has {b} {t}. {m} has {a}. How many fewer {t} does {n} have?",
    ),
    _expression_family(
        "together", _draw_two_numbers, "{a}+{a}+{b}",
        "{n} has {a} {t}. {m} has {b} more than {n}. How many {t} do they have together?",
    ),
    _expression_family(
        "boxes_less", _draw_boxes_then_less, "{a}*{b}-{c}",
        "{n} buys {a} boxes of {b} {t} and gives away {c}. How many {t} are left?",
        "{n} has {a} boxes of {b} {t} and loses {c} {t}. How many {t} are left?",
    ),
    _expression_family(
        "boxes_more", _draw_uniform(a=(2, 20), b=(2, 20), c=(2, 99)), "{c}+{a}*{b}",
        "{n} has {c} {t} and buys {a} boxes of {b}. How many {t} does {n} have now?",
    ),
    _expression_family(
        "share_more", _draw_shared_then_more, "{a}//{b}+{c}",
        "{n} shares {a} {t} among {b} friends. Each had {c}. How many {t} does each have now?",
    ),
    _expression_family(
        "change", _draw_price_and_payment, "{c}-{a}*{b}",
        "{t} cost {a} dollars each. {n} buys {b} and pays {c} dollars. How many dollars come back?",
    ),
    _expression_family(
        "two_kinds", _draw_uniform(a=(2, 20), b=(2, 20), c=(2, 20), d=(2, 20)),
        "{a}*{b}+{c}*{d}",
        "{n} buys {a} boxes of {b} {t} and {c} boxes of {d}. How many {t} is that?",
    ),
    _expression_family(
        "gather_pack", _draw_gathered_then_packed, "({a}+{b}-{c})//{d}",
        "{n} has {a} {t}, gets {b}, gives away {c} and packs the rest into {d} equal boxes. How many {t} are in each?",
    ),
    _one_secret_family(
        "box_take", "box", _draw_uniform(a=(2, 99), b=(2, 9)), "-",
        "box({a}) shows the {t} in box {a}. {n} takes {b}. How many {t} are left?",
        "Box {a} holds some {t}: box({a}) shows how many. {n} takes {b}. How many {t} are left?",
    ),
    _one_secret_family(
        "box_put", "box", _draw_two_numbers, "+",
        "box({a}) shows the {t} in box {a}. {n} adds {b}. How many {t} are in it now?",
    ),
    _one_secret_family(
        "price", "price", _draw_uniform(a=(2, 99), b=(2, 20)), "*",
        "price({a}) shows the price of toy {a}. What do {b} of them cost?",
        "{n} buys {b} of toy {a}. price({a}) shows what one costs. What does {n} pay?",
    ),
    ExerciseFamily(
        name="two_boxes", draw=_draw_distinct_pair, solve=_solve_two_boxes,
        phrasings=("box({a}) and box({b}) show the {t} in two boxes. How many {t} are there together?",),
    ),
    ExerciseFamily(
        name="note", draw=_draw_uniform(a=(2, 99)), solve=_solve_note,
        phrasings=("note({a}) shows the number n of a box. box(n) shows its {t}. How many {t} are in it?",),
    ),
)  # fmt: skip

FAMILIES: Mapping[str, ExerciseFamily] = {family.name: family for family in _ALL_FAMILIES}


class ArithmeticSource(ExerciseSource):
    """Word problems that need one to three turns.

    >>> source = ArithmeticSource(split="train", seed=0, families=["box_take"])
    >>> source.problem(3) == source.problem(3)
    True
    >>> source.demonstration(3).problem == source.problem(3)
    True
    """

    builtin = "arithmetic"
    all_families = FAMILIES
    default_families = tuple(FAMILIES)
