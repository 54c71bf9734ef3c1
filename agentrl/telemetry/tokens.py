"""Token statistics of a step: in memory, in files, and joined with the step's trajectories. Does not import torch.

The training step records :class:`TrajectoryTokens` for every trajectory that it trained on. Each rank writes its
records to one Parquet file (:func:`write_tokens`). :func:`read_step` joins the files of all ranks with the step's
trajectories.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry.files import atomic_write, malformed_as_world_error, resolve_path_inside
from agentrl.telemetry.records import JsonRecord
from agentrl.telemetry.run_directory import RunDirectory

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FORMAT = 1
_FACTS_KEY = b"agentrl"  # key of the TokenMetadata in the schema's metadata
_MIN_BLOCK_TOKENS = 1 << 18  # minimum number of tokens in a row group, which is read as a whole

TokenColumns = dict[str, np.ndarray]
"""Values of the model tokens of one or more trajectories, by column."""


class RowKey(NamedTuple):
    """Identity of a trajectory in a run: its group, its rollout in the group, and its branch of the rollout."""

    group: int
    sample: int
    branch: int


@dataclass(frozen=True, kw_only=True)
class TrajectoryTokens:
    """Token statistics of one trajectory that a step trained on. Arrays have a value for each of its K model tokens.

    ``log_probs``, ``entropy`` and ``energy`` are computed under the policy before the step's updates, at the
    temperature of the rollout. ``rewards`` include penalties for length and KL. ``advantages``, ``returns`` and
    ``baselines`` are outputs of the estimator. Optional fields are None if the step did not need them: without a
    rollout correction, a critic, a reference policy, or an estimator that uses the energy of the head's gradient.

    ``loss_weight`` is the factor of each token of ``loss_mask`` in the step's loss, before ``weights``. The loss is the
    sum of ``loss_weight * weights * loss of the token`` over the tokens of all trajectories, plus entropy and KL terms.
    """

    group: int
    sample: int
    branch: int
    parent: int  # branch from which this one forks; -1: none
    fork: int  # number of the parent's model tokens before the fork
    share: float  # share of the rollout's model tokens; 1 without branches
    update: int  # index of the step's update that trained on this trajectory
    loss_weight: float
    log_probs: np.ndarray  # [K]
    entropy: np.ndarray  # [K] float16, nats
    energy: np.ndarray  # [K] ||e_y - p||^2
    rewards: np.ndarray  # [K]
    returns: np.ndarray  # [K]
    baselines: np.ndarray  # [K]
    advantages: np.ndarray  # [K]
    loss_mask: np.ndarray  # [K] bool, False if filters or the correction reject the token
    weights: np.ndarray | None = None  # [K] weights of the rollout correction, in loss and energies
    path_weight: float = 1.0  # weight of the branch in a forked rollout
    update_log_probs: np.ndarray | None = None  # [K] under the policy that was updated; None if equal to log_probs
    hidden_norm_squared: np.ndarray | None = None  # [K]
    reference_log_probs: np.ndarray | None = None  # [K]
    values: np.ndarray | None = None  # [K] values of the critic
    bootstrap_value: float | None = None  # value of the critic after the last token; 0 if the episode ended
    greedy_return: float | None = None  # return of the problem's greedy rollout
    trajectory_energy: float | None = None  # exact ||sum of the tokens' gradients||^2

    @property
    def key(self) -> RowKey:
        return RowKey(self.group, self.sample, self.branch)

    def __len__(self) -> int:
        return len(self.log_probs)

    def columns(self) -> dict[str, np.ndarray]:
        """Return all arrays that exist, by name, with ``update`` and ``loss_weight`` repeated for every token."""
        arrays = {name: getattr(self, name) for name in ARRAY_FIELDS}
        numbers = {name: np.full(len(self), getattr(self, name)) for name in ("update", "loss_weight")}
        return {name: values for name, values in arrays.items() if values is not None} | numbers

    @property
    def update_probability_ratios(self) -> np.ndarray:
        """Probability ratios [K] float64: the updated policy divided by the policy before the step."""
        if self.update_log_probs is None:
            return np.ones(len(self))
        return np.exp(np.clip(self.update_log_probs.astype(np.float64) - self.log_probs, -20.0, 20.0))

    @property
    def importance_weighted_energy(self) -> np.ndarray:
        """Terms of the realized energy [K] float64: (rho_k loss_mask_k)^2 w_k."""
        energy = self.energy.astype(np.float64)
        if self.hidden_norm_squared is not None:
            energy = energy * self.hidden_norm_squared
        return energy * self._correction_weights**2

    @property
    def gradient_power(self) -> np.ndarray:
        """Gradient power [K] float64: w_k times the squared factor of grad log p in the loss, at the first update.

        The sum over the step is the diagonal proxy of the gradient's variance (docs/reference/formulas.md 7), which
        omits the cross terms between tokens.
        """
        return self.energy * (self.loss_weight * self.advantages * self._correction_weights) ** 2

    @property
    def _correction_weights(self) -> np.ndarray:
        """Correction weights [K] float64, 0 for tokens that are not in the loss."""
        mask = self.loss_mask.astype(np.float64)
        return mask if self.weights is None else mask * self.weights


ARRAY_FIELDS = tuple(item.name for item in fields(TrajectoryTokens) if "ndarray" in str(item.type))
"""Names of the fields with one value per token."""

NUMBER_FIELDS = tuple(item.name for item in fields(TrajectoryTokens) if item.name not in ARRAY_FIELDS)
"""Names of the fields with a single value."""


def compute_cumulative_realized_energies(rows: Iterable[TrajectoryTokens]) -> Mapping[RowKey, np.ndarray]:
    """Compute W_k [K] float64 of each row: the sum of the weighted energies from the start of the rollout to token k.

    The sum of a branch includes its parent's tokens before the fork, if the parent is in ``rows``.
    """
    by_key = {row.key: row for row in rows}
    energies: dict[RowKey, np.ndarray] = {}

    def of(row: TrajectoryTokens) -> np.ndarray:
        if row.key not in energies:
            parent = by_key.get(RowKey(row.group, row.sample, row.parent)) if row.parent >= 0 else None
            before = 0.0 if parent is None else float(of(parent)[row.fork - 1])
            energies[row.key] = before + np.cumsum(row.importance_weighted_energy)
        return energies[row.key]

    for row in by_key.values():
        of(row)
    return energies


@dataclass(frozen=True, kw_only=True)
class TokenMetadata:
    """Properties common to all rows of a file: the step, and the rules that computed advantages and losses."""

    step: int
    version: int  # policy version before the step's updates
    rank: int
    ranks: int
    estimator: str
    estimator_options: dict[str, object] = field(default_factory=dict)
    loss: str
    loss_options: dict[str, object] = field(default_factory=dict)
    aggregation: str
    format: int = FORMAT


def write_tokens(path: Path, facts: TokenMetadata, rows: Sequence[TrajectoryTokens]) -> None:
    """Write the rows of one rank atomically. Raises WorldError if the file cannot be written."""
    import pyarrow.parquet as pq

    table = _table_of_rows(rows).replace_schema_metadata({_FACTS_KEY: json.dumps(asdict(facts))})
    floats = [f"{name}.list.element" for name in ARRAY_FIELDS if name in table.column_names and name != "loss_mask"]

    def write(out: IO[bytes]) -> None:
        # Grouping the bytes of floating-point numbers by significance reduces the compressed columns by a quarter.
        with pq.ParquetWriter(
            out,
            table.schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            use_byte_stream_split=floats,
            write_statistics=False,
        ) as writer:
            for start, count in _block_bounds(rows):
                writer.write_table(table.slice(start, count))

    atomic_write(path, write)


class TokenFile:
    """Reader of one rank's file. Raises WorldError if it is damaged, SettingsError if a newer version wrote it."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._file: pq.ParquetFile = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise WorldError(f"cannot read the token statistics {path}: {error}") from error
        with malformed_as_world_error(str(path)):
            content = dict(json.loads((self._file.schema_arrow.metadata or {}).get(_FACTS_KEY, b"{}")))
        if content.get("format") != FORMAT:
            raise SettingsError(
                f"{path} has format {content.get('format')}, but this version of agentrl reads format {FORMAT}: "
                "use the version that wrote the run"
            )
        with malformed_as_world_error(str(path)):
            self.facts = TokenMetadata(**content)

    def rows(self, groups: Collection[int] | None = None) -> Iterator[TrajectoryTokens]:
        """Yield the rows of ``groups`` (default: all), in file order. Reads only the blocks that contain them."""
        for block in range(self._file.num_row_groups):
            if groups is not None:
                stored = self._read_block(block, ["group"])["group"].to_pylist()
                if not any(group in groups for group in stored):
                    continue
            for row in _rows_of_table(self._read_block(block)):
                if groups is None or row.group in groups:
                    yield row

    def _read_block(self, block: int, columns: list[str] | None = None) -> pa.Table:
        import pyarrow as pa

        try:
            return self._file.read_row_group(block, columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise WorldError(f"cannot read the token statistics {self.path}: {error}") from error


def _block_bounds(rows: Sequence[TrajectoryTokens]) -> Iterator[tuple[int, int]]:
    """Yield the first row and the number of rows of every block."""
    start, tokens = 0, 0
    for index, row in enumerate(rows):
        tokens += len(row)
        if tokens >= _MIN_BLOCK_TOKENS:
            yield start, index + 1 - start
            start, tokens = index + 1, 0
    if start < len(rows):
        yield start, len(rows) - start


def _table_of_rows(rows: Sequence[TrajectoryTokens]) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}
    for name in NUMBER_FIELDS:
        values = [getattr(row, name) for row in rows]
        if any(value is not None for value in values):
            columns[name] = pa.array(values)
    for name in ARRAY_FIELDS:
        arrays = [getattr(row, name) for row in rows]
        present = [values for values in arrays if values is not None]
        if present:
            ends = np.cumsum([0 if values is None else len(values) for values in arrays], dtype=np.int32)
            missing = pa.array([values is None for values in arrays])
            flat = pa.array(np.concatenate(present))
            columns[name] = pa.ListArray.from_arrays(np.append(np.int32(0), ends), flat, mask=missing)
    return pa.table(columns)


