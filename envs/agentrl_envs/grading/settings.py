"""The settings of grading."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GraderSettings(BaseModel):
    """Limits of one comparison and the size of the pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(default=2, ge=1, description="grading processes at most; each is started when first needed")
    deadline: float = Field(
        default=5.0, gt=0, description="seconds of processor time to read the gold answer, and again to compare with it"
    )
    start_deadline: float = Field(
        default=120.0, gt=0, description="seconds of processor time for a process to import its libraries"
    )
    hang_deadline: float = Field(
        default=600.0, gt=0, description="seconds by the clock without a verdict after which a process is taken to hang"
    )
    memory_mb: int = Field(default=2048, ge=256, description="address space of a process, in MiB")
    max_length: int = Field(default=2000, ge=1, description="characters; a longer answer is unparsable")
    max_depth: int = Field(default=40, ge=1, description="nested brackets; a deeper answer is unparsable")
    cache_size: int = Field(default=65536, ge=0, description="verdicts remembered")
