"""Settings of problem sources."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

BUILTIN = "builtin:"
FORMULA = "formula:"
REASONING_GYM = "reasoning_gym:"
HARBOR = "harbor:"
FILE_KINDS = (".jsonl", ".parquet")
DEFAULT_SPLIT = "train"

Curriculum = Literal["uniform", "variance", "thompson"]

FieldName = Literal["problem", "answer", "id"]
"""Fields of a problem that have a column. Every other key of ``fields`` is a key of ``Problem.info``."""


def is_generated(path: str) -> bool:
    """Return True if ``path`` names a generator. Generators have their own splits.

    >>> is_generated("builtin:arithmetic"), is_generated("mine.jsonl")
    (True, False)
    """
    return path.startswith((BUILTIN, REASONING_GYM))


class ProblemSourceSettings(BaseModel):
    """One entry of ``data.train`` or ``data.eval``.

    >>> ProblemSourceSettings(path="builtin:arithmetic", split="heldout").weight
    1.0
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        min_length=1,
        description="builtin:arithmetic, builtin:horizon, builtin:seeds (for environments that generate a task from a "
        "seed), reasoning_gym:NAME, harbor:DIRECTORY, a .jsonl or .parquet file, or a folder or id for Hugging Face "
        "datasets; ~ and $VARIABLES are expanded",
    )
    split: str = Field(
        default=DEFAULT_SPLIT,
        min_length=1,
        description="split of generated problems (train, heldout) or of a data set; files have no splits",
    )
    subset: str | None = Field(default=None, description="configuration of a Hugging Face data set")
    revision: str | None = Field(default=None, description="commit, tag or branch of a Hugging Face data set")
    weight: float = Field(default=1.0, gt=0, description="relative sampling weight; weights need not sum to 1")
    fields: dict[str, str | None] = Field(
        default={},
        description="columns of problem, answer and id, with dots for nested columns (prompt.0.content); empty: the "
        "usual names. Any other key stores a column under that name in Problem.info; null drops the column",
    )
    limit: int | None = Field(
        default=None, ge=1, description="maximum number of problems, taken from the start; null: all"
    )
    families: list[str] | None = Field(
        default=None,
        description="problem families of builtin:arithmetic or builtin:horizon; null: all families of arithmetic, or "
        "the families of horizon with two and four turns",
    )
    seed: int | None = Field(default=None, description="seed of generated problems; null: the run's seed")
    options: dict[str, Any] = Field(default={}, description="configuration of a reasoning_gym data set")
    skip_unanswered: bool = Field(
        default=False, description="skip and count rows without an answer; false: such rows are an error"
    )
    part: Literal["all", "train", "heldout"] = Field(
        default="all",
        description="part of a train/held-out split; statements that differ only in numbers stay together",
    )
    heldout_fraction: float = Field(default=0.2, gt=0, lt=1, description="fraction of statements in part heldout")
    exclude: list[str] = Field(
        default=[],
        description="files whose problems are removed from this source, such as cold-start or evaluation data; "
        "statements that differ only in numbers count as equal",
    )

    @property
    def is_generated(self) -> bool:
        """True for generators, which read no files."""
        return is_generated(self.path)

    @property
    def is_local(self) -> bool:
        """True for sources that are read without a download."""
        return self.is_generated or self.path.startswith(HARBOR) or self.path.lower().endswith(FILE_KINDS)

    @model_validator(mode="after")
    def _consistent(self) -> ProblemSourceSettings:
        needed = [name for name in get_args(FieldName) if name in self.fields and self.fields[name] is None]
        if needed:
            raise ValueError(f"fields.{needed[0]} must name a column; only other fields can be set to null")
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be finite; got {self.weight}")
        if self.is_generated:
            loaded = {
                "fields": bool(self.fields),
                "subset": self.subset is not None,
                "revision": self.revision is not None,
                "skip_unanswered": self.skip_unanswered,
                "part": self.part != "all",
                "exclude": bool(self.exclude),
            }
            wrong = [name for name, is_set in loaded.items() if is_set]
            if wrong:
                raise ValueError(
                    f"{self.path} is generated, so {wrong[0]} does not apply; only split=train or heldout does"
                )
        elif self.seed is not None:
            raise ValueError(f"seed applies to generated problems, not to {self.path}")
        if self.families is not None and self.path not in (BUILTIN + "arithmetic", BUILTIN + "horizon"):
            raise ValueError(f"families applies to builtin:arithmetic and builtin:horizon, not to {self.path}")
        if self.options and not self.path.startswith(REASONING_GYM):
            raise ValueError(f"options applies to reasoning_gym:NAME, not to {self.path}")
        return self


class DataSettings(BaseModel):
    """Problem sources. Several sources in one list are mixed by their weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: list[ProblemSourceSettings] = Field([], description="sources to train on")
    eval: list[ProblemSourceSettings] = Field(
        [], description="sources to evaluate on before, during and after training"
    )
    curriculum: Curriculum = Field(
        "uniform",
        description="distribution of the problems within a finite source. uniform: every problem once per epoch; "
        "variance: with weights p (1 - p), where p is the posterior mean of the probability of success; thompson: the "
        "problems with the largest p (1 - p) for a p drawn from the posterior",
    )
    posterior_decay: float = Field(
        0.98,
        gt=0,
        le=1,
        description="factor by which each training step multiplies the weight of earlier rollouts in the estimates "
        "for curriculum, rollout.budget and rollout.branching.where=measured; 1: no decay",
    )