def _rows_of_table(table: pa.Table) -> Iterator[TrajectoryTokens]:
    """Yield the rows of a block, whose arrays are views of its columns."""
    numbers = {name: table[name].to_pylist() for name in NUMBER_FIELDS if name in table.column_names}
    lists = {name: _split_lists(table[name].combine_chunks()) for name in ARRAY_FIELDS if name in table.column_names}
    for row in range(table.num_rows):
        cells = {name: values[row] for name, values in (numbers | lists).items()}
        yield TrajectoryTokens(**cells)


def _split_lists(column: pa.ListArray) -> list[np.ndarray | None]:
    flat, starts = _to_numpy(column.values), _to_numpy(column.offsets)
    missing = column.is_null().to_pylist()
    return [
        None if none else flat[start:end] for none, start, end in zip(missing, starts[:-1], starts[1:], strict=True)
    ]


def _to_numpy(values: pa.Array) -> np.ndarray:
    """Convert values without nulls. ``to_numpy`` would import pandas, which takes half a second."""
    import pyarrow as pa

    if pa.types.is_boolean(values.type):
        return np.from_dlpack(values.cast(pa.uint8())).view(np.bool_)
    return np.from_dlpack(values)


@dataclass(frozen=True, kw_only=True)
class StoredTrajectory:
    """A trajectory of a step. ``tokens`` is None if the step did not train on it or no statistics are stored."""

    number: int  # index in the step's file
    record: JsonRecord  # as returned by Trajectory.to_record()
    tokens: TrajectoryTokens | None

    @property
    def key(self) -> RowKey:
        return row_key_of_record(self.record)

    @cached_property
    def model_token_positions(self) -> np.ndarray:
        """Positions [K] of the model tokens in the response."""
        return np.flatnonzero(self.model_mask)

    @cached_property
    def model_mask(self) -> np.ndarray:
        """Mask [T] of the response tokens that the model sampled."""
        segments = self.record["segments"]
        lengths = [len(segment["token_ids"]) for segment in segments]
        return np.repeat([segment["origin"] == "model" for segment in segments], lengths)

    def columns(self) -> TokenColumns:
        """Return columns with a value per model token, from the engine and, if available, from training.

        The columns are ``position`` in the response, ``index`` among the model tokens, ``turn``, ``token_id``,
        ``engine_log_probs``, ``policy_version``, and the fields of :attr:`tokens`.
        """
        segments = [item for item in self.record["segments"] if item["origin"] == "model"]
        lengths = [len(item["token_ids"]) for item in segments]
        spans = [span for item in segments for span in item["version_spans"]]
        columns: TokenColumns = {
            "position": self.model_token_positions,
            "index": np.arange(len(self.model_token_positions)),
            "turn": np.repeat(np.arange(len(segments)), lengths),
            "token_id": np.array([token for item in segments for token in item["token_ids"]], dtype=np.int64),
            "engine_log_probs": np.array([value for item in segments for value in item["log_probs"]], dtype=np.float64),
            "policy_version": np.repeat([version for version, _ in spans], [count for _, count in spans]),
        }
        if self.tokens is not None:
            columns |= self.tokens.columns()
        return columns


