"""Loading of demonstrations from the string in ``coldstart.demonstrations``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.problems.demonstrations.arithmetic import GENERATORS
from agentrl.problems.demonstrations.demonstration import Demonstration, read_demonstrations
from agentrl.problems.demonstrations.word_problems import formula_demonstrations
from agentrl.problems.problem_errors import ProblemError, ProblemFileError
from agentrl.problems.settings import BUILTIN, FORMULA
from agentrl.problems.sources import check_builtin, expand


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDemonstrations:
    """Demonstrations and a one-line description of them."""

    demonstrations: tuple[Demonstration, ...]
    description: str


def load_demonstrations(
    spec: str, *, count: int, variants: int, seed: int, families: Sequence[str] | None = None
) -> LoadedDemonstrations:
    """Load demonstrations from ``builtin:NAME``, ``formula:FILE.jsonl`` or a JSONL file of demonstrations.

    ``count`` and ``families`` (None for all) apply to generators, of which only the training split is used;
    ``variants`` applies to formulas. Raises ProblemError or one of its subclasses.
    """
    if spec.startswith(BUILTIN):
        check_builtin(spec, "demonstrations", tuple(GENERATORS))
        source = GENERATORS[spec.removeprefix(BUILTIN)](split="train", seed=seed, families=families)
        made = source.demonstrations(count)
        return LoadedDemonstrations(demonstrations=tuple(made), description=f"{count} demonstrations of {spec}")
    if families is not None:
        raise ProblemError(f"coldstart.families applies to generated demonstrations ({BUILTIN}NAME), not to {spec}")
    if spec.startswith(FORMULA):
        path = expand(spec.removeprefix(FORMULA))
        demonstrations, report = formula_demonstrations(path, variants=variants, seed=seed)
        return LoadedDemonstrations(demonstrations=tuple(demonstrations), description=f"{path}: {report.describe()}")
    if Path(spec).suffix.lower() != ".jsonl":
        raise ProblemFileError(
            f"{spec}: not a source of demonstrations; valid: {BUILTIN}arithmetic, {BUILTIN}horizon, "
            f"{FORMULA}FILE.jsonl or a .jsonl file"
        )
    read = read_demonstrations(expand(spec))
    return LoadedDemonstrations(demonstrations=tuple(read), description=f"{len(read)} demonstrations of {spec}")
