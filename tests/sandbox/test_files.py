"""Files that are written to a program's scratch directory and fetched from it."""

from __future__ import annotations

import pytest

from agentrl_sandbox.client import Outcome, SandboxSettings, open_sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_files_are_there_before_the_program_runs(run):
    files = {"a.txt": b"one", "deep/er/b.bin": b"\0\xff", "empty": b"", "a name\nwith é": b"x"}
    done = await run(
        "import os\nprint(open('a.txt').read(), open('deep/er/b.bin', 'rb').read(), os.path.getsize('empty'),"
        " open('a name\\nwith é').read(), oct(os.stat('a.txt').st_mode), os.access('deep', os.W_OK))",
        files=files,
    )
    assert done.stdout == "one b'\\x00\\xff' 0 x 0o100644 True\n"


async def test_a_module_among_the_files_can_be_imported(run):
    done = await run("import mine.part\nprint(mine.part.x)", files={"mine/part.py": b"x = 5"})
    assert done.stdout == "5\n"


async def test_stdin_is_untouched_by_files(run):
    done = await run("print(input())", stdin="typed\n", files={"f": b"file"}, fetch_files=["f"])
    assert (done.stdout, dict(done.files)) == ("typed\n", {"f": b"file"})


async def test_files_come_back(run):
    program = "import os\nos.makedirs('out')\nopen('out/a', 'wb').write(b'\\0\\1')\nopen('b', 'w').close()"
    done = await run(program, fetch_files=["out/a", "b", "missing", "out", "b/below"])
    assert done.outcome is Outcome.OK
    assert dict(done.files) == {"out/a": b"\0\1", "b": b""}


async def test_files_come_back_after_an_error_and_an_exit(run):
    for end in ("1 / 0", "import sys; sys.exit(3)"):
        done = await run(f"open('a', 'w').write('kept')\n{end}", fetch_files=["a"])
        assert (done.outcome, dict(done.files)) == (Outcome.ERROR, {"a": b"kept"})


async def test_files_come_from_scratch_wherever_the_program_went(run):
    done = await run("import os\nopen('a', 'w').write('x')\nos.chdir('/usr')", fetch_files=["a"])
    assert dict(done.files) == {"a": b"x"}


async def test_no_files_come_back_after_a_kill(run):
    write = "import os\nopen('a', 'w').write('x')\n"
    for end in ("while True: pass", "os.abort()"):
        done = await run(write + end, timeout=0.5, fetch_files=["a"])
        assert done.outcome in (Outcome.TIMEOUT, Outcome.KILLED)
        assert dict(done.files) == {}


BAD = ["", "/etc/passwd", "../x", "a/../../x", "a/./b", ".", "..", "a//b", "a/", "a\0b", "\ud800", "x" * 256, "a/" * 40]
BAD.append("/".join(["x" * 255] * 17))


@pytest.mark.parametrize("name", BAD)
async def test_bad_names_are_the_callers_error(run, name):
    with pytest.raises(ValueError, match="invalid file name"):
        await run("print('ran')", files={name: b""})
    with pytest.raises(ValueError, match="invalid file name"):
        await run("print('ran')", fetch_files=[name])


async def test_files_that_cannot_all_be_there_are_the_callers_error(run, settings):
    with pytest.raises(ValueError, match="'a' is a file"):
        await run("1", files={"a": b"", "a/b": b""})
    with pytest.raises(ValueError, match="scratch_mb"):
        await run("1", files={"a": b"x" * (settings.scratch_mb << 20), "b": b"x"})
    with pytest.raises(ValueError, match="at most"):
        await run("1", files={str(i): b"" for i in range(2000)})


async def test_a_scratch_full_of_files_still_runs(run, settings):
    whole = {str(i): bytes(1 << 20) for i in range(settings.scratch_mb)}
    done = await run("import os\nprint(len(os.listdir()))", files=whole)
    assert done.stdout == f"{settings.scratch_mb}\n"


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "session"])
async def test_files_that_exhaust_inodes_are_the_programs_error(sandbox, in_session):
    """A policy often chooses the names. An infrastructure failure would exclude its rollout from the data."""
    deep = {f"{index}/" + "d/" * 30 + "f": b"" for index in range(1024)}  # 32,768 inodes, of which there are 16,384
    session = await sandbox.open_session() if in_session else None
    done = await sandbox.execute("print('ran')", files=deep, fetch_files=list(deep), session=session)
    assert (done.outcome, done.stdout, done.session_ended) == (Outcome.ERROR, "", False)
    assert done.stderr.startswith("cannot write the files: [Errno 28] No space left on device")
    if session is not None:
        await sandbox.close_session(session)


