"""Page of one trajectory: its conversation token by token, values from training, and its siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import numpy as np

from agentrl.errors import SettingsError
from agentrl.evaluation.formats import JSONObject
from agentrl.inspection.json_values import drawn_indices, finite
from agentrl.inspection.token_text import TokenText, token_text
from agentrl.telemetry.files import wrong_shape
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens.stored_step import StoredStep, StoredTrajectory, read_step
from agentrl.viewer.step_table import step_rows

_NO_FIELDS = ("position", "index", "token_id")  # displayed in other ways


def trajectory_page(run: RunDirectory, step: int, number: int) -> dict[str, object]:
    """Return the content of a trajectory's page. Raises SettingsError if the trajectory is not stored."""
    rows = step_rows(run, step)
    if not 0 <= number < len(rows):
        raise SettingsError(f"{run.path} has no trajectory {number} at step {step}; valid: 0 to {len(rows) - 1}")
    files = (run.trajectory_file(step), *run.token_files(step))
    stored = _cached_group(run.path, step, rows[number]["group"], tuple(path.stat().st_mtime_ns for path in files))
    with wrong_shape(f"{run.trajectory_file(step)}, line {number + 1}"):
        return page_of(run, stored, rows, number, token_text(run))


def page_of(
    run: RunDirectory, stored: StoredStep, rows: Sequence[JSONObject], number: int, text: TokenText
) -> dict[str, object]:
    """Return the content of a trajectory's page from ``stored``, which must contain at least its group."""
    (chosen,) = (item for item in stored.trajectories if item.number == number)
    group = [item for item in stored.trajectories if item.key.group == chosen.key.group]
    record = chosen.record
    return {
        "run": run.path.resolve().name,
        "row": rows[number],
        "problem": record["problem"],
        "reward_parts": record["reward_parts"],
        "prompt": _segment("prompt", record["prompt_ids"], "", text),
        "segments": [_segment(item["origin"], item["token_ids"], item["text"], text) for item in record["segments"]],
        "tool_calls": record["tool_calls"],
        "fields": {name: finite(values) for name, values in _fields(stored, chosen, rows).items()},
        "facts": None if stored.facts is None else asdict(stored.facts),
        "siblings": [_sibling(stored, item, rows[item.number]) for item in group],
        "problems": [*stored.problems, *([text.problem] if text.problem else [])],
        "tokenizer": text.known,
    }


@lru_cache(maxsize=2)  # users often open several trajectories of a group
def _cached_group(path: Path, step: int, group: int, _changed: tuple[int, ...]) -> StoredStep:
    return read_step(RunDirectory(path), step, groups={group})


def _segment(origin: str, token_ids: list[int], segment_text: str, text: TokenText) -> dict[str, object]:
    return {
        "origin": origin,
        "text": segment_text,
        "token_ids": token_ids,
        "pieces": text.pieces(token_ids),
        "special": text.specials(token_ids),
    }


def _fields(stored: StoredStep, item: StoredTrajectory, rows: Sequence[JSONObject]) -> dict[str, np.ndarray]:
    """One value per model token, by the names of stored columns and of derived fields."""
    columns = {name: values for name, values in item.columns().items() if name not in _NO_FIELDS}
    if item.tokens is not None:
        row = item.tokens
        columns["difference"] = row.log_probs.astype(np.float64) - columns["engine_log_probs"]
        columns["ratio"] = row.ratios
        columns["realized_energy"] = stored.realized_energies[item.key]
        power = sum(other["power"] or 0.0 for other in rows)  # of the step
        columns["gradient_share"] = row.gradient_power / power if power > 0 else np.zeros(len(row))
    return columns


def _sibling(stored: StoredStep, item: StoredTrajectory, row: dict[str, object]) -> dict[str, object]:
    """A trajectory of the group, with its curves along the model tokens if it was trained on."""
    facts = ("number", "sample", "branch", "reward", "ended", "verdict", "answer", "turns", "tokens", "dropped")
    about: dict[str, object] = {name: row[name] for name in facts}
    about["text"] = "".join(segment["text"] for segment in item.record["segments"])
    if item.tokens is not None:
        indices = drawn_indices(len(item.tokens))
        curves = (stored.realized_energies[item.key], item.tokens.baselines, item.tokens.advantages)
        names = ("realized_energy", "baselines", "advantages")
        about["mean_advantage"] = float(item.tokens.advantages.mean())
        about["index"] = indices.tolist()
        about["curves"] = {name: finite(curve[indices]) for name, curve in zip(names, curves, strict=True)}
    return about
