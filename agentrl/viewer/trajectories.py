"""Data of trajectories for the viewer: rows of a table, search over steps, and the page of one trajectory."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from agentrl.errors import AgentRLError, SettingsError
from agentrl.evaluation.formats import JSONObject
from agentrl.telemetry.files import malformed_as_world_error, resolve_path_inside
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import RowKey, StoredStep, StoredTrajectory, TokenFile, read_step, row_key_of_record
from agentrl.viewer.run_files import RunTokenizer, choose_plotted_indices, json_numbers, read_run_tokenizer
from agentrl_envs.types import Ended, Verdict

_MOST_CACHED_STEPS = 24  # steps whose rows stay in memory: about 0.5 MB each with 512 trajectories
_EXCERPT_LENGTH = 140
_EQUAL_REWARDS = 1e-8  # rewards that differ by less are equal, as in the filter of groups


@dataclass(frozen=True, kw_only=True)
class SearchConditions:
    """Search conditions for rows. Empty strings and None accept any value.

    The conversation is searched for ``text``, ignoring case.
    """

    text: str = ""
    problem: str = ""
    ended: str = ""
    verdict: str = ""
    tool: str = ""
    dropped: str = ""
    group: float | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    least_turns: float | None = None
    most_turns: float | None = None
    least_staleness: float | None = None

    def accepts(self, row: JSONObject) -> bool:
        """Return True if a row of the table meets all conditions except ``text``."""
        return all(
            (
                self.problem.lower() in str(row["problem"]).lower(),
                self.ended in ("", row["ended"]),
                self.verdict in ("", row["verdict"]),
                not self.tool or self.tool in row["tools"],
                self.dropped in ("", row["dropped"]),
                self.group in (None, row["group"]),
                _is_between(self.least_reward, row["reward"], self.most_reward),
                _is_between(self.least_turns, row["turns"], self.most_turns),
                _is_between(self.least_staleness, row["staleness"], None),
            )
        )


def search_rows(
    run: RunDirectory,
    steps: list[int],
    search: SearchConditions,
    *,
    start: tuple[int, int] = (0, 0),
    limit: int,
    seconds: float,
) -> JSONObject:
    """Search ``steps`` for at most ``limit`` matching rows, for about ``seconds``.

    At least one step is searched. Returns ``rows``, ``warnings`` (steps that cannot be read) and ``next``, the
    STEP:NUMBER at which to continue, or None at the end.
    """
    end = time.monotonic() + seconds
    matches: list[JSONObject] = []
    warnings: list[str] = []
    found: JSONObject = {"rows": matches, "next": None, "warnings": warnings}
    for index, step in enumerate(steps):
        if step < start[0]:
            continue
        if index > 0 and step > start[0] and time.monotonic() > end:
            return found | {"next": f"{step}:0"}
        try:
            rows = list(_matching_rows(run, step, search))
        except AgentRLError as error:
            warnings.append(str(error))
            continue
        for row in rows:
            if (step, row["number"]) < start:
                continue
            if len(matches) == limit:
                return found | {"next": f"{step}:{row['number']}"}
            matches.append(row)
    return found


def read_step_rows(run: RunDirectory, step: int) -> tuple[JSONObject, ...]:
    """Return the rows of all trajectories of a step.

    Raises SettingsError if the step is not stored, and WorldError if its file is damaged.
    """
    run.require_trajectories(step)
    files = (run.trajectory_file(step), *run.token_statistics_files(step))
    return _cached_rows(run.path, step, tuple(path.stat().st_mtime_ns for path in files))


@lru_cache(maxsize=_MOST_CACHED_STEPS)
def _cached_rows(path: Path, step: int, _changed: tuple[int, ...]) -> tuple[JSONObject, ...]:
    run = RunDirectory(path)
    version, powers = _read_version_and_gradient_powers(run, step)
    rows, keys = [], []
    for number, record in enumerate(run.read_trajectories(step)):
        with malformed_as_world_error(f"{run.trajectory_file(step)}, line {number + 1}"):
            rows.append(_table_row(step, number, record, version))
            keys.append(row_key_of_record(record))
    if version is not None:
        total = sum(powers.values())
        for row, key in zip(rows, keys, strict=True):
            row["trained"] = key in powers
            row["power"] = powers.get(key)
            row["gradient_share"] = powers[key] / total if key in powers and total > 0 else None
        _add_untrained_reasons(rows)
    return tuple(rows)


def _read_version_and_gradient_powers(run: RunDirectory, step: int) -> tuple[int | None, dict[RowKey, float]]:
    """Return the policy version, and the gradient power of every trajectory with token statistics.

    The version is None if the step has no token statistics.
    """
    version, powers = None, dict[RowKey, float]()
    for path in run.token_statistics_files(step):
        try:
            file = TokenFile(resolve_path_inside(path, run.path))
            with malformed_as_world_error(str(path)):
                powers |= {row.key: float(row.gradient_power.sum()) for row in file.rows()}
        except AgentRLError:
            continue  # the page of a trajectory reports the damaged file
        version = file.facts.version
    return version, powers


def _table_row(step: int, number: int, record: JSONObject, version: int | None) -> JSONObject:
    model = [segment for segment in record["segments"] if segment["origin"] == "model"]
    versions = [span[0] for segment in model for span in segment["version_spans"]]
    problem = record["problem"]
    return {
        "step": step,
        "number": number,
        "problem": problem["id"],
        "statement": problem["statement"][:_EXCERPT_LENGTH],
        "group": record["group"],
        "sample": record["sample"],
        "branch": record.get("branch", 0),
        "path_weight": record.get("path_weight"),
        "reward": math.fsum([record.get("reward_elsewhere", 0.0), *(segment["reward"] for segment in model)]),
        "ended": record["ended"],
        "verdict": record["verdict"] or "",
        "answer": record["answer"],
        "turns": len(model),
        "tokens": sum(len(segment["token_ids"]) for segment in model),
        "tools": dict(Counter(call["outcome"] for call in record["tool_calls"])),
        "seconds": record["seconds"],
        "staleness": version - min(versions) if versions and version is not None else None,
        "trained": None,
        "power": None,
        "gradient_share": None,
        "dropped": "excluded" if _is_excluded(record) else "",
    }


def _is_excluded(record: JSONObject) -> bool:
    verdict = record["verdict"]
    return Ended(record["ended"]).is_excluded or (verdict is not None and Verdict(verdict).is_excluded)


def _add_untrained_reasons(rows: list[JSONObject]) -> None:
    """Add the reason why a row was not trained on, if it follows from the rows."""
    groups: dict[int, list[JSONObject]] = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    for group in groups.values():
        rewards = [row["reward"] for row in group if not row["dropped"] and row["ended"] != Ended.VOID_TURN]
        equal = bool(rewards) and max(rewards) - min(rewards) <= _EQUAL_REWARDS
        for row in group:
            if not row["trained"] and not row["dropped"]:
                void = row["ended"] == Ended.VOID_TURN
                row["dropped"] = "void turn" if void else "equal rewards" if equal else "filtered"


def _matching_rows(run: RunDirectory, step: int, search: SearchConditions) -> Iterator[JSONObject]:
    rows = [row for row in read_step_rows(run, step) if search.accepts(row)]
    if not search.text:
        yield from rows
        return
    wanted = {row["number"]: row for row in rows}
    if not wanted:
        return
    for number, record in run.select_trajectories(
        step, lambda number, line: number in wanted and _may_contain(line, search.text)
    ):
        if search.text.casefold() in searchable_conversation_text(record).casefold():
            yield wanted[number]


def _may_contain(line: bytes, text: str) -> bool:
    """Return False if a record's JSON line cannot contain ``text``.

    The line is searched without decoding, but only for ASCII letters, digits and spaces: JSON may escape any other
    character, and then the line does not contain ``text`` literally.
    """
    plain = text.isascii() and text.replace(" ", "").isalnum() and line.isascii()
    return not plain or text.lower().encode() in line.lower()


def searchable_conversation_text(record: JSONObject) -> str:
    """Return the searchable text of a conversation, including the reference answer and the problem's id."""
    problem = record["problem"]
    texts = (segment["text"] for segment in record["segments"])
    return "\n".join((problem["id"], problem["statement"], json.dumps(problem["answer"]), *texts))


