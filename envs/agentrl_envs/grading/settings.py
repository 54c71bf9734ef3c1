"""The settings of grading."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GraderSettings(BaseModel):
    """Limits of one comparison and the size of the pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str | None = Field(
        default=None,
        pattern=r"^[^:]+:[^:]+$",
        description="module:function called as (answer, problem) for a score from 0 to 1, where 1 is correct; null: "
        "compare with the gold answer",
    )
    workers: int = Field(
        default=2, ge=1, description="maximum number of grading processes; each starts when it is first needed"
    )
    deadline: float = Field(
        default=5.0, gt=0, description="CPU seconds to parse the gold answer, and again to compare an answer with it"
    )
    start_deadline: float = Field(default=120.0, gt=0, description="CPU seconds for a process to import its libraries")
    hang_deadline: float = Field(
        default=600.0, gt=0, description="wall-clock seconds without a verdict after which a process is replaced"
    )
    memory_mb: int = Field(default=2048, ge=256, description="address space limit of a process, in MiB")
    max_length: int = Field(
        default=2000, ge=1, description="maximum characters of an answer; longer answers are unparsable"
    )
    max_depth: int = Field(default=40, ge=1, description="maximum nesting of brackets; deeper answers are unparsable")
    cache_size: int = Field(default=65536, ge=0, description="number of cached verdicts")
