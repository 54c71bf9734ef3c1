"""Records that a study keeps of its runs: scores, rewards, tokens and seconds by step, small enough for one file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from pydantic import BaseModel, ConfigDict, Field

from agentrl.lab.study.runs import Status, StudyRun
from agentrl.lab.study.settings import SettingValues, StudySettings


class HeldOutScore(BaseModel):
    """Held-out evaluation: avg@k after ``step`` optimizer steps, with the interval of that evaluation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    mean: float
    low: float
    high: float


class RunCurve(BaseModel):
    """One run of a study. Lists contain one entry per training step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    variant: str
    seed: int
    settings: SettingValues
    status: Status
    message: str = Field("", description="why the run failed")
    scores: tuple[HeldOutScore, ...] = ()
    steps: tuple[int, ...] = ()
    rewards: tuple[float | None, ...] = Field((), description="mean reward of the step; null if all were excluded")
    model_tokens: tuple[int, ...] = Field((), description="tokens sampled in the step")
    trajectories: tuple[int, ...] = Field((), description="trajectories of the step that are not excluded")
    seconds: tuple[float, ...] = ()

    @property
    def final(self) -> float | None:
        """The last score; None if the run has not finished."""
        return self.scores[-1].mean if self.status == "finished" and self.scores else None

    @property
    def area(self) -> float | None:
        """Mean score over all steps by the trapezoidal rule, or None if the run has not finished."""
        if self.status != "finished" or len(self.scores) < 2:
            return None
        parts = [(after.step - before.step) * (before.mean + after.mean) / 2 for before, after in pairwise(self.scores)]
        return sum(parts) / (self.scores[-1].step - self.scores[0].step)

    def spent_until(self, target: float, spent: Sequence[int]) -> int | None:
        """Sum of ``spent`` up to the first evaluation with a score of at least ``target``, or None if there is none.

        ``spent`` has one entry for each of ``steps``.
        """
        reached = next((score.step for score in self.scores if score.mean >= target), None)
        if reached is None:
            return None
        return sum(value for step, value in zip(self.steps, spent, strict=True) if step <= reached)

    def collapsed(self, share: float) -> bool:
        """True if the last score is below ``share`` of the best score."""
        return bool(self.scores) and self.scores[-1].mean < share * max(score.mean for score in self.scores)

    @property
    def cumulated_tokens(self) -> list[int]:
        """Cumulative number of sampled tokens at each step."""
        return list(accumulate(self.model_tokens))


class StudyRecord(BaseModel):
    """A study and all its runs: the source of the tables and figures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agentrl: str
    study: StudySettings
    runs: tuple[RunCurve, ...]


def read_curve(run: StudyRun) -> RunCurve:
    """Read the current state of a run from its files. Raises WorldError if they are damaged."""
    rows = list(run.files.metrics())
    trained = [row for row in rows if "reward/count" in row]
    return RunCurve(
        variant=run.variant,
        seed=run.seed,
        settings=run.values,
        status=run.status,
        message=run.failure.read_text(encoding="utf-8").strip() if run.failure.is_file() else "",
        scores=tuple(
            HeldOutScore(step=int(row["step"]), mean=row["eval/avg_at_k"], low=row["eval/low"], high=row["eval/high"])
            for row in rows
            if "eval/avg_at_k" in row
        ),
        steps=tuple(int(row["step"]) for row in trained),
        rewards=tuple(round(row["reward/mean"], 6) if "reward/mean" in row else None for row in trained),
        model_tokens=tuple(int(row.get("rollout/model_tokens", 0)) for row in trained),
        trajectories=tuple(int(row["reward/count"]) for row in trained),
        seconds=tuple(round(row["time/step_s"], 3) for row in trained),
    )
