"""A reward for every turn of ``builtin:horizon``: what was looked at, beside the answer at the end."""

from __future__ import annotations

import re

from agentrl_envs.rewards import Conversation, Message
from agentrl_envs.types import Problem, Verdict

_LOOK = re.compile(r"\b(?:box|key|test|add)\(([^()]*(?:\([^()]*\)[^()]*)*)\)")


def look_rewards(problem: Problem, conversation: Conversation, verdict: Verdict | None) -> list[float]:
    """One share for each turn that looks at something for the first time, of as many as the task has looks.

    A task of N turns has N - 1 looks, so the values add up to at most 1. A look is a call of ``box``, ``key``,
    ``test`` or ``add`` with a first argument that stood in no earlier call, which the sandbox answered: an empty box is
    none, nor is an error. It names the last horizon of a family, so a search that ends early earns less than 1 here;
    its answer counts in the environment's reward.
    """
    looks = int((problem.family or "_1").rpartition("_")[2]) - 1
    seen: set[str] = set()
    rewards: list[float] = []
    for place, message in enumerate(conversation.turns):
        if message.role != "assistant":
            continue
        after = conversation.turns[place + 1] if place + 1 < len(conversation.turns) else None
        new = len(seen) < looks and _new_look(message, after, seen)
        rewards.append(1 / looks if new else 0.0)
    return rewards


def _new_look(turn: Message, answer: Message | None, seen: set[str]) -> bool:
    """Whether the turn looks at something that is not in ``seen``, which then holds it."""
    found = _LOOK.search(turn.text)
    if found is None or answer is None or not re.search(r"\d", answer.text) or "Error" in answer.text:
        return False
    argument = found.group(1).replace(" ", "").partition(",")[0]
    if argument in seen:
        return False
    seen.add(argument)
    return True
