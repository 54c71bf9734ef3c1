"""Verdicts: the cheap certain cases, algebra, hostile answers, and processes that do not outlive anyone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_envs.grading import Grader, GraderError, GraderSettings
from agentrl_envs.grading.grader import GradingProcess, NoVerdictError, is_within_limits, quick_verdict
from agentrl_envs.types import Verdict

SLOW = r"\sum_{n=1}^{\infty} \frac{\sin n}{n^3+n^2+1}"  # a minute of algebra


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        ("25", "025", Verdict.CORRECT),
        ("27", "27.0", Verdict.CORRECT),
        ("27.", "27", Verdict.CORRECT),
        ("1234567", "1,234,567", Verdict.CORRECT),
        ("-0", "0", Verdict.CORRECT),
        ("+3", "3", Verdict.CORRECT),
        (" 3 ", "3", Verdict.CORRECT),
        ("$3$", "3", Verdict.CORRECT),
        (r"\frac{1}{2}", r"\frac{1}{2}", Verdict.CORRECT),
        ("-3", "3", Verdict.INCORRECT),
        ("26", "27.0", Verdict.INCORRECT),
        ("1,23", "123", None),
        ("0.5", "1/2", Verdict.CORRECT),
        (r"-\dfrac{6}{8}", r"\frac{-3}{4}", Verdict.CORRECT),
        ("2/3", "3/2", Verdict.INCORRECT),
        ("0.33", "1/3", Verdict.INCORRECT),
        ("0.333333", "1/3", Verdict.CORRECT),
        ("0.3333", "1/3", Verdict.INCORRECT),
        ("3.9999999999999996", "4", Verdict.CORRECT),
        ("0.00000012", "0.0000001", Verdict.INCORRECT),
        ("1/0", "5", None),
        (r"\left( 1,\, 2 \right)", "(1,2)", Verdict.CORRECT),
        ("1 2", "12", None),
        (r"\textbf{Evelyn}", r"\text{Evelyn}", Verdict.CORRECT),
        ("Carla", r"\text{Evelyn}", Verdict.INCORRECT),
        ("June 21", r"\text{June 20}", None),
        ("٣", "3", Verdict.CORRECT),
        ("", "", None),
    ],
)
def test_quick_verdict(answer: str, gold: str, verdict: Verdict | None) -> None:
    assert quick_verdict(answer, gold) is verdict


@given(st.integers(), st.integers(), st.integers(0, 3))
def test_integers_in_any_dress(left: int, right: int, zeros: int) -> None:
    dressed = f"{left:,}" + ("." + "0" * zeros if zeros else "")
    assert (quick_verdict(dressed, str(right)) is Verdict.CORRECT) == (left == right)


def test_bounds() -> None:
    assert is_within_limits("((x))", max_length=5, max_depth=2)
    assert not is_within_limits("((x)) ", max_length=5, max_depth=2)
    assert not is_within_limits("(((", max_length=5, max_depth=2)


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        (r"\frac{1}{2}", "0.5", Verdict.CORRECT),
        (r"\dfrac12", r"\frac{1}{2}", Verdict.CORRECT),
        ("0.3333333333333333", r"\frac13", Verdict.CORRECT),
        ("sqrt(2)/2", r"\frac{\sqrt{2}}{2}", Verdict.CORRECT),
        ("x**2 + 2*x + 1", "(x+1)^2", Verdict.CORRECT),
        ("pi/4", r"\frac{\pi}{4}", Verdict.CORRECT),
        ("Fraction(3, 4)", "0.75", Verdict.CORRECT),
        ("1e-3", r"\frac{1}{1000}", Verdict.CORRECT),
        ("(1, 1/2)", r"\left(1, \frac12\right)", Verdict.CORRECT),
        ("{2, 1}", r"\{1, 2\}", Verdict.CORRECT),
        (r"90^\circ", "90", Verdict.CORRECT),
        ("Tuesday", r"\text{Tuesday}", Verdict.CORRECT),
        ("pi/3", r"\frac{\pi}{4}", Verdict.INCORRECT),
        ("(1/2, 1)", r"\left(1, \frac12\right)", Verdict.INCORRECT),
        (r"\frac{", r"\frac12", Verdict.UNPARSABLE_ANSWER),
        (None, "5", Verdict.NO_ANSWER),
        ("  ", "5", Verdict.NO_ANSWER),
        ("5", "", Verdict.UNPARSABLE_GOLD),
        ("5", r"\frac{", Verdict.UNPARSABLE_GOLD),
    ],
)
async def test_verdicts(module_grader: Callable[..., Verdict], answer: str | None, gold: str, verdict: Verdict) -> None:
    assert module_grader(answer, gold) is verdict


@pytest.fixture(scope="module")
def module_grader() -> object:
    """One grading process for all plain verdicts of this module."""
    from agentrl_envs.threads import LoopThread

    loop = LoopThread()
    grader = Grader(GraderSettings(workers=1, deadline=60))
    yield lambda answer, gold: loop.run(grader.grade(answer, gold))
    loop.run(grader.close())
    loop.close()


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("{" * 10_000 + "}" * 10_000, Verdict.UNPARSABLE_ANSWER),
        ("9" * 1_000_000, Verdict.UNPARSABLE_ANSWER),
        ("x" * 1_000_000, Verdict.UNPARSABLE_ANSWER),
    ],
)
async def test_answers_out_of_bounds_reach_no_process(grader: Grader, answer: str, verdict: Verdict) -> None:
    assert await grader.grade(answer, r"\frac12") is verdict
    assert grader.idle_worker_pids == ()


@pytest.mark.slow
async def test_an_answer_past_the_deadline_is_wrong_and_its_process_is_gone() -> None:
    grader = Grader(GraderSettings(workers=1, deadline=1.0))
    assert await grader.grade("sqrt(1)/3", "1/2") is Verdict.INCORRECT
    (pid,) = grader.idle_worker_pids
    assert await grader.grade(SLOW, "7") is Verdict.ANSWER_TIMEOUT
    assert not alive(pid)
    assert await grader.grade("sqrt(4)/4", "1/2") is Verdict.CORRECT  # a fresh process
    await grader.close()


@pytest.mark.slow
async def test_a_gold_answer_that_is_too_slow_itself_is_no_data() -> None:
    grader = Grader(GraderSettings(workers=1, deadline=1.0))
    assert await grader.grade("7", SLOW) is Verdict.GRADER_TIMEOUT
    assert await grader.check_reference(SLOW) is Verdict.GRADER_TIMEOUT
    assert await grader.grade(SLOW, "7") is Verdict.ANSWER_TIMEOUT
    await grader.close()


@pytest.mark.slow
async def test_the_deadline_counts_processor_time() -> None:
    """A process that is stopped for longer than its deadline, as on a machine with too much to do, still answers."""
    grader = Grader(GraderSettings(workers=1, deadline=2.0))
    await grader.grade("sqrt(1)/3", "1/2")
    (pid,) = grader.idle_worker_pids
    os.kill(pid, signal.SIGSTOP)
    verdict = asyncio.create_task(grader.grade("sqrt(4)/4", "1/2"))
    await asyncio.wait([verdict], timeout=3.0)
    assert not verdict.done()
    os.kill(pid, signal.SIGCONT)
    assert await verdict is Verdict.CORRECT
    assert grader.idle_worker_pids == (pid,)
    await grader.close()


@pytest.mark.slow
async def test_a_process_that_hangs_without_computing_says_nothing_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = GradingProcess.start

    async def stopped(settings: GraderSettings) -> GradingProcess:
        process = await start(settings)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    process = await stopped(GraderSettings(hang_deadline=0.5))
    with pytest.raises(NoVerdictError, match=r"did not respond for 0\.5 s"):
        await process.compare("sqrt(4)/4", "1/2")
    await process.kill()
    monkeypatch.setattr(GradingProcess, "start", stopped)
    grader = Grader(GraderSettings(workers=1, hang_deadline=0.2))
    assert await grader.grade("sqrt(4)/4", "1/2") is Verdict.GRADER_TIMEOUT
    assert grader.idle_worker_pids == ()
    await grader.close()


@pytest.mark.slow
async def test_an_answer_on_which_processes_die_is_wrong() -> None:
    grader = Grader(GraderSettings(workers=1, deadline=600.0))
    verdict = asyncio.create_task(grader.grade(SLOW, "7"))
    await kill_when_it_computes(verdict)
    assert not verdict.done()
    await kill_when_it_computes(verdict)
    assert await verdict is Verdict.ANSWER_TIMEOUT
    await grader.close()


async def kill_when_it_computes(verdict: asyncio.Task[Verdict]) -> None:
    """Kill the one grading process as soon as it is ready and has computed for a while longer."""
    ready: dict[int, int] = {}
    while True:
        await asyncio.wait([verdict], timeout=0.02)
        assert not verdict.done()
        for pid in grading_children():
            if pid not in ready and memory_is_limited(pid):  # the last it does before its first comparison
                ready[pid] = cpu_ticks(pid)
            elif pid in ready and cpu_ticks(pid) > ready[pid] + 20:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: not alive(pid))  # type: ignore[misc]
                return


def grading_children() -> list[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"grading.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def memory_is_limited(pid: int) -> bool:
    limits = Path(f"/proc/{pid}/limits").read_text()
    return re.search(r"Max address space +unlimited", limits) is None


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["10**10**10", "-" * 1900 + "5", "(" * 39 + "5", "\\frac" * 390, "1/" * 900 + "1"])
async def test_hostile_answers_get_a_verdict(answer: str) -> None:
    grader = Grader(GraderSettings(workers=1, deadline=2.0))
    assert await grader.grade(answer, "7/2") in (
        Verdict.INCORRECT,
        Verdict.UNPARSABLE_ANSWER,
        Verdict.ANSWER_TIMEOUT,
    )
    await grader.close()


async def test_equal_questions_share_one_comparison() -> None:
    grader = Grader(GraderSettings(workers=4))
    verdicts = await asyncio.gather(*(grader.grade("sqrt(4)/4", "1/2") for _ in range(20)))
    assert set(verdicts) == {Verdict.CORRECT}
    assert len(grader.idle_worker_pids) == 1
    await grader.close()


@pytest.mark.slow
async def test_a_killed_process_is_replaced(grader: Grader) -> None:
    await grader.grade("sqrt(4)/4", "1/2")
    os.kill(grader.idle_worker_pids[0], signal.SIGKILL)
    assert await grader.grade("sqrt(9)/6", "1/2") is Verdict.CORRECT


async def test_cancelling_one_caller_leaves_the_other_its_verdict(grader: Grader) -> None:
    first = asyncio.create_task(grader.grade("sqrt(4)/4", "1/2"))
    second = asyncio.create_task(grader.grade("sqrt(4)/4", "1/2"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is Verdict.CORRECT


async def test_a_process_that_cannot_start_is_an_error_with_its_reason() -> None:
    grader = Grader(GraderSettings(workers=1, memory_mb=256, start_deadline=0.001))
    with pytest.raises(GraderError, match="start_deadline"):
        await grader.grade("sqrt(4)/4", "1/2")
    await grader.close()
    with pytest.raises(GraderError, match="closed"):
        await grader.grade("1", "1")


async def test_workers_get_no_secrets(grader: Grader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    await grader.grade("sqrt(4)/4", "1/2")
    environment = Path(f"/proc/{grader.idle_worker_pids[0]}/environ").read_bytes()
    assert b"SECRET_TOKEN" not in environment


ORPHAN = """
import asyncio, sys
from agentrl_envs.grading import Grader, GraderSettings

async def main():
    grader = Grader(GraderSettings(workers=2, deadline=3.0))
    await grader.grade("sqrt(4)/4", "1/2")
    print(*grader.idle_worker_pids, flush=True)
    await grader.grade(sys.argv[1], "1/2") if sys.argv[1] else await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["", SLOW], ids=["idle", "busy"])
def test_no_process_outlives_a_killed_parent(answer: str) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN, answer], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if answer:
            before = cpu_ticks(pid)
            wait_until(lambda: cpu_ticks(pid) > before + 10)  # it computes
        parent.kill()
    wait_until(lambda: not alive(pid))


def test_the_trainers_process_never_imports_math_verify() -> None:
    code = "import agentrl_envs.simpletir, sys; sys.exit('math_verify' in sys.modules or 'sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll; a condition that never comes ends with the assertion."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_ticks(pid: int) -> int:
    """User clock ticks of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
