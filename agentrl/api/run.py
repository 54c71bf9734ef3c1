"""Read-only access to runs and evaluations: metrics as data frames, conversations as iterators."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import yaml

from agentrl.errors import SettingsError, WorldError, require_package
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.formats import Results
from agentrl.evaluation.transcripts import Transcript
from agentrl.telemetry.records import Metrics, Summary
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import StoredStep, read_step

if TYPE_CHECKING:
    import pandas as pd

    from agentrl.trajectory import Trajectory
    from agentrl_envs.types import Ended, Problem


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One attempt at a problem. ``print`` displays its text."""

    trajectories: tuple[Trajectory, ...]
    """The token sequences of the rollout in order; several if it branched. The last sequence carries the reward."""

    @property
    def problem(self) -> Problem:
        """The problem that was attempted."""
        return self.trajectories[-1].problem

    @property
    def reward(self) -> float:
        """The rollout's total reward."""
        return self.trajectories[-1].reward

    @property
    def ended(self) -> Ended:
        """How the rollout ended."""
        return self.trajectories[-1].ended

    @property
    def excluded(self) -> bool:
        """True for a rollout that failed for reasons outside the policy. Rewards, baselines and averages omit it."""
        return self.trajectories[-1].is_excluded

    @property
    def model_tokens(self) -> int:
        """The number of tokens that the model wrote, over all branches."""
        return sum(item.model_tokens for item in self.trajectories)

    def __str__(self) -> str:
        return "\n".join(map(str, self.trajectories))


@dataclass(frozen=True)
class Run:
    """A training run on disk, finished or not. Every property reads the current state of its files."""

    path: Path

    def __repr__(self) -> str:
        """Return the path and state of the run, for notebooks."""
        if not self._files.config.is_file():
            return f"<Run {self.path}: no run directory>"
        last: Metrics = {}
        for row in self._files.metrics():
            if "reward/mean" in row:
                last = row
        state = "finished" if self._files.summary.is_file() else "not finished"
        reward = f", reward/mean {last['reward/mean']:.3g} at step {last['step']:g}" if last else ", no step yet"
        return f"<Run {self.path}: {state}{reward}>"

    @property
    def name(self) -> str:
        """The run's name, the last part of ``path``."""
        return self.path.name

    @property
    def settings(self) -> dict[str, object]:
        """Every setting of the run, resolved, by section."""
        return cast(dict[str, object], yaml.safe_load(self._files.config.read_text(encoding="utf-8")))

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per training step, indexed by ``step``; a metric that a step does not have is NaN."""
        return _data_frame([row for row in self._files.metrics() if not _is_evaluation(row)])

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row per evaluated step, indexed by ``step``, with columns ``eval/...`` and ``eval_falsified/...``."""
        by_step: dict[float, Metrics] = {}
        for row in self._files.metrics():
            if _is_evaluation(row):
                by_step.setdefault(row["step"], {}).update(row)
        return _data_frame(list(by_step.values()))

    @property
    def summary(self) -> Summary:
        """Content of ``summary.json``: the final scores. Raises SettingsError if the run has not finished."""
        if not self._files.summary.is_file():
            raise SettingsError(f"{self.path} has not finished: it has no {self._files.summary.name}")
        return cast(Summary, json.loads(self._files.summary.read_text(encoding="utf-8")))

    @property
    def policy(self) -> Path:
        """Directory of the trained model (`transformers` format). Raises SettingsError if the run has not finished."""
        folder = self.path / "policy"
        if not folder.is_dir():
            raise SettingsError(f"{self.path} has not finished: it has no policy/")
        return folder

    def trajectories(self, step: int | None = None) -> Iterator[Trajectory]:
        """Yield the trajectories of one step, or of all stored steps in order, one in memory at a time.

        Raises SettingsError if the trajectories of ``step`` are not stored.
        """
        from agentrl.trajectory import Trajectory

        if step is not None:
            self._files.require_trajectories(step)
        for one in self.steps() if step is None else [step]:
            for record in self._files.read_trajectories(one):
                yield Trajectory.from_record(record)

    def rollouts(self, step: int | None = None) -> Iterator[Rollout]:
        """Yield the rollouts of one step, or of all stored steps in order, one in memory at a time.

        Raises SettingsError as :meth:`trajectories` does.
        """
        branches: list[Trajectory] = []
        for trajectory in self.trajectories(step):  # the branches of a rollout follow each other
            branches.append(trajectory)
            if trajectory.branch == trajectory.branches - 1:
                yield Rollout(trajectories=tuple(branches))
                branches = []

    def steps(self) -> list[int]:
        """Return the steps whose trajectories are stored."""
        return self._files.steps_with_trajectories()

    def step(self, step: int) -> StoredStep:
        """Return the stored trajectories of one step, with token statistics if training recorded them.

        Raises SettingsError if the trajectories of ``step`` are not stored.
        """
        return read_step(self._files, step)

    def tokens(self, step: int) -> pd.DataFrame:
        """Return one row for each model token of the step, with engine data and training statistics.

        The index consists of the trajectory's number in its step and the token's position in the response. The columns
        are ``group``, ``sample``, ``realized_energy`` and the columns of :meth:`StoredTrajectory.columns`. Training
        statistics are NaN if the step did not train on the trajectory. Raises SettingsError if the trajectories of
        ``step`` are not stored.
        """
        require_package("pandas", extra="frames", purpose="Run.tokens")
        import pandas as pd

        stored = self.step(step)
        frames = []
        for item in stored.trajectories:
            columns = item.columns() | {"realized_energy": stored.realized_energies.get(item.key, np.nan)}
            rows = pd.DataFrame(columns).assign(trajectory=item.number, group=item.key.group, sample=item.key.sample)
            frames.append(rows.set_index(["trajectory", "position"]))
        frame = pd.concat(frames)
        narrow = frame.select_dtypes(np.float16).columns  # pandas overflows when it prints float16
        return frame.astype(dict.fromkeys(narrow, np.float32))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> str:
        """Upload the trained model, tokenizer and model card to the Hugging Face Hub, and return the commit's URL.

        The model repository ``repo_id`` ("owner/name") is created if it does not exist. ``private`` defaults to the
        owner's default, ``token`` and ``endpoint`` to the defaults of `huggingface_hub` (HF_TOKEN, HF_ENDPOINT).

        Raises SettingsError if the run has not finished or ``repo_id`` is not valid, and WorldError if the upload
        fails.
        """
        require_package("huggingface_hub", extra="hub", purpose="Run.push_to_hub")
        import httpx
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        policy, api = self.policy, HfApi(endpoint=endpoint, token=token)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            message = commit_message or f"Policy of the agentrl run {self.name}"
            commit = api.upload_folder(repo_id=repo_id, folder_path=policy, revision=revision, commit_message=message)
        except HFValidationError as error:
            raise SettingsError(f"repo_id={repo_id!r}: {error}") from error
        except (httpx.HTTPError, OSError) as error:
            raise WorldError(f"cannot upload {policy} to {repo_id}: {error}") from error
        return commit.commit_url

    @property
    def _files(self) -> RunDirectory:
        return RunDirectory(self.path)


