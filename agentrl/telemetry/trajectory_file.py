"""Files with the trajectories of one step: Parquet with Zstandard, one row per trajectory.

Token ids (also in supports) and log-probabilities are columns of numbers. The column ``record`` contains the
remaining data as JSON, in which each list of numbers is replaced by its length:

>>> _split_record({"prompt_ids": [7, 8], "segments": [{"token_ids": [1], "log_probs": [-0.5], "text": "a"}]})
({'prompt_ids': 2, 'segments': [{'token_ids': 1, 'log_probs': 1, 'text': 'a'}]}, [[7, 8], [1]], [[-0.5]])
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from agentrl.errors import WorldError
from agentrl.telemetry.files import atomic_write, encode_json_line, malformed_as_world_error
from agentrl.telemetry.records import JsonRecord

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"PAR1"  # first and last bytes of a complete file
_MIN_BLOCK_SIZE = 1 << 18  # tokens plus bytes of JSON in a row group, which is written and read as a whole
_LARGEST_BLOCK = 1 << 28  # bytes, 20 times the size of an ordinary row group; limits the memory of readers
_COLUMNS = ["record", "token_ids", "log_probs"]
_LOG_PROBS = "log_probs"
_LIST_FIELDS = ("prompt_ids", "token_ids", _LOG_PROBS, "support_ids", "support_sizes")


def write_trajectories(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the records of :meth:`~agentrl.trajectory.Trajectory.to_record` to one file, atomically.

    Most of the time is spent in compression, which releases the GIL. Raises WorldError if the file cannot be written,
    and ValueError if JSON cannot express a record.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = (pa.binary(), pa.list_(pa.int32()), pa.list_(pa.float64()))
    schema = pa.schema(list(zip(_COLUMNS, types, strict=True)))

    def write(out: IO[bytes]) -> None:
        with pq.ParquetWriter(
            out,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            # Most log-probabilities are float32 values, so grouping bytes by position produces compressible zeros.
            use_byte_stream_split=["token_ids.list.element", "log_probs.list.element"],
            write_statistics=False,
        ) as writer:
            for block in _blocks(records):
                lines, ids, log_probs = zip(*block, strict=True)
                columns = [pa.array(lines), _make_list_array(ids, "i"), _make_list_array(log_probs, "d")]
                writer.write_table(pa.table(columns, schema=schema))

    atomic_write(path, write)


def read_trajectories(path: Path, wanted: Callable[[int, bytes], bool]) -> Iterator[tuple[int, JsonRecord]]:
    """Yield the index (from 0) and the record of each row for which ``wanted(index, JSON of the record)`` is true.

    The JSON contains neither token ids nor log-probabilities. Raises WorldError if the file is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = [(field.name, field.type) for field in file.schema_arrow]
            if file.schema_arrow.names != _COLUMNS or columns[0][1] != pa.binary():
                raise WorldError(f"{path} is damaged: its columns are {columns}")
            start = 0
            for block in range(file.num_row_groups):
                if file.metadata.row_group(block).total_byte_size > _LARGEST_BLOCK:
                    raise WorldError(f"{path}, line {start + 1} is damaged: larger than {_LARGEST_BLOCK >> 20} MB")
                lines = file.read_row_group(block, columns=["record"])["record"].to_pylist()
                if None in lines:
                    raise WorldError(f"{path}, line {start + lines.index(None) + 1} is damaged: the record is missing")
                chosen = [row for row, line in enumerate(lines) if wanted(start + row, line)]
                if chosen:
                    numbers = file.read_row_group(block, columns=["token_ids", "log_probs"]).take(chosen)
                    for row, ids, log_probs in zip(chosen, numbers["token_ids"], numbers["log_probs"], strict=True):
                        with malformed_as_world_error(f"{path}, line {start + row + 1}"):
                            record = _join_parts(lines[row], _to_list(ids.values), _to_list(log_probs.values))
                        yield start + row, record
                start += len(lines)
    except (OSError, pa.ArrowException) as error:
        raise WorldError(f"cannot read the trajectories {path}: {error}") from error


def is_complete_file(path: Path) -> bool:
    """Return False if the file is truncated. Does not detect damage inside the file."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - len(_MAGIC)))
        return size > len(_MAGIC) and file.read() == _MAGIC


_Row = tuple[bytes, list[Sequence[int]], list[Sequence[float]]]


def _blocks(records: Iterable[Mapping[str, Any]]) -> Iterator[list[_Row]]:
    rows: list[_Row] = []
    size = 0
    for record in records:
        rest, ids, log_probs = _split_record(record)
        rows.append((encode_json_line(rest), ids, log_probs))
        size += len(rows[-1][0]) + sum(map(len, ids))
        if size >= _MIN_BLOCK_SIZE:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _split_record(record: Mapping[str, Any]) -> tuple[JsonRecord, list[Sequence[int]], list[Sequence[float]]]:
    """Split a record into its JSON part, the lists of token ids, and the lists of log-probabilities."""
    ids: list[Sequence[int]] = []
    log_probs: list[Sequence[float]] = []

    def shortened(item: Mapping[str, Any]) -> JsonRecord:
        copy = dict(item)
        for name in filter(copy.__contains__, _LIST_FIELDS):
            (log_probs if name == _LOG_PROBS else ids).append(copy[name])
            copy[name] = len(copy[name])
        return copy

    rest = shortened(record)
    if "segments" in rest:
        rest["segments"] = [shortened(segment) for segment in rest["segments"]]
    return rest, ids, log_probs


def _join_parts(line: bytes, ids: list[int], log_probs: list[float]) -> JsonRecord:
    """Join the parts that :func:`_split_record` returns. Raises ValueError if their lengths do not match."""
    record = json.loads(line)
    used, scored = 0, 0
    for item in (record, *record.get("segments", ())):
        for name in filter(item.__contains__, _LIST_FIELDS):
            if item[name] < 0:
                raise ValueError(f"{item[name]} {name}")
            if name == _LOG_PROBS:
                item[name] = log_probs[scored : (scored := scored + item[name])]
            else:
                item[name] = ids[used : (used := used + item[name])]
    if (used, scored) != (len(ids), len(log_probs)):
        raise ValueError(
            f"the record has {used} token ids and {scored} log-probabilities, but the columns have {len(ids)} and "
            f"{len(log_probs)}"
        )
    return dict(record)


def _make_list_array(rows: Sequence[Sequence[Sequence[float]]], code: Literal["i", "d"]) -> pa.ListArray:
    """Build an array with a list of C ints or doubles per row. struct is twice as fast as NumPy."""
    import pyarrow as pa

    lengths = [sum(map(len, parts)) for parts in rows]
    try:
        flat = b"".join(struct.pack(f"{len(part)}{code}", *part) for parts in rows for part in parts)
    except struct.error as error:
        raise ValueError(f"a token id or log-probability cannot be stored: {error}") from error
    return pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), np.frombuffer(flat, dtype=code))


def _to_list(values: pa.Array) -> list[Any]:
    # ``to_pylist`` is 20 times slower, and ``to_numpy`` imports pandas.
    return np.from_dlpack(values).tolist()
