"""Families of ``builtin:horizon``: the same kinds of task with 1, 2, 4, 8 and 10 turns, and a reward per lookup.

The number in a family's name is the maximum number of turns of the demonstrated solution, including the answer. Except
at the first level, values are hidden behind functions in ``Problem.setup`` that **print** them. The model can therefore
write a turn only after reading the previous observation. A guess is correct with a probability of about 1 in 90.

============= ==========================================================================================
``debug_N``   a program in the statement is wrong; ``test(n)`` shows single correct values (N = 1, 2, 4)
``chain_N``   every box shows the number of the next box, and the last box shows the answer
``sum_N``     the contents of N - 1 boxes, added in the last turn (N = 2, 4)
``total_N``   the contents of N - 1 boxes, added box by box: each turn passes on the sum so far (N from 4)
``search_N``  one of 2 ** (N - 1) - 1 keys opens a box; ``key(n)`` shows a direction or the content (N from 4)
============= ==========================================================================================
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from random import Random

from agentrl.problems.demonstrations import boxed_answer_turn, final_answer_turn
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
from agentrl_envs.protocols.texts import first_python_block
from agentrl_envs.rewards import Conversation, Message
from agentrl_envs.types import Problem, Verdict

HORIZONS = (1, 2, 4, 8, 10)


def _draw_secrets(rng: Random, count: int) -> list[int]:
    return rng.sample(range(SECRET_RANGE[0], SECRET_RANGE[1] + 1), count)


def _chain_family(turns: int) -> ExerciseFamily:
    def solve(rng: Random, numbers: Numbers) -> Solution:
        boxes = [numbers["a"], *(box for box in _draw_secrets(rng, turns) if box != numbers["a"])][:turns]
        *path, end = boxes
        contents = dict(zip(path, [*map(str, path[1:]), f"end {end}"], strict=True))
        shown = [call_turn(f"box({box})", contents[box]) for box in path]
        return Solution(end, (*shown, boxed_answer_turn(end)), lookup_function_code("box", contents))

    return ExerciseFamily(
        name=f"chain_{turns}",
        draw=lambda rng: {"a": rng.randint(10, 99)},
        solve=solve,
        phrasings=(
            "{n} hides {t}. box({a}) shows the number of the next box, and so on. What number stands at the end?",
            "box({a}) shows the box in which {n} has put the number of the next. What number stands at the end?",
        ),
    )


def _sum_family(turns: int) -> ExerciseFamily:
    count = turns - 1

    def solve(rng: Random, numbers: Numbers) -> Solution:
        contents = _fill_boxes(rng, numbers["a"], count)
        shown = [call_turn(f"box({box})", held) for box, held in contents.items()]
        last = final_answer_turn("+".join(map(str, contents.values())))
        return Solution(sum(contents.values()), (*shown, last), lookup_function_code("box", contents))

    return ExerciseFamily(
        name=f"sum_{turns}",
        draw=lambda rng: _draw_boxes(rng, count),
        solve=solve,
        phrasings=(
            "box({a}) to box({b}) show the {t} of {n}. How many {t} are there together?",
            "{n} has {t} in the boxes {a} to {b}: box({a}) and so on show how many. How many {t} does {n} have?",
        ),
    )


def _total_family(turns: int) -> ExerciseFamily:
    count = turns - 1

    def solve(rng: Random, numbers: Numbers) -> Solution:
        contents = _fill_boxes(rng, numbers["a"], count)
        so_far, shown = 0, []
        for box, held in contents.items():
            shown.append(call_turn(f"add({box},{so_far})", so_far + held))
            so_far += held
        setup = f"def add(n, so_far):\n    print(so_far + {contents!r}[n])\n"
        return Solution(so_far, (*shown, boxed_answer_turn(so_far)), setup)

    return ExerciseFamily(
        name=f"total_{turns}",
        draw=lambda rng: _draw_boxes(rng, count),
        solve=solve,
        phrasings=(
            "add({a},0) shows the {t} in box {a}, add(n, so far) those up to box n. How many {t} are there up to {b}?",
            "{n} has {t} in the boxes {a} to {b}: begin with add({a},0), go on with add(n, so far). How many {t}?",
        ),
    )


def _fill_boxes(rng: Random, first: int, count: int) -> dict[int, int]:
    """Return the contents of ``count`` boxes whose numbers start at ``first``."""
    return dict(zip(range(first, first + count), _draw_secrets(rng, count), strict=True))


def _draw_boxes(rng: Random, count: int) -> Numbers:
    first = rng.randint(10, 100 - count)
    return {"a": first, "b": first + count - 1}


def _search_family(turns: int) -> ExerciseFamily:
    span = 2 ** (turns - 1) - 1

    def solve(rng: Random, numbers: Numbers) -> Solution:
        below, above, held = numbers["a"], numbers["b"], rng.randint(*SECRET_RANGE)
        right = rng.randint(below + 1, above - 1)
        shown = []
        while (middle := (below + above) // 2) != right:
            less = right < middle
            shown.append(call_turn(f"key(({below}+{above})//2)", f"less {middle}" if less else f"more {middle}"))
            below, above = (below, middle) if less else (middle, above)
        shown.append(call_turn(f"key(({below}+{above})//2)", f"open {held}"))
        return Solution(held, (*shown, boxed_answer_turn(held)), _key_function_code(right, held))

    return ExerciseFamily(
        name=f"search_{turns}",
        draw=lambda rng: _draw_bounds(rng, span),
        solve=solve,
        phrasings=(
            "One key between {a} and {b} opens a box. key(n) shows if it is more or less than n. What is in the box?",
            "{n} has {t} in a box. One key between {a} and {b} opens it: try key(n). How many {t} are in it?",
        ),
    )


def _draw_bounds(rng: Random, span: int) -> Numbers:
    below = rng.randint(10, 99)
    return {"a": below, "b": below + span + 1}


def _key_function_code(right: int, held: int) -> str:
    return f"def key(n):\n    print(*(['open', {held}] if n == {right} else ['less' if n > {right} else 'more', n]))\n"


def _solve_debug_sign(rng: Random, numbers: Numbers) -> Solution:
    a, b = numbers["a"], numbers["b"]
    return Solution(a + b, (final_answer_turn(f"{a}+{b}"),))


def _solve_hidden_shift(rng: Random, numbers: Numbers) -> Solution:
    """Solve a task about f(n) = n + s with a hidden s. One test reveals s."""
    b, shift = numbers["b"], rng.randint(*SECRET_RANGE)
    turns = (call_turn("test(0)", shift), final_answer_turn(f"{shift}+{b}"))
    return Solution(shift + b, turns, _test_function_code(f"n + {shift}"))


def _solve_quadratic(rng: Random, numbers: Numbers) -> Solution:
    """Solve a task about f(n) = p + q n + r n (n - 1) / 2. Three tests reveal p, q and r."""
    b = numbers["b"]
    p, q, r = rng.randint(10, 40), rng.randint(1, 15), rng.randint(1, 9)
    values = [p, p + q, p + 2 * q + r]
    shown = [call_turn(f"test({n})", value) for n, value in enumerate(values)]
    u, v, w = values
    last = final_answer_turn(f"{u}+({v}-{u})*{b}+({w}-{v}-{v}+{u})*{b}*({b}-1)//2")
    answer = p + q * b + r * b * (b - 1) // 2
    return Solution(answer, (*shown, last), _test_function_code(f"{p} + {q}*n + {r}*n*(n-1)//2"))


def _test_function_code(expression: str) -> str:
    return f"def test(n):\n    print({expression})\n"


_DEBUG_FAMILIES = (
    ExerciseFamily(
        name="debug_1", draw=draw_descending_pair, solve=_solve_debug_sign,
        phrasings=(
            "{n} gets {b} {t} more. The program final_answer({a}-{b}) is wrong. What is right?",
            "{n} has {a} {t} and finds {b}. The program final_answer({a}-{b}) is wrong. What is right?",
        ),
    ),
    ExerciseFamily(
        name="debug_2", draw=draw_descending_pair, solve=_solve_hidden_shift,
        phrasings=(
            "f(n)=n+{a} is wrong: test(n) shows what n and some number make. What is f({b})?",
            "{n} adds {a}, which is wrong. test(n) shows n and the right number added. What is it for {b}?",
        ),
    ),
    ExerciseFamily(
        name="debug_4", draw=lambda rng: {"a": rng.randint(2, 9), "b": rng.randint(3, 99)}, solve=_solve_quadratic,
        phrasings=(
            "f(n)=n*n+{a} is wrong: test(n) shows the right values of a square. What is f({b})?",
            "{n} took {a}+n*n, which is wrong. test(n) shows the right square. What is it for {b}?",
        ),
    ),
)  # fmt: skip

_ALL_FAMILIES = (
    *_DEBUG_FAMILIES,
    *(_chain_family(turns) for turns in HORIZONS[1:]),
    *(_sum_family(turns) for turns in HORIZONS[1:3]),  # a tiny policy cannot copy more numbers reliably
    # Start at four turns: at two turns, `_total_family` would have a single box and `_search_family` a single key.
    *(family(turns) for turns in HORIZONS[2:] for family in (_total_family, _search_family)),
)

DEFAULT_FAMILIES = ("debug_2", "chain_2", "sum_2", "chain_4")
"""Families with two and four turns, which a tiny policy learns within minutes."""

HORIZON_FAMILIES: Mapping[str, ExerciseFamily] = {family.name: family for family in _ALL_FAMILIES}


class HorizonSource(ExerciseSource):
    """Tasks of graded difficulty that need one to ten turns."""

    builtin = "horizon"
    all_families = HORIZON_FAMILIES
    default_families = DEFAULT_FAMILIES


_LOOKUP_FUNCTIONS = ("box", "key", "test", "add")
_TURNS_IN_FAMILY_NAME = re.compile(r"_(\d+)$")


def lookup_rewards(problem: Problem, conversation: Conversation, verdict: Verdict | None) -> list[float]:
    """Return the reward of each model turn: 1 / (N - 1) for each of the N - 1 lookups that a task of N turns needs.

    A lookup is a program that consists of one call to ``box``, ``key``, ``test`` or ``add``. The first argument must be
    an integer, or arithmetic with integers, with a value that no earlier lookup used. The output must contain a value.
    An empty box, an error, and a key outside the range in the statement earn 0. The rewards sum to at most 1.

    N is the number at the end of the family's name. A search that ends early earns less than 1 here, but its answer
    still counts in the environment's reward. Families without such a number, such as ``word``, have no lookups.
    """
    horizon = _TURNS_IN_FAMILY_NAME.search(problem.family)
    lookups = int(horizon[1]) - 1 if horizon else 0
    seen: set[int] = set()
    rewards: list[float] = []
    for index, message in enumerate(conversation.turns):
        if message.role != "assistant":
            continue
        after = conversation.turns[index + 1] if index + 1 < len(conversation.turns) else None
        argument = _parse_lookup_argument(message, after, problem)
        new = argument is not None and argument not in seen and len(seen) < lookups
        rewards.append(1 / lookups if new else 0.0)
        if new and argument is not None:
            seen.add(argument)
    return rewards


def _parse_lookup_argument(turn: Message, answer: Message | None, problem: Problem) -> int | None:
    """Return the number that the turn looks up, or None if the turn is not a lookup."""
    if answer is None or not re.search(r"\d", answer.text) or "Error" in answer.text:
        return None
    block = first_python_block(turn.text)
    try:
        match ast.parse((block and block.program) or "").body:
            case [ast.Expr(ast.Call(func=ast.Name(id=function), args=[first, *_]))] if function in _LOOKUP_FUNCTIONS:
                argument = Formula.parse(ast.unparse(first)).value(floor=True)
            case _:
                return None
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a FormulaError is a ValueError
        return None
    if function != "key":
        return argument
    named = [int(text) for text in re.findall(r"\d+", problem.statement)]
    return argument if named and min(named) <= argument <= max(named) else None