@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """Trajectories of a step in the order of their file, with token statistics.

    ``facts`` is None if no token statistics are stored. ``rows`` contains the statistics of all trajectories that the
    step trained on, in the order of training. ``warnings`` contains messages about missing and unreadable files of
    token statistics. The trajectories in such files have no statistics.
    """

    step: int
    trajectories: tuple[StoredTrajectory, ...]
    facts: TokenMetadata | None
    rows: dict[RowKey, TrajectoryTokens]
    warnings: tuple[str, ...] = ()

    def trained_group(self, trajectory: StoredTrajectory) -> list[StoredTrajectory]:
        """Return all trajectories of ``trajectory``'s group that the step trained on, in the order of training."""
        by_key = {item.key: item for item in self.trajectories}
        return [by_key[key] for key in self.rows if key.group == trajectory.key.group and key in by_key]

    @cached_property
    def realized_energies(self) -> dict[RowKey, np.ndarray]:
        """Realized energies W_k [K] float64 of every trajectory that the step trained on."""
        return dict(compute_cumulative_realized_energies(self.rows.values()))

    @cached_property
    def total_gradient_power(self) -> float:
        """Sum of :attr:`TrajectoryTokens.gradient_power` over the step's tokens."""
        return float(sum(row.gradient_power.sum() for row in self.rows.values()))


