"""Sessions with namespaces, as root of a container without namespaces, and as an unprivileged user."""

from __future__ import annotations

import pytest
from sandbox.programs import LEAVE

from agentrl_sandbox.client import Outcome, UnknownSessionError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def test_state_and_files_stay_and_branches_diverge(everywhere):
    session = await everywhere.open_session()
    write = "import os\nx = 1; open('f', 'w').write('origin')"
    done = await everywhere.execute(write, session=session, files={"d/g": b"\xff"}, fetch_files=["f", "d/g"])
    assert (done.outcome, dict(done.files)) == (Outcome.OK, {"f": b"origin", "d/g": b"\xff"})
    fork = await everywhere.fork_session(session)
    await everywhere.execute("x = 2; open('f', 'w').write('fork')", session=fork)
    look = "print(x, open('f').read(), sorted(os.listdir()))"
    assert (await everywhere.execute(look, session=session)).stdout == "1 origin ['d', 'f']\n"
    await everywhere.close_session(session)
    assert (await everywhere.execute(look, session=fork)).stdout == "2 fork ['d', 'f']\n"
    await everywhere.close_session(fork)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("while True: pass", Outcome.TIMEOUT),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", Outcome.OUTPUT_LIMIT),
        (
            "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = b'x' * (60 << 20)\n"
            "        time.sleep(60)\ntime.sleep(60)",
            Outcome.MEMORY_LIMIT,
        ),
        ("import os; os._exit(7)", Outcome.ERROR),
        ("import os; os.abort()", Outcome.KILLED),
    ],
)
async def test_what_kills_a_program_ends_its_session_alone(everywhere, program, outcome):
    session = await everywhere.open_session()
    fork = await everywhere.fork_session(session)
    timeout = 1.0 if outcome is Outcome.TIMEOUT else 60.0
    assert (await everywhere.execute(program, session=session, timeout=timeout)).outcome is outcome
    with pytest.raises(UnknownSessionError):
        await everywhere.execute("1", session=session)
    assert (await everywhere.execute("print('lives')", session=fork)).stdout == "lives\n"
    await everywhere.close_session(fork)


DAEMON = (
    f"import ctypes, os, platform, threading, time\n{LEAVE}"
    "def work():\n    while True:\n        open('alive', 'w').write(str(time.time())); time.sleep(0.01)\n"
    "if os.fork() == 0:\n    leave()\n    if os.fork() == 0:\n        WORK\n    os._exit(0)\n"
    "os.wait()\nwhile not os.path.exists('alive') or not open('alive').read():\n    time.sleep(0.01)"
)
# The kernel reports such a process as a zombie, although its second thread continues.
WITHOUT_ITS_FIRST_THREAD = (
    "threading.Thread(target=work).start()\n"
    "        ctypes.CDLL(None).syscall(60 if platform.machine() == 'x86_64' else 93, 0)"
)

# Each process ends after its child has forked, so there is always another process.
CHAIN = (
    "while True:\n            open('alive', 'w').write(str(time.time()))\n"
    "            if os.fork():\n                time.sleep(0.005)\n                os._exit(0)"
)
SWIFT_CHAIN = CHAIN.replace("time.sleep(0.005)", "pass")


@pytest.mark.parametrize(
    "work",
    ["work()", WITHOUT_ITS_FIRST_THREAD, CHAIN, SWIFT_CHAIN],
    ids=["process", "thread", "chain", "swift-chain"],
)
async def test_what_a_program_leaves_running_ends_with_it(everywhere, work):
    session = await everywhere.open_session()
    assert (await everywhere.execute(DAEMON.replace("WORK", work), session=session)).outcome is Outcome.OK
    look = "before = open('alive').read(); time.sleep(0.3); print(before == open('alive').read())"
    assert (await everywhere.execute(look, session=session)).stdout == "True\n"
    await everywhere.close_session(session)


async def test_the_next_session_of_a_slot_finds_nothing(everywhere):
    for _ in range(3):
        session = await everywhere.open_session()
        look = "import os\nprint(os.listdir(), os.listdir('..') == [os.path.basename(os.getcwd())])\n"
        write = "os.makedirs('d/e'); open('f', 'w').write('x'); os.chmod('d', 0) if os.access('d', os.W_OK) else None"
        done = await everywhere.execute(look, session=session)
        assert done.stdout == "[] True\n"
        await everywhere.execute(write, session=session)
        await everywhere.close_session(session)


async def test_a_session_cannot_end_its_session_init(everywhere):
    session = await everywhere.open_session()
    program = (
        "import os, signal\nfor number in (signal.SIGKILL, signal.SIGSTOP):\n    try:\n"
        "        os.kill(os.getppid(), number)\n    except (PermissionError, ProcessLookupError):\n        pass\n"
    )
    assert (await everywhere.execute(program, session=session)).outcome is Outcome.OK
    assert (await everywhere.execute("print('lives')", session=session)).stdout == "lives\n"
    await everywhere.close_session(session)
