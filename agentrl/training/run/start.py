"""``agentrl train``: train in this process, start several ranks, or run as one of a launcher's ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

import torch

from agentrl.cluster.backends import has_many_nodes
from agentrl.cluster.launchers import (
    count_local_ranks,
    require_launcher_variables,
    set_variables_from_slurm,
    started_by_launcher,
)
from agentrl.cluster.local import THIS_MACHINE, log_file, tee_output_to_log
from agentrl.cluster.processes import PARENT_VARIABLE
from agentrl.config import dump_yaml
from agentrl.errors import EXIT_INTERRUPTED, AgentRLError, SettingsError
from agentrl.rollout.environment import check_environment
from agentrl.telemetry.console import Console
from agentrl.telemetry.machine import describe_machine
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.coldstart.policy import prepare_starting_policy
from agentrl.training.engine.collectives import check_shared_folder, run_on_rank_zero
from agentrl.training.engine.deepspeed_engine import leave_distributed, start_distributed
from agentrl.training.engine.determinism import (
    count_computing_processes,
    get_random_state,
    set_determinism,
    set_random_state,
    set_threads,
)
from agentrl.training.run.callbacks import Callbacks, RunFollower
from agentrl.training.run.launch import launch_ranks, runs_in_separate_processes
from agentrl.training.run.outputs import describe_progress
from agentrl.training.run.preflight import check_and_describe_inputs, check_teacher_sources, unmet_machine_requirements
from agentrl.training.run.session import TrainingSession
from agentrl.training.run.signals import handle_stop_signals, sigterm_as_ctrl_c

if TYPE_CHECKING:
    from agentrl.config import Settings


def train(settings: Settings, resume: bool, *, callbacks: Callbacks | None = None, embedded: bool = False) -> int:
    """Train and return the exit code. Under a launcher, this process is one of the launcher's ranks (``cluster.kind``).

    With ``embedded``, the caller's program continues afterwards: a second Ctrl-C raises KeyboardInterrupt instead of
    ending the process. If the run ends early, the last message contains its progress and the command that continues it.
    """
    kind, first = settings.cluster.kind, True
    with sigterm_as_ctrl_c():
        try:
            if not started_by_launcher(kind):
                with restore_process_state_on_exit():
                    return _train(settings, resume, callbacks, embedded=embedded)
            if kind == "environment":
                set_variables_from_slurm()
                require_launcher_variables()
            check_environment(settings)  # the environment's module may register an estimator or a loss
            check_teacher_sources(settings)
            first = os.environ["RANK"] == "0"
            run = _open_run(settings, resume) if first else None
            return run_rank(settings, run, resume=resume, callbacks=callbacks, embedded=embedded)
        except KeyboardInterrupt:
            if first:
                Console(settings.telemetry).note(f"stopped on request; {describe_progress(settings)}")
            return EXIT_INTERRUPTED
        except AgentRLError as error:
            if first and not isinstance(error, SettingsError):
                error.args = (f"{error}\n{describe_progress(settings)}",)
            raise


def runs_in_one_process(settings: Settings) -> bool:
    """Return True if training and rollouts run in this process only. Then no other process imports user functions."""
    alone = not started_by_launcher(settings.cluster.kind) and not runs_in_separate_processes(settings)
    return alone and settings.rollout.schedule == "synchronous"


@contextlib.contextmanager
def restore_process_state_on_exit() -> Iterator[None]:
    """Restore on exit the process state that a run changes, so that the caller or another run can continue.

    Not restored: imported modules, DeepSpeed's accelerator, and warning filters.
    """
    variables, random, threads = dict(os.environ), get_random_state(), torch.get_num_threads()
    deterministic, grouped = torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()
    deepspeed_log = logging.getLogger("DeepSpeed")
    level = deepspeed_log.level
    try:
        yield
    finally:
        if not grouped:
            leave_distributed()
        deepspeed_log.setLevel(level)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
        set_random_state(random)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)


def _train(settings: Settings, resume: bool, callbacks: Callbacks | None, *, embedded: bool) -> int:
    console = Console(settings.telemetry)
    check_and_describe_inputs(settings)
    here = not has_many_nodes(settings.cluster.kind)
    if here and (problems := unmet_machine_requirements(settings)):
        raise SettingsError("\n".join(problems))
    run = _open_run(settings, resume)
    for line in describe_machine():
        console.note(line)
    if not runs_in_separate_processes(settings):
        return run_rank(settings, run, resume=resume, callbacks=callbacks, embedded=embedded)
    with contextlib.closing(run):  # rank 0 opens it
        prepare_starting_policy(_with_local_sandbox(settings), console, announce_cached=False)  # rank 0 reports it
    poll = RunFollower(run.path, callbacks).poll if callbacks is not None else lambda: None
    return launch_ranks(settings, run.path, resume=resume, poll=poll)


def _with_local_sandbox(settings: Settings) -> Settings:
    """Return cold-start settings with a local sandbox, because the cluster has not started its services yet."""
    if settings.sandbox.scheme != "ray":
        return settings
    return settings.model_copy(update={"sandbox": settings.sandbox.model_copy(update={"url": "local://"})})


def _open_run(settings: Settings, resume: bool) -> RunDirectory:
    path = settings.run_path
    if resume:
        run = RunDirectory.resume(path)
        run.write_text("config.yaml", dump_yaml(settings))
        return run
    return RunDirectory.create(path, dump_yaml(settings))


def run_rank(
    settings: Settings,
    run: RunDirectory | None,
    *,
    resume: bool,
    callbacks: Callbacks | None = None,
    embedded: bool = False,
) -> int:
    """Run one training rank from start to end. Only rank 0 has a ``run`` and prints."""
    with contextlib.ExitStack() as opened:
        if run is not None:
            opened.callback(run.close)
        set_determinism(settings.training)
        rank, world = start_distributed(deadline=settings.training.collective_deadline)
        set_threads(settings, processes=count_computing_processes(settings, ranks=count_local_ranks(world)))
        torch.manual_seed(settings.seed)
        # If the settings do not name the run, each rank under an external launcher has generated a different name.
        name, runs_dir = run_on_rank_zero(lambda: (settings.name, settings.runs_dir))
        training = settings.training.model_copy(update={"num_processes": world})
        settings = settings.model_copy(update={"name": name, "runs_dir": runs_dir, "training": training})
        if world > 1:
            check_shared_folder(settings.run_path, rank=rank)
        # If another agentrl process started the ranks, that process reports how the run ended.
        reports = rank == 0 and PARENT_VARIABLE not in os.environ

        def end_at_once() -> None:
            if reports:
                print(f"stopped at once; {describe_progress(settings)}", file=sys.stderr, flush=True)
            os._exit(EXIT_INTERRUPTED)

        output = None if rank == 0 else opened.enter_context(open(os.devnull, "w"))
        console = Console(settings.telemetry, output, opened.enter_context(_log_to_file_under_launcher(settings, rank)))
        follower = RunFollower(run.path, callbacks) if run is not None and callbacks is not None else None
        changed = follower.poll if follower is not None else lambda: None
        session = TrainingSession(settings, run, console, rank=rank, world=world, on_change=changed)
        with handle_stop_signals(session.request_stop, None if embedded else end_at_once, announce=reports):
            try:
                session.print_setup_and_restore(resume=resume)
                return session.run_all_steps()
            finally:
                session.close()


def _log_to_file_under_launcher(settings: Settings, rank: int) -> contextlib.AbstractContextManager[TextIO | None]:
    """Log the output of a rank that an external launcher started. Ranks started by agentrl already have a log.

    Returns the open log on rank 0 if its output goes to a terminal, because terminal output is not logged.
    """
    log = log_file(settings.run_path.absolute(), THIS_MACHINE.node, "rank", rank)
    if PARENT_VARIABLE not in os.environ:
        if settings.training.num_processes == 1:  # this process is the command that the user started
            return contextlib.nullcontext()
        tee_output_to_log(log, keep_terminal_output=rank == 0)
    return log.open("a", buffering=1) if rank == 0 and sys.stdout.isatty() else contextlib.nullcontext()
