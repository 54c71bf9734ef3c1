"""Handling of out-of-memory errors: the process ends, and the run continues with smaller micro-batches.

A rank that is out of memory cannot join the collectives in which the other ranks wait, so no rank repeats the step. The
rank records a smaller ``training.micro_batch_tokens`` in the run directory and raises OutOfMemoryError. Its exit code
makes ``cluster.restarts`` start the ranks again from the last checkpoint, or from the start of the run if there is
none. ``--resume`` reads the same record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.errors import AgentRLError, OutOfMemoryError, SettingsError, is_out_of_memory
from agentrl.telemetry.files import atomic_write, os_errors_as_world_errors

_FILE = "micro_batch_tokens.json"
_REMEDIES = (
    "model.gradient_checkpointing=true, model.checkpoint_offload=true, training.sequence_parallel=2, "
    "training.zero_stage=3 with more ranks, training.offload=optimizer or all, model.lora.rank, or a lower "
    "rollout.max_response_tokens"
)


class MicroBatchMemoryError(Exception):
    """Memory ran out in a micro-batch of ``tokens`` tokens. The library's error is the cause of this exception."""

    def __init__(self, tokens: int, trajectories: int) -> None:
        super().__init__(f"a micro-batch of {tokens} tokens does not fit into memory")
        self.tokens = tokens
        self.trajectories = trajectories


@contextmanager
def convert_memory_errors(*, tokens: int, trajectories: int) -> Iterator[None]:
    """Raise MicroBatchMemoryError if memory runs out inside the block, which computes one micro-batch."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MicroBatchMemoryError(tokens, trajectories) from error


@dataclass(frozen=True, kw_only=True)
class _BudgetRecord:
    """Content of ``micro_batch_tokens.json``.

    >>> _BudgetRecord(configured=16384, tokens=8192)
    _BudgetRecord(configured=16384, tokens=8192, outside=False)
    """

    configured: int  # training.micro_batch_tokens when memory ran out; the record is ignored if the setting has changed
    tokens: int  # the size of micro-batches since then
    outside: bool = False  # True if memory ran out outside micro-batches, where smaller micro-batches may not help


class MicroBatchBudget:
    """Largest micro-batch in tokens: ``training.micro_batch_tokens``, or less if memory ran out with that value."""

    def __init__(self, configured: int, folder: Path, *, rank: int) -> None:
        """Read the record in the run directory ``folder``, if there is one for the value ``configured``."""
        self._file = folder / _FILE
        self._rank = rank
        self._record = _BudgetRecord(configured=configured, tokens=configured)
        if self._file.exists():
            with os_errors_as_world_errors(self._file, "read"):
                record = _BudgetRecord(**json.loads(self._file.read_text()))
            if record.configured == configured:
                self._record = record

    @property
    def tokens(self) -> int:
        return self._record.tokens

    def warn_if_reduced(self, warn: Callable[[str], None]) -> None:
        """Call ``warn`` with a message if micro-batches are smaller than configured."""
        if self.tokens < self._record.configured:
            warn(
                f"training: micro-batches have {self.tokens} tokens, because memory ran out with "
                f"training.micro_batch_tokens={self._record.configured}: change this setting to override the limit"
            )

    @contextmanager
    def shrink_on_out_of_memory(self, step: int) -> Iterator[None]:
        """Record a smaller size if memory runs out inside the block.

        Raises OutOfMemoryError, or SettingsError if smaller micro-batches do not help: after a micro-batch of one
        trajectory, and after a second failure outside micro-batches. The first failure outside micro-batches may be due
        to memory that large micro-batches fragmented.
        """
        try:
            yield
        except MicroBatchMemoryError as error:
            raise self._reduce_budget_and_build_error(
                step, error.__cause__, error.tokens, error.trajectories
            ) from error.__cause__
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._reduce_budget_and_build_error(step, error, 0, 0) from error

    def _reduce_budget_and_build_error(
        self, step: int, cause: BaseException | None, tokens: int, trajectories: int
    ) -> AgentRLError:
        """Record a smaller size if it may help, and return the error to raise.

        ``tokens`` and ``trajectories`` are 0 outside micro-batches.
        """
        before = self._record
        if trajectories == 1:
            where, is_final = f"in a micro-batch of one trajectory ({tokens} tokens), which cannot be smaller", True
        elif trajectories:
            where, is_final = f"in a micro-batch of {tokens} tokens ({trajectories} trajectories)", False
        else:
            where, is_final = "outside micro-batches", before.outside
            where += " for the second time" if is_final else ""
        text = (
            f"rank {self._rank} ran out of memory while training step {step}, {where}: "
            f"{(str(cause) or type(cause).__name__).splitlines()[0]}"
        )
        if is_final:
            return SettingsError(f"{text}\ncontinue from the last checkpoint with --resume and one of: {_REMEDIES}")
        reduced = before.tokens
        while reduced >= min(before.tokens, tokens or before.tokens):
            reduced = max(1, reduced // 2)
        self._record = _BudgetRecord(
            configured=before.configured, tokens=reduced, outside=before.outside or not trajectories
        )
        # Write on the failing rank, because the others may wait for it in a collective until they are killed.
        atomic_write(self._file, lambda out: out.write(json.dumps(asdict(self._record)).encode()))
        return OutOfMemoryError(
            f"{text}\nthe run continues from its last checkpoint with micro-batches of {reduced} tokens instead of "
            f"{before.tokens}: automatically up to cluster.restarts times, otherwise with --resume. If this is not "
            f"enough, set one of: {_REMEDIES}"
        )
