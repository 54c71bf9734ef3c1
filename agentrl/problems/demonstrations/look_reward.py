"""Per-turn reward of ``builtin:horizon`` for new observations, in addition to the reward of the answer."""

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
    """Return a reward for each model turn: 1 / (N - 1) for each of the N - 1 lookups that a task of N turns needs.

    A lookup is a program that consists of one call of ``box``, ``key``, ``test`` or ``add``. Its first argument must be
    an integer, or arithmetic with integers, that no earlier lookup had, and its output must contain a value. An empty
    box, an error, and a key outside the range in the statement earn 0, so the rewards sum to at most 1.

    N is the last horizon in the name of the family. A search that ends early therefore earns less than 1 here, but its
    answer counts in the environment's reward. Families without a horizon, such as ``word``, have no lookups.
    """
    horizon = _HORIZON.search(problem.family)
    looks = int(horizon[1]) - 1 if horizon else 0
    seen: set[int] = set()
    rewards: list[float] = []
    for index, message in enumerate(conversation.turns):
        if message.role != "assistant":
            continue
        after = conversation.turns[index + 1] if index + 1 < len(conversation.turns) else None
        argument = _look(message, after, problem)
        new = argument is not None and argument not in seen and len(seen) < looks
        rewards.append(1 / looks if new else 0.0)
        if new and argument is not None:
            seen.add(argument)
    return rewards


def _look(turn: Message, answer: Message | None, problem: Problem) -> int | None:
    """Return the number that the turn looks up, or None if the turn is not a lookup."""
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
