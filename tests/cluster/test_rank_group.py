"""When a rank fails, the others end; the first failure is what is reported."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cluster.local import THIS_MACHINE, LocalCluster, LocalProcess, LogPrinter
from agentrl.cluster.processes import NodeLostError, ProcessSpec, Reservation
from agentrl.errors import EXIT_PEER_LOST, EXIT_STUCK, OutOfMemoryError, SettingsError
from agentrl.training.run.launch import RankProcesses

SLEEP = "import time; time.sleep(600)"


def spec(number: int, code: str, **more: object) -> ProcessSpec:
    return ProcessSpec(role="rank", number=number, arguments=("-c", code), **more)  # type: ignore[arg-type]


class Gone:
    """A rank of a node that is lost."""

    def __init__(self, number: int) -> None:
        self.spec = spec(number, "")
        self.reservation = Reservation(number=1, node="far", address="10.0.0.2")

    def wait(self, seconds: float) -> int | None:
        raise NodeLostError("the node far (10.0.0.2) is gone")

    def send_signal(self, number: signal.Signals) -> None:
        """It reaches nobody."""


def test_a_rank_that_fails_ends_the_others() -> None:
    ranks = [LocalProcess(spec(0, SLEEP), THIS_MACHINE), LocalProcess(spec(1, "raise SystemExit(9)"), THIS_MACHINE)]
    reported = list[object]()
    end = RankProcesses(ranks, reported.append).wait_and_return_root_cause()
    assert end is not None
    assert reported == [end]
    assert (end.rank.spec.number, end.code, end.killed) == (1, 9, False)
    assert str(end) == f"training rank 1 on {THIS_MACHINE.node} exited with code 9"
    assert ranks[0].wait(0.0) == -signal.SIGTERM


def test_a_lost_node_is_the_reason_even_if_other_ranks_fail_of_it() -> None:
    end = RankProcesses([LocalProcess(spec(0, SLEEP), THIS_MACHINE), Gone(1)]).wait_and_return_root_cause()
    assert end is not None
    assert end.killed
    assert str(end) == "training rank 1 is lost: the node far (10.0.0.2) is gone"


class Told:
    """A rank that ends as it is told, after some looks at it."""

    def __init__(self, number: int, *codes: int | None) -> None:
        self.spec = spec(number, "")
        self.reservation = THIS_MACHINE
        self._codes = list(codes)

    def wait(self, seconds: float) -> int | None:
        return self._codes.pop(0)

    def send_signal(self, number: signal.Signals) -> None:
        """It ends as it is told."""


def test_whoever_ends_with_the_worker_is_not_the_cause() -> None:
    reported = list[object]()
    end = RankProcesses(
        [Told(0, EXIT_PEER_LOST), Told(1, None, None, -9), Told(2, None, None, None, 1)], reported.append
    ).wait_and_return_root_cause()
    assert str(end) == f"training rank 1 on {THIS_MACHINE.node} was killed by SIGKILL"
    assert reported == [end]
    alone = RankProcesses(
        [Told(0, EXIT_PEER_LOST), Told(1, None, -signal.SIGTERM)], reported.append
    ).wait_and_return_root_cause()
    assert str(alone) == f"training rank 0 on {THIS_MACHINE.node} lost the rollout worker"
    assert reported == [end, alone]
    stuck = RankProcesses(
        [Told(0, EXIT_PEER_LOST), Told(1, None, EXIT_STUCK), Told(2, None, None, 1)]
    ).wait_and_return_root_cause()
    assert str(stuck) == f"training rank 1 on {THIS_MACHINE.node} was stuck"


@pytest.mark.parametrize(
    ("code", "end"),
    [(OutOfMemoryError.exit_code, "ran out of memory"), (SettingsError.exit_code, "exited with code 2")],
)
def test_a_rank_that_ended_with_a_message_is_the_cause_of_a_crash_that_is_seen_first(code: int, end: str) -> None:
    found = RankProcesses([Told(0, 1), Told(1, None, code)]).wait_and_return_root_cause()
    assert str(found) == f"training rank 1 on {THIS_MACHINE.node} {end}"


def test_ranks_that_end_well_have_no_failure() -> None:
    assert (
        RankProcesses(
            [LocalProcess(spec(number, ""), THIS_MACHINE) for number in range(2)]
        ).wait_and_return_root_cause()
        is None
    )


def test_insisting_kills_at_once() -> None:
    group = RankProcesses([LocalProcess(spec(0, SLEEP), THIS_MACHINE)])
    group.kill()
    end = group.wait_and_return_root_cause()
    assert end is not None
    assert end.code == -signal.SIGKILL
    assert group.killed


def test_a_process_runs_in_its_folder_with_its_variables_and_its_log(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.environ['OWN'], 'HOME' in os.environ)"
    log = tmp_path / "logs" / "said.log"
    process = LocalProcess(
        spec(0, code, folder=tmp_path, environment={"OWN": "1", "HOME": None}, log=log), THIS_MACHINE
    )
    assert process.wait(60.0) == 0
    process.wait_or_kill(0.0)
    assert log.read_text().split() == [str(tmp_path), "1", "False"]


def test_what_a_process_says_is_shown_and_kept_though_it_is_killed(tmp_path: Path) -> None:
    """Written by a process that says more after its starter has ended."""
    log = tmp_path / "logs" / "both.log"
    # Each line is one write: two ``tee`` share the log, and parts of lines could mix.
    code = "import os; os.write(1, b'said\\n'); os.write(2, b'failed\\n'); os.abort()"
    starter = f"""
