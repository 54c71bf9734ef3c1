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
import torch.distributed

from agentrl.errors import SettingsError, WorldError, is_out_of_memory
from agentrl.telemetry.files import atomic_write, world_errors
from agentrl.training.engine.recovery import Shortage, ShortageError, agreement_of_ranks

_Result = TypeVar("_Result")

_REMEDIES = (
    "model.gradient_checkpointing=true, model.checkpoint_offload=true, training.sequence_parallel=2, "
    "training.zero_stage=3 with more ranks, training.offload=optimizer or all, model.lora.rank, or a lower "
    "rollout.max_response_tokens"
)
_RECORD = "micro_batch_tokens.json"


class Forgetting(Protocol):
    """A module under DeepSpeed whose try can be given up half-way (:class:`.deepspeed_engine.TrainingEngine`)."""

    def begin(self) -> None: ...

    def forget(self) -> None: ...


class Fitted:
    """What has fitted into memory: the largest micro-batch of each kind of work, by its tokens.

    The first step does not count: states that it makes, such as an optimizer's, take room from the second.
    """

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}
        self._steps = 0

    def holds(self, kind: str, tokens: int) -> bool:
        """Whether as much work of this ``kind`` has fitted before."""
        return tokens <= self._largest.get(kind, -1)

    def add(self, kind: str, tokens: int) -> None:
        """It fits."""
        if self._steps:
            self._largest[kind] = max(tokens, self._largest.get(kind, 0))

    def end_step(self) -> None:
        """A step is done."""
        self._steps += 1


class Attempt:
    """One try at some work, after which all ranks agree whether it succeeded.

    All ranks do the same pieces of work, with the same collectives. Where memory runs out on one, they leave the try
    together, and nothing of it is left in the modules. A try that is not watched raises the error of memory itself, on
    the rank where it ran out; the others wait until they are ended.
    """

    def __init__(
        self, modules: Sequence[Forgetting], *, watch: bool = True, waits: Callable[[], None] = lambda: None
    ) -> None:
        """``watch``: agree before each collective. ``waits`` is called before this rank waits for others. Collective.

        Without collectives in their work, the others may first do all of it.
        """
        self._modules = modules
        self._waits = waits
        self._agreement = agreement_of_ranks()
        self._rank = torch.distributed.get_rank()
        self._agreement.begin(watch=watch)
        for module in modules:
            module.begin()

    def run(self, work: Callable[[], _Result], *, lengths: Sequence[int] = ()) -> _Result:
        """What a piece of ``work`` returns, on a micro-batch of trajectories of these ``lengths`` or on none.

        Raises ShortageError where memory ran out on this rank, or on another one that it would wait for.
        """
        try:
            with self._agreement.trying():
                return work()
        except ShortageError as error:
            found: Shortage | None = error.shortage
        except (RuntimeError, MemoryError) as error:
            inside = isinstance(error, torch.distributed.DistBackendError)  # the others wait inside the same collective
            if inside or not is_out_of_memory(error) or not self._agreement.watching:
                raise
            found = None
            self._waits()
        # With the exception its frames are gone, and what they held.
        own = Shortage(rank=self._rank, tokens=sum(lengths), alone=len(lengths) == 1)
        raise ShortageError(self._forget(found or self._agreement.outcome(own) or own))

    def agree(self) -> None:
        """Return if every rank succeeded; otherwise raise ShortageError on all. Collective if the try is watched."""
        found = self._agreement.outcome() if self._agreement.watching else None
        if found is not None:
            raise ShortageError(self._forget(found))

    def _forget(self, found: Shortage) -> Shortage:
        """Drop what the try still holds: gradients, gathered weights, and memory that its graph occupied."""
        for module in self._modules:
            module.forget()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found


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
        self._outside: int | None = None  # the step in which memory ran out outside micro-batches

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

    def halve(self, shortage: Shortage, *, step: int) -> None:
        """Halve until the micro-batch that failed does not fit.

        Raises WorldError where the step cannot be repeated, and SettingsError where no smaller micro-batch would help:
        after a single trajectory, or a second shortage of a step outside micro-batches, to which they matter by the
        fragments of memory alone that they leave.
        """
        before, outside = self.tokens, not shortage.tokens
        if shortage.alone:
            raise SettingsError(
                f"{_on(shortage, step)}, with one trajectory of {shortage.tokens} tokens in the micro-batch, which "
                f"cannot be smaller; continue from the last checkpoint with --resume and one of: {_REMEDIES}"
            )
        if outside and self._outside == step:
            raise SettingsError(
                f"{_on(shortage, step)}, outside micro-batches, which were made smaller already; continue from the "
                f"last checkpoint with --resume and one of: {_REMEDIES}"
            )
        while self.tokens >= min(before, shortage.tokens or before):
            self.tokens = max(1, self.tokens // 2)
        self._outside = step if outside else None
        self._remember()
        if shortage.changed:
            raise WorldError(
                f"{_on(shortage, step)}, in an update that had begun to change the weights, which cannot be repeated; "
                f"{self._resume()}"
            )
        self._told(
            f"step {step}: {shortage}; training.micro_batch_tokens is {self.tokens} from now on instead of {before}, "
            "and the step is repeated with the same trajectories"
        )

    def _resume(self) -> str:
        return (
            "continue from the last checkpoint with --resume, then with "
            f"training.micro_batch_tokens={self.tokens}. Where that is not enough: {_REMEDIES}"
        )

    @contextmanager
    def named(self, *, step: int) -> Iterator[None]:
        """Turn a shortage inside that no rank can repeat into a WorldError; the other ranks end with this one."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = (str(error) or "MemoryError").splitlines()[0]
            self.tokens = max(1, self.tokens // 2)
            self._writes = True  # the others may wait for this rank until they are ended
            self._remember()
            raise WorldError(
                f"step {step} ran out of memory while training ({why}), where other ranks may wait for this one; "
                f"{self._resume()}"
            ) from error

    def _remember(self) -> None:
        if self._file is None or not self._writes:
            return
        text = json.dumps(asdict(_Record(configured=self._configured, tokens=self.tokens)))
        with world_errors(self._file, "write"):
            atomic_write(self._file, lambda out: out.write(text.encode()))


def _on(shortage: Shortage, step: int) -> str:
    return f"step {step} ran out of memory while training: on rank {shortage.rank}"
