"""A reward for every turn of ``builtin:horizon``: what was looked at, beside the answer at the end."""

from __future__ import annotations

import ast
import re

from agentrl.problems.demonstrations.formulas import Formula
from agentrl_envs.protocols.fences import first_python_block
from agentrl_envs.rewards import Conversation, Message
from agentrl_envs.types import Problem, Verdict

_LOOKS = ("box", "key", "test", "add")
_HORIZON = re.compile(r"_(\d+)$")


def look_rewards(problem: Problem, conversation: Conversation, verdict: Verdict | None) -> list[float]:
    """One share for each turn that looks at something for the first time, of as many as the task has looks.

    A task of N turns has N - 1 looks, so the values add up to at most 1. A look is a program that is one call of
    ``box``, ``key``, ``test`` or ``add``, whose first argument is a whole number, or arithmetic with such, that no
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
        match ast.parse((block and block.program) or "").body:
            case [ast.Expr(ast.Call(func=ast.Name(id=function), args=[first, *_]))] if function in _LOOKS:
                argument = Formula.parse(ast.unparse(first)).value(floor=True)
            case _:
                return None
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # a FormulaError is a ValueError
        return None
    if function != "key":
        return argument
    named = [int(text) for text in re.findall(r"\d+", problem.statement)]
    return argument if named and min(named) <= argument <= max(named) else None
