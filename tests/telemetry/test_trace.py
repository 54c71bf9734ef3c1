from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from telemetry.traces import check_nested, read_trace
from warm import run_warm

from agentrl.telemetry.files import repair_torn_line
from agentrl.telemetry.trace import (
    Trace,
    add_slice_since,
    reserve_lane,
    slice_start_time,
    start_trace,
    stop_trace,
    trace_service_call,
    trace_span,
)
from agentrl_envs import execution
from agentrl_envs.settings import ExecutionSettings


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Trace this process, and return the file."""
    start_trace(tmp_path / "trace.json", "rank 0")
    yield tmp_path / "trace.json"
    stop_trace()
    execution.trace_program = contextlib.nullcontext


def names(slices: list[dict[str, object]]) -> list[object]:
    return [row["name"] for row in slices]


def test_spans_lie_in_each_other_on_the_lane_of_their_task(path: Path) -> None:
    async def play(number: int) -> None:
        with reserve_lane("trajectories"):
            began = slice_start_time()
            with trace_span("turn", number=number) as facts:
                await asyncio.sleep(0)
                facts["tokens"] = 7
            with trace_service_call("server 1", "request"):
                await asyncio.sleep(0)
            add_slice_since(began, f"problem {number}")

    async def several() -> None:
        for _ in range(2):
            await asyncio.gather(*map(play, range(3)))

    with trace_span("step", step=1):
        asyncio.run(several())
    stop_trace()
    lanes = read_trace(path)
    check_nested(lanes)
    assert names(lanes["rank 0", "1"]) == ["step"]
    assert {lane for lane in lanes if lane[0] == "trajectories"} == {("trajectories", str(one)) for one in (1, 2, 3)}
    assert names(lanes["trajectories", "1"]) == ["problem 0", "turn", "request"] * 2
    assert lanes["trajectories", "2"][1]["args"] == {"number": 1, "tokens": 7}
    assert sum(len(slices) for lane, slices in lanes.items() if lane[0] == "server 1") == 6


def test_a_program_stands_beside_its_trajectory_and_in_the_sandbox(path: Path) -> None:
    execution.trace_program = partial(trace_service_call, "sandbox", "program")

    class Sandbox:
        async def execute(self, program: str, **options: object) -> SimpleNamespace:
            await asyncio.sleep(0)
            return SimpleNamespace(session_ended=False, outcome="ok")

    async def play() -> None:
        own = execution.EpisodeSandbox(Sandbox(), ExecutionSettings())  # type: ignore[arg-type]
        with reserve_lane("trajectories"), trace_span("environment"):
            await own.execute("print(1)")
        await own.execute("print(2)")  # of no trajectory

    asyncio.run(play())
    stop_trace()
    lanes = read_trace(path)
    assert names(lanes["trajectories", "1"]) == ["environment", "program"]
    assert names(lanes["sandbox", "1"]) == ["program", "program"]
    check_nested(lanes)


def test_nothing_is_traced_unless_it_was_started(tmp_path: Path) -> None:
    with trace_span("step") as facts, reserve_lane("trajectories"), trace_service_call("server", "request"):
        facts["x"] = 1
        add_slice_since(slice_start_time(), "turn")
    assert list(tmp_path.iterdir()) == []


def test_processes_append_to_one_file_and_a_killed_one_leaves_it_valid(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from agentrl.telemetry import trace\n"
        "trace.start_trace(Path(sys.argv[1]), 'worker')\n"
        "for number in range(5000):\n"
        "    with trace.trace_span('turn', number=number, text='x' * 20): pass\n"
        "os.kill(os.getpid(), 9)\n"
    )
    script = tmp_path / "killed.py"
    script.write_text(program)
    own = Trace(path, "rank 0")
    done = run_warm([sys.executable, str(script), str(path)], env=dict(os.environ), cwd=tmp_path, timeout=120)
    assert done.returncode == -9, done.stdout
    own.add_slice("step", own.main_lane, slice_start_time(), {})
    own.close()
    lanes = read_trace(path)
    check_nested(lanes)
    assert names(lanes["rank 0", "1"]) == ["step"]
    numbers = [row["args"]["number"] for row in lanes["worker", "1"]]
    assert numbers == list(range(len(numbers)))
    assert 4000 < len(numbers) <= 5000  # what waited is lost: at most 64 KiB
    assert list(tmp_path.glob(".*")) == []


def test_a_torn_line_is_cut_before_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for number in range(2):
        trace = Trace(path, f"rank {number}")
        trace.add_slice("step", trace.main_lane, slice_start_time(), {})
        trace.close()
        with path.open("a") as file:
            file.write('{"ph":"X","na')
        repair_torn_line(path)
    assert set(read_trace(path)) == {("rank 0", "1"), ("rank 1", "1")}


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(tmp_path / "trace.json", "rank 0")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, trace._file)
    os.close(full)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            trace.add_slice("step", trace.main_lane, slice_start_time(), {})
            trace.flush()
    trace.close()
    (record,) = caplog.records
    assert record.message.endswith("tracing stops: No space left on device")
