r"""Records shared by environments, graders and trainers: problems, steps, verdicts and ends of rollouts.

>>> problem = Problem(id="toy-0", statement="What is 2 + 3?", answer="5", source="toy")
>>> Step(observation="\nCode execution result: 5\n", reward=0.0, ended=None).ended is None
True
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn, SupportsFloat, TypedDict


class Ended(StrEnum):
    """How a rollout ended. Truncation is not an error, and an error is not a wrong answer."""

    ANSWERED = "answered"
    STOPPED = "stopped"  # end of sequence without an answer
    VOID_TURN = "void_turn"  # a turn with neither a program nor an answer
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    DEADLINE = "deadline"
    FORKED = "forked"  # the rollout forked, and continues in branches
    CANCELLED = "cancelled"
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"

    @property
    def is_truncation(self) -> bool:
        """True if a limit, rather than the policy, ended the rollout."""
        return self in (Ended.TURN_LIMIT, Ended.TOKEN_LIMIT, Ended.DEADLINE)

    @property
    def is_excluded(self) -> bool:
        """True if the rollout failed for reasons outside the policy. Rewards, baselines and averages ignore it."""
        return self in (Ended.CANCELLED, Ended.INFRASTRUCTURE_FAILURE)


MALFORMED = "malformed"
"""Outcome of a tool call that cannot be executed because of its form or its arguments."""


class Verdict(StrEnum):
    """Result of grading an answer. Only ``CORRECT`` earns a reward.

    ``ANSWER_TIMEOUT``: the answer caused the comparison to exceed the grader's CPU time or memory. The answer counts as
    wrong. ``GRADER_TIMEOUT``: the reference answer alone exceeds the limits, or grading processes hang.
    ``GRADER_TIMEOUT`` and ``UNPARSABLE_GOLD`` exclude the rollout, because they do not depend on the answer.
    """

    CORRECT = "correct"
    INCORRECT = "incorrect"
    NO_ANSWER = "no_answer"
    UNPARSABLE_ANSWER = "unparsable_answer"
    ANSWER_TIMEOUT = "answer_timeout"
    UNPARSABLE_GOLD = "unparsable_gold"
    GRADER_TIMEOUT = "grader_timeout"

    @property
    def is_excluded(self) -> bool:
        """True if the answer could not be graded for reasons outside the policy."""
        return self in (Verdict.UNPARSABLE_GOLD, Verdict.GRADER_TIMEOUT)


class ChatMessage(TypedDict):
    """One message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem, with its reference answer if there is one.

    ``setup`` is Python code that the sandbox runs before each program of the episode. It defines the functions and data
    in the statement. ``family`` is the generator's family, or the subject. ``info`` contains all other columns of the
    row as read-only JSON values. ``messages`` is a prompt of several messages; ``statement`` then contains the same
    prompt as one text.

    >>> Problem(id="0", statement="How many?", answer=None, source="shop", info={"db": "shop.sqlite"}).info["db"]
    'shop.sqlite'
    """

    id: str
    statement: str
    answer: str | None
    source: str
    family: str = ""
    setup: str = ""
    info: Mapping[str, Any] = field(default_factory=dict, hash=False)
    messages: Sequence[ChatMessage] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "info", freeze(self.info))
        object.__setattr__(self, "messages", freeze(self.messages))


MAX_REWARD = 1e6
"""Largest magnitude of a turn's reward. Limited because statistics sum squares of rewards in float32."""


def as_reward(value: object) -> float:
    """Return a reward as a float. Accepts numbers and booleans of Python, NumPy and torch.

    Raises ValueError for other types, for non-finite numbers, and for magnitudes above ``MAX_REWARD``. The message
    contains the value and the valid range.

    >>> as_reward(True)
    1.0
    """
    number = math.nan
    if isinstance(value, SupportsFloat):
        with contextlib.suppress(
            OverflowError, TypeError, ValueError
        ):  # raised for 10**400 or a tensor with several elements
            number = float(value)
    if not abs(number) <= MAX_REWARD:
        raise ValueError(f"{value!r:.100}; valid: a number from {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """Telemetry of one program or tool call.

    ``outcome`` is a value of ``agentrl_sandbox.client.Outcome``, or ``malformed`` for a call that could not be
    executed. ``printed`` is the end of a program's output, from which the answer can be extracted again. It may be
    longer than the output in the observation. ``exit_code`` is a program's exit status, or the negated number of the
    signal that killed the program.
    """

    outcome: str
    seconds: float
    truncated: bool = False
    printed: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Response of an episode to one turn of the model.

    ``observation`` is the text that the model reads next, or "". It is a `MarkedText` if it contains marks of a chat
    template, and it is appended even if the episode has ended. ``verdict`` and ``answer`` are set if an answer was
    graded.
    """

    observation: str
    reward: float
    ended: Ended | None
    verdict: Verdict | None = None
    answer: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=())


class NotJSONError(ValueError):
    """JSON cannot represent a value. The message contains the path and the type of the value."""


def _raise_read_only(self: object, *_: object, **__: object) -> NoReturn:
    kind = "dict" if isinstance(self, dict) else "list"
    raise TypeError(f"this {kind} is read-only: copy it (copy.deepcopy) and change the copy")


class _ReadOnlyDict(dict[str, object]):
    """A dict that cannot be changed. `copy.deepcopy` returns an ordinary dict."""

    __setitem__ = __delitem__ = __ior__ = _raise_read_only  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _raise_read_only

    def __deepcopy__(self, memo: object) -> dict[str, object]:
        return {key: thaw(value) for key, value in self.items()}

    def __reduce__(self) -> tuple[type[_ReadOnlyDict], tuple[dict[str, object]]]:
        return _ReadOnlyDict, (dict(self),)


class _ReadOnlyList(list[object]):
    """A list that cannot be changed. `copy.deepcopy` returns an ordinary list."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _raise_read_only
    append = clear = extend = insert = pop = remove = reverse = sort = _raise_read_only

    def __deepcopy__(self, memo: object) -> list[object]:
        return [thaw(value) for value in self]

    def __reduce__(self) -> tuple[type[_ReadOnlyList], tuple[list[object]]]:
        return _ReadOnlyList, (list(self),)


def freeze(value: object, path: str = "") -> object:
    """Return a copy of a JSON value with read-only lists and objects. ``path`` is the value's name in messages.

    Raises NotJSONError with the path of the first part that is not JSON.

    >>> freeze({"tables": ["a"]})["tables"].append("b")
    Traceback (most recent call last):
    TypeError: this list is read-only: copy it (copy.deepcopy) and change the copy
    """
    if value is None or isinstance(value, (str, bool, int, _ReadOnlyDict, _ReadOnlyList)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotJSONError(f"{path} is {value}")
        return value
    if isinstance(value, Mapping):
        return _ReadOnlyDict(_frozen_items(value, path))
    if isinstance(value, (list, tuple)):
        return _ReadOnlyList([freeze(item, f"{path}.{number}") for number, item in enumerate(value)])
    raise NotJSONError(f"{path} contains {type(value).__name__}")


def thaw(value: object) -> object:
    """Return an ordinary, writable copy of a read-only JSON value."""
    if isinstance(value, _ReadOnlyDict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, _ReadOnlyList):
        return [thaw(item) for item in value]
    return value


def _frozen_items(value: Mapping[object, object], path: str) -> Iterable[tuple[str, object]]:
    for key, item in value.items():
        if not isinstance(key, str):
            raise NotJSONError(f"{path} has the key {key!r}, which is not a string")
        yield key, freeze(item, f"{path}.{key}" if path else key)