def _is_between(low: float | None, value: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


_OMITTED_COLUMNS = ("position", "index", "token_id")  # displayed in other ways


def read_trajectory_page(run: RunDirectory, step: int, number: int) -> dict[str, object]:
    """Return the content of a trajectory's page. Raises SettingsError if the trajectory is not stored."""
    rows = read_step_rows(run, step)
    if not 0 <= number < len(rows):
        raise SettingsError(f"{run.path} has no trajectory {number} at step {step}; valid: 0 to {len(rows) - 1}")
    files = (run.trajectory_file(step), *run.token_statistics_files(step))
    stored = _cached_group(run.path, step, rows[number]["group"], tuple(path.stat().st_mtime_ns for path in files))
    with malformed_as_world_error(f"{run.trajectory_file(step)}, line {number + 1}"):
        return build_trajectory_page(run, stored, rows, number, read_run_tokenizer(run))


def build_trajectory_page(
    run: RunDirectory, stored: StoredStep, rows: Sequence[JSONObject], number: int, text: RunTokenizer
) -> dict[str, object]:
    """Build the content of a trajectory's page from ``stored``, which must contain its group."""
    (chosen,) = (item for item in stored.trajectories if item.number == number)
    group = [item for item in stored.trajectories if item.key.group == chosen.key.group]
    record = chosen.record
    return {
        "run": run.path.resolve().name,
        "row": rows[number],
        "problem": record["problem"],
        "reward_parts": record["reward_parts"],
        "prompt": _segment_record("prompt", record["prompt_ids"], "", text),
        "segments": [
            _segment_record(item["origin"], item["token_ids"], item["text"], text) for item in record["segments"]
        ],
        "tool_calls": record["tool_calls"],
        "fields": {name: json_numbers(values) for name, values in _token_fields(stored, chosen, rows).items()},
        "facts": None if stored.facts is None else asdict(stored.facts),
        "siblings": [_sibling_record(stored, item, rows[item.number]) for item in group],
        "warnings": [*stored.warnings, *([text.error] if text.error else [])],
        "tokenizer": text.has_tokenizer,
    }


@lru_cache(maxsize=2)  # users often open several trajectories of a group
def _cached_group(path: Path, step: int, group: int, _changed: tuple[int, ...]) -> StoredStep:
    return read_step(RunDirectory(path), step, groups={group})


def _segment_record(origin: str, token_ids: list[int], segment_text: str, text: RunTokenizer) -> dict[str, object]:
    return {
        "origin": origin,
        "text": segment_text,
        "token_ids": token_ids,
        "pieces": text.token_pieces(token_ids),
        "special": text.special_token_indices(token_ids),
    }


def _token_fields(stored: StoredStep, item: StoredTrajectory, rows: Sequence[JSONObject]) -> dict[str, np.ndarray]:
    """Return values per model token, by the names of stored columns and derived fields."""
    columns = {name: values for name, values in item.columns().items() if name not in _OMITTED_COLUMNS}
    if item.tokens is not None:
        row = item.tokens
        columns["difference"] = row.log_probs.astype(np.float64) - columns["engine_log_probs"]
        columns["ratio"] = row.update_probability_ratios
        columns["realized_energy"] = stored.realized_energies[item.key]
        power = sum(other["power"] or 0.0 for other in rows)  # of the step
        columns["gradient_share"] = row.gradient_power / power if power > 0 else np.zeros(len(row))
    return columns


def _sibling_record(stored: StoredStep, item: StoredTrajectory, row: dict[str, object]) -> dict[str, object]:
    """Summarize a trajectory of the group, with curves over its model tokens if it was trained on."""
    facts = ("number", "sample", "branch", "path_weight", "reward", "ended", "verdict", "answer", "turns", "tokens")
    about: dict[str, object] = {name: row[name] for name in (*facts, "dropped")}
    about["parent"] = item.record.get("parent", -1)
    about["text"] = "".join(segment["text"] for segment in item.record["segments"])
    if item.tokens is not None:
        indices = choose_plotted_indices(len(item.tokens))
        curves = (stored.realized_energies[item.key], item.tokens.baselines, item.tokens.advantages)
        names = ("realized_energy", "baselines", "advantages")
        about["edge"] = {
            "return": float(item.tokens.returns[0]),
            "baseline": float(item.tokens.baselines.mean()),
            "energy": float(item.tokens.importance_weighted_energy.sum()),
        }
        about["mean_advantage"] = float(item.tokens.advantages.mean())
        about["index"] = indices.tolist()
        about["curves"] = {name: json_numbers(curve[indices]) for name, curve in zip(names, curves, strict=True)}
    return about
