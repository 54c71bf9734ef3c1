"""Blocking calls overlap, keep their deadline, and hold neither the event loop nor the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import gymnasium
import pytest

from agentrl_envs.adapters.gymnasium_text import GymnasiumEnvironment
from agentrl_envs.gym import UnicodeText
from agentrl_envs.settings import GymnasiumSettings
from agentrl_envs.threads import BlockingCallPool, LoopThread
from agentrl_envs.types import Ended, Problem

MEETING = threading.Barrier(2, timeout=60.0)
"""Breaks, and fails the test, unless two threads wait at it at once."""


class MeetingEnv(gymnasium.Env[str, str]):
    """Each of its calls blocks until that of another instance has come as far."""

    action_space = observation_space = UnicodeText(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        MEETING.wait()
        return "Go.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        MEETING.wait()
        return "", 1.0, True, False, {}


async def test_two_blocking_environments_overlap() -> None:
    environment = GymnasiumEnvironment(MeetingEnv, GymnasiumSettings(threads=2))
    await environment.open()
    beats = 0

    async def heart() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    async def play(number: int) -> Ended | None:
        episode = environment.episode(Problem(id=f"toy-{number}", statement="?", answer="5", source="toy"))
        await episode.start()
        step = await episode.step("5")
        await episode.close()
        return step.ended

    beating = asyncio.create_task(heart())
    assert await asyncio.gather(play(0), play(1)) == [Ended.ANSWERED, Ended.ANSWERED]
    beating.cancel()
    assert beats > 0  # the loop went on
    await environment.close()


async def test_no_more_calls_run_at_once_than_there_are_threads() -> None:
    calls = BlockingCallPool(2, name="test")
    lock, running, most = threading.Lock(), 0, 0

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)
        with lock:
            running -= 1
        return number

    assert await asyncio.gather(*(calls.run(lambda n=n: work(n), timeout=60.0) for n in range(20))) == list(range(20))
    assert most <= 2


async def test_errors_come_where_the_call_is_awaited() -> None:
    def bug() -> None:
        raise ZeroDivisionError("oops")

    with pytest.raises(ZeroDivisionError, match="oops"):
        await BlockingCallPool(1, name="test").run(bug)


async def test_a_stuck_call_holds_its_place_until_it_ends() -> None:
    calls, let_go = BlockingCallPool(1, name="test"), threading.Event()
    with pytest.raises(TimeoutError):
        await calls.run(let_go.wait, timeout=0.05)
    with pytest.raises(TimeoutError):
        await calls.run(lambda: None, timeout=0.05)
    let_go.set()
    assert await calls.run(lambda: 5, timeout=60.0) == 5


def test_a_stuck_call_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from agentrl_envs.threads import BlockingCallPool\n"
        "async def main():\n"
        "    try:\n"
        "        await BlockingCallPool(1, name='x').run(threading.Event().wait, timeout=0.01)\n"
        "    except TimeoutError:\n"
        "        print('late')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")


@pytest.mark.parametrize("wait", ["threading.Event().wait()", "await asyncio.to_thread(threading.Event().wait)"])
def test_a_stuck_coroutine_of_a_loop_thread_does_not_keep_the_process(wait: str) -> None:
    code = (
        "import asyncio, threading\n"
        "from agentrl_envs import threads\n"
        "threads.CLOSE_SECONDS = 0.01\n"
        "began = threading.Event()\n"
        "async def stuck():\n"
        "    began.set()\n"
        f"    {wait}\n"
        "loop = threads.LoopThread()\n"
        "loop.start(stuck())\n"
        "began.wait()\n"
        "loop.close()\n"
        "print('closed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "closed\n")


def test_what_still_runs_is_cancelled_when_the_loop_is_closed() -> None:
    loop, began, cleaned = LoopThread(), threading.Event(), list[str]()

    async def wait_forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(name)

    async def with_a_task_of_its_own() -> None:
        task = asyncio.create_task(wait_forever("inner"))
        await asyncio.sleep(0)
        began.set()
        await wait_forever("outer")
        await task

    future = loop.start(with_a_task_of_its_own())
    assert began.wait(60)
    loop.close()
    loop.close()
    assert sorted(cleaned) == ["inner", "outer"]
    assert future.cancelled()
