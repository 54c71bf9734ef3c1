"""Demonstrations: problems with the turns of a good solution, used as data for the supervised cold start.

One JSON object per line::

    {"id": "a-0", "problem": "Box 7 ...", "answer": "43", "setup": "def open_box...",
     "turns": [{"model": "```py\\nopen_box(7)\\n```", "observation": "\\nCode execution result: 48\\n"},
               {"model": "```py\\nfinal_answer(48-5)\\n```", "observation": ""}]}

The problem's field may have another of its usual names (`question`). ``setup`` and a turn's ``observation`` are
optional (default ``""``); so is ``answer``, where nothing compares answers.
Other columns stand in `Problem.info`. Where several turns have no observation at all, the cold start plays them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.problems.fields import USUAL_FIELDS
from agentrl.problems.problem_errors import EmptyProblemsError, ProblemFieldError
from agentrl.problems.rows import read_jsonl
from agentrl_envs.types import Problem

_FIELDS = frozenset({"id", "answer", "setup", "family", "turns"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownTurn:
    """The text that the model writes and the observation that follows ("" after the last turn, which has none)."""

    model: str
    observation: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A problem and the turns of one good solution.

    >>> problem = Problem(id="toy-0", statement="What is 2 + 3?", answer="5", source="toy")
    >>> shown = Demonstration(problem=problem, turns=(ShownTurn(model=program("final_answer(2+3)")),))
    >>> shown.text
    'What is 2 + 3?\\n```py\\nfinal_answer(2+3)\\n```'
    """

    problem: Problem
    turns: tuple[ShownTurn, ...]
    place: str = ""
    """File and line, where it was read from one."""

    @property
    def is_played(self) -> bool:
        """Whether the observations are missing: the environment writes them when it plays the turns."""
        return len(self.turns) > 1 and not any(turn.observation for turn in self.turns)

    @property
    def text(self) -> str:
        """Statement, model texts and observations as one string, on which a tokenizer is trained."""
        return self.problem.statement + "\n" + "".join(turn.model + turn.observation for turn in self.turns)


def program(code: str) -> str:
    """``code`` as a model turn, in a closed fence."""
    return f"```py\n{code}\n```"


def observation(output: str) -> str:
    """A program's output as the SimpleTIR protocol shows it."""
    return f"\nCode execution result: {output}\n"


def read_demonstrations(path: str | Path) -> list[Demonstration]:
    """Read a JSONL file with the schema above.

    Raises ProblemFileError (missing file, malformed line), ProblemFieldError (a row that is not a demonstration) and
    EmptyProblemsError. Messages name the file and the line.
    """
    source = Path(path).stem
    found = [_from_row(row, place, source) for place, row in read_jsonl(Path(path))]
    if not found:
        raise EmptyProblemsError(f"{path}: no demonstrations in this file")
    return found


def _from_row(row: dict[str, Any], place: str, source: str) -> Demonstration:
    asked = next((name for name in USUAL_FIELDS["problem"] if row.get(name) is not None), "problem")
    for field in (asked, "answer") if row.get("answer") is not None else (asked,):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise ProblemFieldError(f"{place}: a demonstration needs a text {field!r}; fields there: {sorted(row)}")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ProblemFieldError(f"{place}: a demonstration needs a list 'turns' that is not empty")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get("model"), str) or not turn["model"]:
            raise ProblemFieldError(f"{place}: turn {number} needs a text 'model'")
        if not isinstance(turn.get("observation", ""), str):
            raise ProblemFieldError(f"{place}: turn {number}: 'observation' must be text")
    for field in ("setup", "family"):
        if not isinstance(row.get(field, ""), str):
            raise ProblemFieldError(f"{place}: {field!r} must be text")
    problem = Problem(
        id=str(row.get("id", place)),
        statement=row[asked],
        answer=row.get("answer"),
        source=source,
        family=row.get("family", ""),
        setup=row.get("setup", ""),
        info={name: value for name, value in row.items() if name not in _FIELDS | {asked}},
    )
    return Demonstration(
        problem=problem,
        turns=tuple(ShownTurn(model=turn["model"], observation=turn.get("observation", "")) for turn in turns),
        place=place,
    )
