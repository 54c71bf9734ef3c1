"""Running out of memory while training: all ranks together halve their micro-batches and repeat the step."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from agentrl.errors import WorldError
from agentrl.telemetry.files import atomic_write, world_errors

_Result = TypeVar("_Result")
_Rows = TypeVar("_Rows", bound="RowsOfForward")

_SHORTAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""What torch's RuntimeError says where the machine's memory is meant."""

_REMEDIES = (
    "model.gradient_checkpointing=true, model.checkpoint_offload=true, training.sequence_parallel=2, "
    "training.zero_stage=3 with more ranks, training.offload=optimizer or all, model.lora.rank, or a lower "
    "rollout.max_response_tokens"
)
_RECORD = "micro_batch_tokens.json"


class ShortageError(Exception):
    """Memory ran out in a micro-batch of one rank at least. All ranks raise it together, outside collectives."""

    def __init__(self, *, rank: int, tokens: int, alone: bool) -> None:
        """``tokens`` of the smallest micro-batch that failed; ``alone``: one held a single trajectory."""
        super().__init__(f"rank {rank} ran out of memory in a micro-batch of {tokens} tokens")
        self.rank, self.tokens, self.alone = rank, tokens, alone


class RowsOfForward(Protocol):
    """The trajectories of one micro-batch."""

    @property
    def lengths(self) -> list[int]: ...

    def stand_in(self: _Rows) -> _Rows: ...


class Rejoining(Protocol):
    """An engine that can give up a backward half-way (:class:`.deepspeed_engine.TrainingEngine`)."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def can_rejoin(self) -> bool: ...

    def begin(self) -> None: ...

    def forget(self) -> None: ...

    def rejoin(self) -> None: ...

    def all_reduce_largest(self, values: Tensor) -> Tensor: ...


class Attempt:
    """One try at a row of micro-batches, after which all ranks agree whether it succeeded.

    A rank whose memory runs out meets the others in their collectives with a small stand-in for its micro-batch, and
    for each one after it: the try is given up where no rank waits for another one.
    """

    def __init__(self, engines: Sequence[Rejoining]) -> None:
        self._engines = engines
        self._failed: tuple[int, int] | None = None  # tokens and rows of this rank's micro-batch

    def run(self, work: Callable[[_Rows], _Result], rows: _Rows) -> _Result:
        """What ``work`` returns on a micro-batch, or on its stand-in once the try has failed."""
        if self._failed is None:
            for engine in self._engines:
                engine.begin()
            try:
                return work(rows)
            except (RuntimeError, MemoryError) as error:
                if not is_shortage(error) or not all(engine.can_rejoin for engine in self._engines):
                    raise
                self._failed = (sum(rows.lengths), len(rows.lengths))
            # With the exception its frames are gone, and what they held.
            free(self._engines)
            if self._engines[0].world_size == 1:
                self.agree()
            for engine in self._engines:
                engine.rejoin()
        return work(rows.stand_in())

    def agree(self) -> None:
        """Return if every rank succeeded; otherwise raise ShortageError on all. Collective."""
        engine = self._engines[0]
        tokens, rows = self._failed or (0, 0)
        own = [1, int(rows == 1), -tokens, engine.rank] if self._failed else [0, 0, -(2**52), -1]
        largest = engine.all_reduce_largest(torch.tensor(own, dtype=torch.float64, device=engine.device))
        failed, alone, size, rank = map(int, largest.tolist())
        if failed:
            free(self._engines)
            raise ShortageError(rank=rank, tokens=-size, alone=bool(alone))


def free(engines: Sequence[Rejoining]) -> None:
    """Give back what a failed try still holds: gradients, and memory that its graph occupied. Not collective."""
    for engine in engines:
        engine.forget()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the machine.

    >>> is_shortage(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")), \\
    ... is_shortage(RuntimeError("shape mismatch"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES)


@dataclass(frozen=True, kw_only=True)
class _Record:
    configured: int  # training.micro_batch_tokens when memory ran out
    tokens: int  # that fit since


class MicroBatchBudget:
    """The tokens of a micro-batch: what ``training.micro_batch_tokens`` says, or less since memory ran out.

    The run directory remembers it, for resumed runs, until the setting changes.
    """

    def __init__(self, configured: int, folder: Path | None, *, told: Callable[[str], None], writes: bool) -> None:
        """``told`` of each change. The rank that ``writes`` keeps the record in ``folder``."""
        self._configured = self.tokens = configured
        self._file = None if folder is None else folder / _RECORD
        self._told = told
        self._writes = writes

    def recall(self) -> None:
        """Continue with what the run directory remembers, if the setting is the same as then."""
        if self._file is None or not self._file.exists():
            return
        with world_errors(self._file, "read"):
            record = _Record(**json.loads(self._file.read_text()))
        if record.configured == self._configured:
            self.tokens = record.tokens
            self._told(
                f"training: micro-batches of {self.tokens} tokens, since memory ran out; another "
                f"training.micro_batch_tokens than {self._configured} counts again"
            )

    def halve(self, shortage: ShortageError, *, step: int) -> None:
        """Halve until the micro-batch that failed does not fit. Raises WorldError where that is a single trajectory."""
        if shortage.alone:
            raise WorldError(
                f"step {step} ran out of memory while training: on rank {shortage.rank}, with one trajectory of "
                f"{shortage.tokens} tokens in the micro-batch, which cannot be smaller; continue from the last "
                f"checkpoint with --resume and one of: {_REMEDIES}"
            )
        before = self.tokens
        while self.tokens >= min(before, shortage.tokens):
            self.tokens = self.tokens // 2
        self._remember()
        self._told(
            f"step {step}: {shortage}; training.micro_batch_tokens is {self.tokens} from now on instead of {before}, "
            "and the step is repeated with the same trajectories"
        )

    @contextmanager
    def named(self, *, step: int) -> Iterator[None]:
        """Turn a shortage inside that no rank can repeat into a WorldError; the other ranks end with this one."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_shortage(error):
                raise
            why = (str(error) or "MemoryError").splitlines()[0]
            self.tokens = max(1, self.tokens // 2)
            self._writes = True  # the others may wait for this rank until they are ended
            self._remember()
            raise WorldError(
                f"step {step} ran out of memory while training ({why}), where it cannot be repeated: at "
                "training.zero_stage=3, with training.sequence_parallel, or in the optimizer's update; continue from "
                f"the last checkpoint with --resume, then with training.micro_batch_tokens={self.tokens}. Where that "
                f"is not enough: {_REMEDIES}"
            ) from error

    def _remember(self) -> None:
        if self._file is None or not self._writes:
            return
        text = json.dumps(asdict(_Record(configured=self._configured, tokens=self.tokens)))
        with world_errors(self._file, "write"):
            atomic_write(self._file, lambda out: out.write(text.encode()))