from pathlib import Path
from agentrl.cluster.local import THIS_MACHINE, LocalProcess
from agentrl.cluster.processes import ProcessSpec
log = Path({str(log)!r})
process = LocalProcess(ProcessSpec(role="rank", number=1, arguments=("-c", {code!r}), log=log), THIS_MACHINE)
process.wait_or_kill(60.0)
"""
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "failed\n")
    assert sorted(log.read_text().split()) == ["failed", "said"]


def test_a_process_keeps_its_own_log_but_for_what_it_draws_on_a_terminal(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "own.log"
    code = f"""
import sys
from pathlib import Path
from agentrl.cluster.local import tee_output_to_log
tee_output_to_log(Path({str(log)!r}), keep_terminal_output=True)
print("drawn", flush=True)
print("failed", file=sys.stderr, flush=True)
"""
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (os.read(ours, 100), done.stderr, log.read_text()) == (b"drawn\r\n", "failed\n", "failed\n")
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=120)
    assert sorted(log.read_text().split()) == ["drawn", "failed", "failed"]
    os.close(ours)
    os.close(theirs)


def test_released_places_run_nothing_any_more() -> None:
    cluster = LocalCluster(None)
    process = cluster.start(spec(0, SLEEP), THIS_MACHINE)
    cluster.release()
    assert process.wait(0.0) == -signal.SIGKILL
    assert cluster.nodes()[0].gpus == 0


def test_the_relay_shows_what_is_added_and_whole_lines_only(tmp_path: Path) -> None:
    log, shown = tmp_path / "log", list[str]()
    log.write_text("before\n")
    relay = LogPrinter(shown.append)
    relay.follow(log)
    with log.open("a") as file:
        file.write("one\ntw")
        file.flush()
        while not shown:
            pass
        file.write("o\nlast")
    relay.close()
    assert "".join(shown) == "one\ntwo\nlast"
    assert shown[0] == "one\n"


@pytest.mark.parametrize("module", ["agentrl.training.run.launch", "agentrl.cluster"])
def test_ray_is_not_loaded_unless_it_is_asked_for(module: str) -> None:
    code = f"import sys, {module}; raise SystemExit('ray' in sys.modules)"
    assert LocalProcess(spec(0, code), THIS_MACHINE).wait(300.0) == 0