@dataclass(frozen=True)
class EvaluationRun:
    """A finished evaluation on disk."""

    path: Path

    @property
    def results(self) -> Results:
        """Content of ``results.json``: every score with its intervals and provenance."""
        return EvaluationDirectory.open_existing(self.path).results()

    @property
    def scores(self) -> pd.DataFrame:
        """One row per benchmark: avg@n (``mean``), its interval for new problems of its kind, number of rollouts."""
        require_package("pandas", extra="frames", purpose="EvaluationRun.scores")
        import pandas as pd

        rows = []
        for name, one in self.results["benchmarks"].items():
            interval = one["avg"]["problems_like_these"]
            rows.append({"benchmark": name, "mean": one["avg"]["mean"], **interval, "rollouts": one["rollouts"]})
        return pd.DataFrame(rows).set_index("benchmark")

    def transcripts(self) -> Iterator[Transcript]:
        """Yield the transcripts of all rollouts, loading one at a time."""
        return EvaluationDirectory.open_existing(self.path).transcripts()


def load_run(path: str | Path) -> Run:
    """Return the run in the directory ``path``. Raises SettingsError if it is not a run directory.

    >>> load_run("no/such/run")
    Traceback (most recent call last):
    agentrl.errors.SettingsError: no/such/run is not a run directory (it has no config.yaml)
    """
    run = Run(Path(path))
    if not (run.path / "config.yaml").is_file():
        raise SettingsError(f"{path} is not a run directory (it has no config.yaml)")
    return run


def _is_evaluation(row: Metrics) -> bool:
    return any(key.startswith(("eval/", "eval_falsified/")) for key in row)


def _data_frame(rows: list[Metrics]) -> pd.DataFrame:
    require_package("pandas", extra="frames", purpose="a data frame of metrics")
    import pandas as pd

    return pd.DataFrame(rows).set_index("step") if rows else pd.DataFrame()