def read_step(run: RunDirectory, step: int, *, groups: Collection[int] | None = None) -> StoredStep:
    """Read a step from its files, or only the trajectories of ``groups``.

    Damaged and missing files of token statistics are listed in ``warnings``. Raises SettingsError if the trajectories
    are not stored or a newer version wrote them, and WorldError if they cannot be read.
    """
    run.require_trajectories(step)
    facts, rows, warnings = _read_token_files(run, step, groups)
    marks = None if groups is None else [b'"group":%d,' % group for group in groups]

    def may_belong(_number: int, line: bytes) -> bool:
        return marks is None or any(mark in line for mark in marks)

    trajectories = []
    for number, record in run.select_trajectories(step, may_belong):
        with malformed_as_world_error(f"{run.trajectory_file(step)}, line {number + 1}"):
            if groups is None or record["group"] in groups:
                trajectories.append(
                    StoredTrajectory(number=number, record=record, tokens=rows.get(row_key_of_record(record)))
                )
    return StoredStep(step=step, trajectories=tuple(trajectories), facts=facts, rows=rows, warnings=tuple(warnings))


def row_key_of_record(record: JsonRecord) -> RowKey:
    """Return the key of a trajectory's record. Keys of greedy rollouts are also unique."""
    return RowKey(record["group"], record["sample"], record.get("branch", 0))


def _read_token_files(
    run: RunDirectory, step: int, groups: Collection[int] | None
) -> tuple[TokenMetadata | None, dict[RowKey, TrajectoryTokens], list[str]]:
    """Read metadata and rows from the files of all ranks, and return them with warnings about unreadable files.

    Ranks of a sequence-parallel group store the same rows.
    """
    facts: TokenMetadata | None = None
    rows: dict[RowKey, TrajectoryTokens] = {}
    warnings = []
    for path in run.token_statistics_files(step):
        try:
            file = TokenFile(resolve_path_inside(path, run.path))
            file_rows = list(file.rows(groups))
        except WorldError as error:
            warnings.append(str(error))
            continue
        facts = file.facts
        rows |= {row.key: row for row in file_rows}
    missing = 0 if facts is None else facts.ranks - len(run.token_statistics_files(step))
    if facts is not None and missing:
        warnings.append(f"the token statistics of {missing} of {facts.ranks} ranks at step {step} are missing")
    return facts, rows, warnings
