"""What a user says of one source of problems."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

BUILTIN = "builtin:"
DEFAULT_SPLIT = "train"

FieldName = Literal["problem", "answer", "id"]


class ProblemSourceSettings(BaseModel):
    """One entry of ``data.train`` or ``data.eval``.

    >>> ProblemSourceSettings(path="builtin:arithmetic", split="heldout").weight
    1.0
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        min_length=1,
        description="builtin:arithmetic, a .jsonl or .parquet file, or a folder or id that Hugging Face datasets loads;"
        " ~ and $VARIABLES are replaced",
    )
    split: str = Field(
        default=DEFAULT_SPLIT,
        min_length=1,
        description="of builtin:arithmetic (train, heldout) or of a data set; files have none",
    )
    subset: str | None = Field(default=None, description="configuration of a Hugging Face data set")
    revision: str | None = Field(default=None, description="commit, tag or branch of a Hugging Face data set")
    weight: float = Field(default=1.0, gt=0, description="share of the draws, on any scale")
    fields: dict[FieldName, str] = Field(
        default={},
        description="where a row holds these, dots into nested fields (prompt.0.content); none: the usual names",
    )
    limit: int | None = Field(default=None, ge=1, description="use the first so many problems")
    families: list[str] | None = Field(default=None, description="families of builtin:arithmetic; none: all")
    seed: int | None = Field(default=None, description="of builtin:arithmetic; none: the run's seed")
    skip_unanswered: bool = Field(
        default=False, description="leave out and count rows without an answer; else they are an error"
    )
    part: Literal["all", "train", "heldout"] = Field(
        default="all", description="of a split of the rows by their statements with the numbers masked"
    )
    heldout_fraction: float = Field(default=0.2, gt=0, lt=1, description="share of masked statements in part heldout")
    exclude: list[str] = Field(
        default=[],
        description="files whose problems are left out, numbers masked (what the cold start or evaluation uses)",
    )

    @property
    def is_builtin(self) -> bool:
        """True for the generators that come with the package."""
        return self.path.startswith(BUILTIN)

    @model_validator(mode="after")
    def _consistent(self) -> ProblemSourceSettings:
        if not math.isfinite(self.weight):
            raise ValueError(f"weight must be finite, got {self.weight}")
        if self.is_builtin:
            loaded = {
                "fields": bool(self.fields),
                "subset": self.subset is not None,
                "revision": self.revision is not None,
                "skip_unanswered": self.skip_unanswered,
                "part": self.part != "all",
                "exclude": bool(self.exclude),
            }
            wrong = [name for name, given in loaded.items() if given]
            if wrong:
                raise ValueError(f"{self.path} is generated and has no {wrong[0]}; its split is train or heldout")
        else:
            wrong = [name for name in ("families", "seed") if getattr(self, name) is not None]
            if wrong:
                raise ValueError(f"{wrong[0]} belongs to builtin:arithmetic, not to {self.path}")
        return self


class DataSettings(BaseModel):
    """Where the problems come from; several sources of one list are mixed by their weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train: list[ProblemSourceSettings] = Field([], description="what is trained on")
    eval: list[ProblemSourceSettings] = Field([], description="what is evaluated before, during and after")
