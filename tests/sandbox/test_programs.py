"""Programs run as in Python, and their outcomes are reported correctly."""

from __future__ import annotations

import asyncio

import pytest

from agentrl_sandbox.client import Outcome

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_program_prints(run):
    done = await run("print(1 + 1)")
    assert (done.outcome, done.stdout, done.stderr, done.exit_code, done.truncated) == (Outcome.OK, "2\n", "", 0, False)


async def test_an_empty_program_is_ok(run):
    assert (await run("")).outcome is Outcome.OK


async def test_an_uncaught_exception_reads_as_pythons_own(run):
    done = await run("def half(x):\n    raise ValueError('odd')\n\nhalf(3)\n")
    assert (done.outcome, done.exit_code) == (Outcome.ERROR, 1)
    assert done.stderr == (
        "Traceback (most recent call last):\n"
        '  File "<program>", line 4, in <module>\n'
        "    half(3)\n"
        '  File "<program>", line 2, in half\n'
        "    raise ValueError('odd')\n"
        "ValueError: odd\n"
    )


async def test_a_chained_exception_shows_only_the_programs_frames(run):
    done = await run("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e")
    assert "agentrl" not in done.stderr
    assert done.stderr.count('File "<program>"') == 2
    assert done.stderr.endswith("KeyError: 'k'\n")


async def test_a_syntax_error_is_an_error(run):
    done = await run("x = (")
    assert done.outcome is Outcome.ERROR
    assert done.stderr.endswith("SyntaxError: '(' was never closed\n")


@pytest.mark.parametrize(
    ("program", "outcome", "exit_code", "stderr"),
    [
        ("import sys; sys.exit()", Outcome.OK, 0, ""),
        ("import sys; sys.exit(3)", Outcome.ERROR, 3, ""),
        ("import sys; sys.exit('bye')", Outcome.ERROR, 1, "bye\n"),
        ("class Leave(SystemExit): pass\nraise Leave(5)", Outcome.ERROR, 5, ""),
        ("exit(4)", Outcome.ERROR, 4, ""),
        ("quit()", Outcome.OK, 0, ""),
        ("import os; os._exit(0)", Outcome.OK, 0, ""),
        ("import os; os._exit(7)", Outcome.ERROR, 7, ""),
        ("import os; os._exit = lambda code: None\nraise SystemExit(6)", Outcome.ERROR, 6, ""),
    ],
)
async def test_exits(run, program, outcome, exit_code, stderr):
    done = await run(program)
    assert (done.outcome, done.exit_code, done.stderr) == (outcome, exit_code, stderr)


async def test_a_segfault_is_killed(run):
    done = await run("import ctypes; ctypes.string_at(0)")
    assert (done.outcome, done.exit_code) == (Outcome.KILLED, -11)


async def test_an_abort_is_killed(run):
    assert (await run("import os; os.abort()")).outcome is Outcome.KILLED


async def test_stdin_is_as_given(run):
    program = "import sys\nprint(input('? ') + '|' + sys.stdin.read())"
    assert (await run(program, stdin="one\ntwo\nthree")).stdout == "? one|two\nthree\n"


async def test_stdin_is_empty_by_default(run):
    done = await run("input()")
    assert done.stderr.endswith("EOFError: EOF when reading a line\n")


async def test_a_large_stdin_does_not_block(run):
    done = await run("import sys; print(len(sys.stdin.read()))", stdin="x" * 3_000_000)
    assert done.stdout == "3000000\n"


async def test_a_very_long_program_runs(run):
    assert (await run("x = 0\n" + "x += 1\n" * 50_000 + "print(x)")).stdout == "50000\n"


async def test_it_is_main_in_a_fresh_namespace(run):
    done = await run("import __main__\nprint(__name__, sorted(n for n in vars(__main__) if not n.startswith('__')))")
    assert done.stdout == "__main__ []\n"


