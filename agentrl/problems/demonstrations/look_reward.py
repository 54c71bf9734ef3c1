"""A reward for every turn of ``builtin:horizon``: what was looked at, beside the answer at the end."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from agentrl_envs.protocols.fences import first_python_block
from agentrl_envs.rewards import Conversation, Message
from agentrl_envs.types import Problem, Verdict

_LOOKS = ("box", "key", "test", "add")
_HORIZON = re.compile(r"_(\d+)$")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def look_rewards(problem: Problem, conversation: Conversation, verdict: Verdict | None) -> list[float]:
    """One share for each turn that looks at something for the first time, of as many as the task has looks.

    A task of N turns has N - 1 looks, so the values add up to at most 1. A look is a program that is one call of
    ``box``, ``key``, ``test`` or ``add``, whose first argument is a number, or a sum or product of numbers, that no
    earlier look had, and which the sandbox answered: an empty box is none, nor is an error or a key outside of the
    numbers that the statement names. It names the last horizon of a family, so a search that ends early earns less than
    1 here; its answer counts in the environment's reward. A family without a horizon, such as ``word``, has no looks.
    """
    horizon = _HORIZON.search(problem.family)
    looks = int(horizon[1]) - 1 if horizon else 0
    seen: set[int] = set()
    rewards: list[float] = []
    for place, message in enumerate(conversation.turns):
        if message.role != "assistant":
            continue
        after = conversation.turns[place + 1] if place + 1 < len(conversation.turns) else None
        argument = _look(message, after, problem)
        new = argument is not None and argument not in seen and len(seen) < looks
        rewards.append(1 / looks if new else 0.0)
        if new and argument is not None:
            seen.add(argument)
    return rewards


def _look(turn: Message, answer: Message | None, problem: Problem) -> int | None:
    """The number that the turn looks at, or None if it is no look."""
    if answer is None or not re.search(r"\d", answer.text) or "Error" in answer.text:
        return None
    block = first_python_block(turn.text)
    try:
        statements = ast.parse((block and block.program) or "").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match statements:
        case [ast.Expr(ast.Call(func=ast.Name(id=function), args=[first, *_]))] if function in _LOOKS:
            argument = _number(first)
        case _:
            return None
    if function == "key" and argument is not None:
        named = [int(text) for text in re.findall(r"\d+", problem.statement)]
        return argument if named and min(named) <= argument <= max(named) else None
    return argument


def _number(node: ast.expr) -> int | None:
    """The value of a whole number, or of + - * // of such; None for anything else.

    >>> _number(ast.parse("(50 + 58) // 2", mode="eval").body)
    54
    """
    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return value
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            a, b = _number(left), _number(right)
            if a is None or b is None or (isinstance(kind, ast.FloorDiv) and b == 0):
                return None
            return _OPERATORS[type(kind)](a, b)
        case _:
            return None
