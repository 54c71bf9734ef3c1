"""Token statistics on disk: Parquet with Zstandard, one file per step and rank, one row per trajectory."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry.files import atomic_write, wrong_shape
from agentrl.telemetry.tokens.trajectory_tokens import LISTS, NUMBERS, RowKey, TrajectoryTokens, kept_of, power_of

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FORMAT = 1
_FACTS = b"agentrl"
_KEY = ["group", "sample", "branch"]
_TOKENS_OF_A_BLOCK = 1 << 18  # minimum tokens of a row group, which is read as a whole


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
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


def write_tokens(path: Path, facts: TokenFacts, rows: Sequence[TrajectoryTokens]) -> None:
    """Write the rows of one rank atomically. Raises WorldError."""
    import pyarrow.parquet as pq

    table = _table(rows).replace_schema_metadata({_FACTS: json.dumps(asdict(facts))})
    floats = [f"{name}.list.element" for name in LISTS if name in table.column_names and name != "loss_mask"]

    def write(out: IO[bytes]) -> None:
        # Grouping the bytes of floating-point numbers by significance makes the compressed columns a quarter smaller.
        with pq.ParquetWriter(
            out,
            table.schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            use_byte_stream_split=floats,
            write_statistics=False,
        ) as writer:
            for start, count in _blocks(rows):
                writer.write_table(table.slice(start, count))

    atomic_write(path, write)


class TokenFile:
    """Reads the file of one rank. Raises WorldError if it is damaged, SettingsError if a newer version wrote it."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._file: pq.ParquetFile = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise WorldError(f"cannot read the token statistics {path}: {error}") from error
        with wrong_shape(str(path)):
            content = dict(json.loads((self._file.schema_arrow.metadata or {}).get(_FACTS, b"{}")))
        if content.get("format") != FORMAT:
            raise SettingsError(
                f"{path} has format {content.get('format')}, but this version of agentrl reads format {FORMAT}: "
                "use the version that wrote the run"
            )
        with wrong_shape(str(path)):
            self.facts = TokenFacts(**content)

    def stored_keys(self) -> list[RowKey]:
        """Return the keys of the trajectories in the file, in order."""
        return [RowKey(*key) for block in range(self._file.num_row_groups) for key in self._keys(block)]

    def rows(self, keys: Collection[RowKey] | None = None) -> Iterator[TrajectoryTokens]:
        """Yield the rows, or those in ``keys``, in the order of the file. Reads only blocks with such rows."""
        import pyarrow as pa

        for block in range(self._file.num_row_groups):
            if keys is not None and not any(key in keys for key in self._keys(block)):
                continue
            try:
                table = self._file.read_row_group(block)
            except (OSError, pa.ArrowException) as error:
                raise WorldError(f"cannot read the token statistics {self.path}: {error}") from error
            for row in _rows(table):
                if keys is None or row.key in keys:
                    yield row

    def gradient_powers(self) -> Iterator[tuple[RowKey, float]]:
        """Yield the key and the sum of ``gradient_power`` of every trajectory. Reads only the necessary columns."""
        import pyarrow as pa

        names = [*_KEY, "loss_weight", "energy", "advantages", "loss_mask", "weights"]
        for block in range(self._file.num_row_groups):
            try:
                table = self._file.read_row_group(block, columns=names)
            except (OSError, pa.ArrowException) as error:
                raise WorldError(f"cannot read the token statistics {self.path}: {error}") from error
            present = [name for name in names if name in table.column_names]
            columns = {name: _arrays(table[name].combine_chunks()) for name in present if name in LISTS}
            numbers = {name: table[name].to_pylist() for name in present if name not in LISTS}
            for row in range(table.num_rows):
                cells = {name: values[row] for name, values in (numbers | columns).items()}
                kept = kept_of(cells["loss_mask"], cells.get("weights"))
                power = power_of(cells["energy"], cells["loss_weight"], cells["advantages"], kept)
                yield RowKey(*(cells[name] for name in _KEY)), float(power.sum())

    def _keys(self, block: int) -> list[RowKey]:
        columns = self._file.read_row_group(block, columns=_KEY)
        return [RowKey(*key) for key in zip(*(columns[name].to_pylist() for name in _KEY), strict=True)]


def _blocks(rows: Sequence[TrajectoryTokens]) -> Iterator[tuple[int, int]]:
    """First row and number of rows of every block."""
    start, tokens = 0, 0
    for index, row in enumerate(rows):
        tokens += len(row)
        if tokens >= _TOKENS_OF_A_BLOCK:
            yield start, index + 1 - start
            start, tokens = index + 1, 0
    if start < len(rows):
        yield start, len(rows) - start


def _table(rows: Sequence[TrajectoryTokens]) -> pa.Table:
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}
    for name in NUMBERS:
        values = [getattr(row, name) for row in rows]
        if any(value is not None for value in values):
            columns[name] = pa.array(values)
    for name in LISTS:
        arrays = [getattr(row, name) for row in rows]
        present = [values for values in arrays if values is not None]
        if present:
            ends = np.cumsum([0 if values is None else len(values) for values in arrays], dtype=np.int32)
            missing = pa.array([values is None for values in arrays])
            flat = pa.array(np.concatenate(present))
            columns[name] = pa.ListArray.from_arrays(np.append(np.int32(0), ends), flat, mask=missing)
    return pa.table(columns)


def _rows(table: pa.Table) -> Iterator[TrajectoryTokens]:
    """Rows of a block. Their arrays are views of its columns."""
    numbers = {name: table[name].to_pylist() for name in NUMBERS if name in table.column_names}
    lists = {name: _arrays(table[name].combine_chunks()) for name in LISTS if name in table.column_names}
    for row in range(table.num_rows):
        cells = {name: values[row] for name, values in (numbers | lists).items()}
        yield TrajectoryTokens(**cells)


def _arrays(column: pa.ListArray) -> list[np.ndarray | None]:
    flat, starts = _array(column.values), _array(column.offsets)
    missing = column.is_null().to_pylist()
    return [
        None if none else flat[start:end] for none, start, end in zip(missing, starts[:-1], starts[1:], strict=True)
    ]


def _array(values: pa.Array) -> np.ndarray:
    """Convert values, of which none is missing. ``to_numpy`` would import pandas, which takes half a second."""
    import pyarrow as pa

    if pa.types.is_boolean(values.type):
        return np.from_dlpack(values.cast(pa.uint8())).view(np.bool_)
    return np.from_dlpack(values)