async def test_classes_pickle_and_show_their_source(run):
    program = (
        "import inspect, pickle\nclass A:\n    x = 1\n"
        "print(pickle.loads(pickle.dumps(A())).x, inspect.getsource(A).count('\\n'))"
    )
    assert (await run(program)).stdout == "1 2\n"


async def test_threads_and_atexit_end_as_in_python(run):
    program = (
        "import atexit, threading, time\natexit.register(print, 'atexit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('main')"
    )
    assert (await run(program)).stdout == "main\nthread\natexit\n"


async def test_a_sibling_module_can_be_imported_from_scratch(run):
    assert (await run("open('mine.py', 'w').write('x = 5')\nimport mine\nprint(mine.x)")).stdout == "5\n"


async def test_invalid_utf8_is_replaced(run):
    done = await run("import os; os.write(1, b'a\\xff\\xfeb')")
    assert (done.outcome, done.stdout) == (Outcome.OK, "a\ufffd\ufffdb")


async def test_lone_surrogates_and_nul_bytes_in_the_text_are_errors_of_the_program(run):
    for text in ("print('\ud800')", "print('a\0b')"):
        assert (await run(text)).outcome is Outcome.ERROR


async def test_a_closed_stdout_is_no_failure_of_the_sandbox(run):
    assert (await run("import sys; print('gone', flush=True); sys.stdout.close()")).stdout == "gone\n"
    assert (await run("import os; os.close(1); os.close(2)")).outcome in (Outcome.OK, Outcome.ERROR)
    assert (await run("import sys; sys.stdout = None")).outcome is Outcome.OK


async def test_a_broken_stdout_object_is_the_programs_error(run):
    assert (await run("import sys\nclass S:\n    pass\nsys.stdout = S()")).outcome is Outcome.ERROR


async def test_sympy_works_and_numpy_too(run):
    done = await run("import sympy as sp\nx = sp.symbols('x')\nprint(sp.solve(x**2 - 5*x + 6, x))")
    assert done.stdout == "[2, 3]\n"
    assert (await run("import numpy as np; print(np.linalg.det(np.eye(3)))")).stdout == "1.0\n"


async def test_sympy_is_warm_and_a_plain_program_does_not_carry_it(run):
    loaded = "import sys\nprint('sympy' in sys.modules)"
    assert (await run(loaded)).stdout == "False\n"
    assert (await run(loaded + "\nimport numpy")).stdout == "True\n"


async def test_sets_of_strings_print_alike_in_every_run(run):
    results = {(await run("print({c for c in 'abcdefgh'})")).stdout for _ in range(3)}
    assert len(results) == 1


async def test_the_hash_seed_is_fixed_across_servers(run):
    assert (await run("print(hash('a'), __import__('sys').flags.hash_randomization)")).stdout.endswith(" 0\n")


async def test_two_hundred_programs_at_once_answer_each_their_own(run):
    done = await asyncio.gather(*(run(f"print({i} * {i})") for i in range(200)))
    assert [d.stdout for d in done] == [f"{i * i}\n" for i in range(200)]


async def test_long_output_keeps_head_and_tail(run, settings):
    done = await run("print('HEAD' + 'x' * 100_000 + 'TAIL')")
    assert (done.outcome, done.truncated) == (Outcome.OK, True)
    assert done.stdout.startswith("HEADx")
    assert done.stdout.endswith("xTAIL\n")
    kept, note = settings.output_limit, f"\n... [{100_009 - settings.output_limit} bytes left out] ...\n"
    assert len(done.stdout) == kept + len(note)
    assert note in done.stdout


async def test_both_streams_are_drained_while_the_program_runs(run):
    program = "import os\nfor _ in range(50):\n    os.write(1, b'o' * 10_000); os.write(2, b'e' * 10_000)\nprint('end')"
    done = await run(program)
    assert (done.outcome, done.truncated) == (Outcome.OK, True)
    assert done.stdout.endswith("end\n")


async def test_a_bad_timeout_is_named(run):
    with pytest.raises(ValueError, match="timeout must be above 0"):
        await run("1", timeout=0)
