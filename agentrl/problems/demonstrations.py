"""Demonstrations: problems with the turns of a good solution, for the supervised cold start.

One JSON object per line::

    {"id": "a-0", "problem": "Box 7 ...", "answer": "43", "setup": "def open_box...",
     "turns": [{"model": "```py\nopen_box(7)\n```", "observation": "\nCode execution result: 48\n"},
               {"model": "```py\nfinal_answer(48-5)\n```", "observation": ""}]}

Statement, answer, id and other columns are read as in a file of problems (`agentrl.problems.rows`), but ``answer`` is
optional. ``setup`` and a turn's ``observation`` are optional (default ``""``). If a demonstration has several turns and
no observations, the cold start executes the turns to produce the observations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.problems.rows import USUAL_FIELDS, EmptyProblemsError, ProblemFieldError, problem_from_row, read_jsonl
from agentrl_envs.types import Problem

_DEMONSTRATION_FIELDS = frozenset({"setup", "family", "turns"})


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationTurn:
    """A model turn and the observation that follows it ("" after the last turn)."""

    model: str
    observation: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A problem and the turns of one good solution.

    >>> problem = Problem(id="toy-0", statement="What is 2 + 3?", answer="5", source="toy")
    >>> shown = Demonstration(problem=problem, turns=(DemonstrationTurn(model=format_program("final_answer(2+3)")),))
    >>> shown.text
    'What is 2 + 3?\\n```py\\nfinal_answer(2+3)\\n```'
    """

    problem: Problem
    turns: tuple[DemonstrationTurn, ...]
    location: str = ""
    """File and line if the demonstration was read from a file."""

    @property
    def needs_observations(self) -> bool:
        """True if the observations are missing, so that the environment must execute the turns."""
        return len(self.turns) > 1 and not any(turn.observation for turn in self.turns)

    @property
    def text(self) -> str:
        """Statement, model texts and observations as one string, for training a tokenizer."""
        return self.problem.statement + "\n" + "".join(turn.model + turn.observation for turn in self.turns)


def format_program(code: str) -> str:
    """Return a model turn that contains ``code`` in a closed fence."""
    return f"```py\n{code}\n```"


def format_observation(output: str) -> str:
    """Format a program's output as an observation of the SimpleTIR protocol."""
    return f"\nCode execution result: {output}\n"


def final_answer_turn(expression: str) -> DemonstrationTurn:
    """Return the turn whose program submits the value of ``expression`` as the answer."""
    return DemonstrationTurn(model=format_program(f"final_answer({expression})"))


def boxed_answer_turn(answer: int) -> DemonstrationTurn:
    """Return the turn that states the answer without a program."""
    return DemonstrationTurn(model=f"\\boxed{{{answer}}}")


def read_demonstrations(path: str | Path) -> list[Demonstration]:
    """Read demonstrations from a JSONL file with the schema in the module docstring.

    Raises ProblemFileError for a missing file or a malformed line, ProblemFieldError for a row that is not a
    demonstration, and EmptyProblemsError for an empty file. Messages contain the file and the line.
    """
    source = Path(path).stem
    demonstrations = [_demonstration_from_row(row, location, source) for location, row in read_jsonl(Path(path))]
    if not demonstrations:
        raise EmptyProblemsError(f"{path}: the file contains no demonstrations")
    return demonstrations


def _demonstration_from_row(row: dict[str, Any], location: str, source: str) -> Demonstration:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ProblemFieldError(f"{location}: a demonstration needs a non-empty list 'turns'")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get("model"), str) or not turn["model"]:
            raise ProblemFieldError(f"{location}: turn {number} needs a non-empty string 'model'")
        if not isinstance(turn.get("observation", ""), str):
            raise ProblemFieldError(f"{location}: turn {number}: 'observation' must be a string")
    if not any(name in row for name in USUAL_FIELDS["problem"]):
        raise ProblemFieldError(
            f"{location}: no field for the problem (expected {', '.join(USUAL_FIELDS['problem'])}); "
            f"fields: {', '.join(sorted(row))}"
        )
    for field in ("setup", "family"):
        if not isinstance(row.get(field, ""), str):
            raise ProblemFieldError(f"{location}: {field!r} must be a string")
    columns = {"id": location, **{name: value for name, value in row.items() if name not in _DEMONSTRATION_FIELDS}}
    problem = problem_from_row(columns, location, source=source, fields={}, answered=False)
    return Demonstration(
        problem=replace(problem, family=row.get("family", problem.family), setup=row.get("setup", "")),
        turns=tuple(DemonstrationTurn(model=turn["model"], observation=turn.get("observation", "")) for turn in turns),
        location=location,
    )