@pytest.mark.parametrize("in_session", [False, True], ids=["alone", "session"])
async def test_a_program_larger_than_its_memory_is_a_memory_limit(in_session):
    sandbox = await open_sandbox(SandboxSettings(memory_mb=16, workers=4))
    session = await sandbox.open_session() if in_session else None
    done = await sandbox.execute("#" + "x" * (40 << 20), session=session)
    assert (done.outcome, done.stdout) == (Outcome.MEMORY_LIMIT, "")
    await sandbox.close()


@pytest.mark.parametrize(
    "plant",
    [
        "os.symlink('/proc/self/environ', 'a')",
        "open('b', 'w').write('x'); os.symlink('b', 'a')",
        "os.mkfifo('a')",
        "os.mkdir('a')",
        "open('a', 'w').write('x'); os.chmod('a', 0)",
        "f = open('a', 'wb'); f.truncate(7 << 20); f.close(); os.rename('a', 'c'); os.symlink('/scratch/c', 'a')",
    ],
)
async def test_only_regular_files_are_returned(run, plant):
    done = await run(f"import os\n{plant}", fetch_files=["a"])
    assert (done.outcome, dict(done.files)) == (Outcome.OK, {})


async def test_a_directory_that_is_a_link_is_not_followed(run):
    program = "import os\nos.mkdir('real')\nopen('real/f', 'w').write('x')\nos.symlink('real', 'd')"
    done = await run(program, fetch_files=["d/f", "real/f"])
    assert dict(done.files) == {"real/f": b"x"}


async def test_returned_files_are_bounded():
    sandbox = await open_sandbox(SandboxSettings(fetch_limit=1000, workers=4))
    sizes = {"a": 600, "b": 600, "huge": 1 << 20, "c": 400, "d": 1}
    program = f"for name, size in {sizes}.items():\n    open(name, 'w').write(name[0] * size)"
    done = await sandbox.execute(program, fetch_files=list(sizes))
    assert dict(done.files) == {"a": b"a" * 600, "c": b"c" * 400}
    await sandbox.close()


FORGE = """
import os, struct
for fd in range(3, 256):
    for data in {data!r}:
        try:
            os.pwrite(fd, data, 0)
        except OSError:
            pass
os._exit(0)
"""


@pytest.mark.parametrize(
    "data",
    [
        [b"\xff" * 4096],
        [b"\x00" * 7 + b"\xff" + b"\x00\x00\x00\x09" + b"\x00" * 8],
        [(12 + (1 << 40)).to_bytes(8, "big") + b"\x00\x00\x00\x00" + (1 << 40).to_bytes(8, "big")],
        [(16).to_bytes(8, "big") + b"\x00\x00\x00\x00" + (4).to_bytes(8, "big") + b"fake"],
    ],
)
async def test_forged_files_are_bounded_and_named_as_asked(run, data):
    done = await run(FORGE.format(data=data), fetch_files=["a"])
    assert done.outcome is Outcome.OK
    assert set(done.files) <= {"a"}
    assert sum(map(len, done.files.values())) <= 4096


async def test_a_program_that_breaks_the_interpreter_keeps_its_outcome(run):
    program = "import os\nopen('a', 'w').write('x')\nos.open = os.fstat = None\nraise SystemExit(4)"
    done = await run(program, fetch_files=["a"])
    assert (done.outcome, done.exit_code, dict(done.files)) == (Outcome.ERROR, 4, {})


async def test_a_child_of_the_program_does_not_fetch(run):
    program = "import os, time\nif os.fork() == 0:\n    pass\nelse:\n    os.wait(); open('a', 'w').write('late')"
    done = await run(program, fetch_files=["a"])
    assert dict(done.files) == {"a": b"late"}
