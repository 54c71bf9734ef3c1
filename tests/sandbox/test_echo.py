"""Echo of the value of a last expression, as in a notebook."""

from __future__ import annotations

import pytest

from agentrl_sandbox.client import Outcome

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("1 + 1", "2\n"),
        ("'a' + 'b'", "'ab'\n"),
        ("x = 3\nx ** 2", "9\n"),
        ("x = 3; x", "3\n"),
        ("None", ""),
        ("print('only once')", "only once\n"),
        ("x = 3", ""),
        ("1\n2", "2\n"),
        ("[\n  1,\n  2,\n]", "[1, 2]\n"),
        ("(\n  1 +\n  2\n)  # a comment\n\n", "3\n"),
        ("if True:\n    5", ""),
        ("'''a docstring'''", "'a docstring'\n"),
        ("def f():\n    return 7\nf()", "7\n"),
        ("print('x');\n'# not = an assignment'", "x\n'# not = an assignment'\n"),
        ("'é' 'ü'", "'éü'\n"),
        ("import sys\nsys.displayhook = lambda value: print('shown', value)\n6", "shown 6\n"),
        ("from __future__ import annotations\nx: undefined = 1\n(lambda y: y)(x)", "1\n"),
        ("", ""),
        ("# nothing", ""),
    ],
)
async def test_a_last_expression_is_shown(run, program, shown):
    done = await run(program, echo=True)
    assert (done.outcome, done.stdout, done.stderr) == (Outcome.OK, shown, "")


@pytest.mark.parametrize("program", ["5;", "5 ; # why", "(5);\n\n", "'é';", "x = 1; x;", "5\\\n;"])
async def test_a_semicolon_after_it_says_not_to(run, program):
    assert (await run(program, echo=True)).stdout == ""


@pytest.mark.parametrize("program", ["';'", "5 # ;", "'''a\n;'''"])
async def test_a_semicolon_elsewhere_does_not(run, program):
    assert (await run(program, echo=True)).stdout != ""


async def test_without_echo_nothing_is_shown(run):
    assert (await run("1 + 1")).stdout == ""


async def test_tracebacks_keep_their_lines(run):
    done = await run("def half(x):\n    raise ValueError('odd')\n\nhalf(3)\n", echo=True)
    assert done.outcome is Outcome.ERROR
    assert done.stderr == (
        "Traceback (most recent call last):\n"
        '  File "<program>", line 4, in <module>\n'
        "    half(3)\n"
        '  File "<program>", line 2, in half\n'
        "    raise ValueError('odd')\n"
        "ValueError: odd\n"
    )


async def test_a_failing_representation_is_the_programs_error(run):
    done = await run("class A:\n    def __repr__(self):\n        raise KeyError('r')\nA()", echo=True)
    assert (done.outcome, done.exit_code) == (Outcome.ERROR, 1)
    assert done.stderr.endswith("KeyError: 'r'\n")
    assert "agentrl" not in done.stderr


@pytest.mark.parametrize("program", ["x = (", "print('ran')\nreturn 5", "print('ran')\n1 +", "def f(:\n  1"])
async def test_syntax_errors_read_alike_and_nothing_runs(run, program):
    shown, plain = await run(program, echo=True), await run(program)
    assert (shown.outcome, shown.stdout) == (Outcome.ERROR, "")
    assert shown.stderr == plain.stderr
    assert "agentrl" not in shown.stderr


async def test_text_that_is_no_text_is_the_programs_error(run):
    for text in ("'\ud800'", "'a\0b'", "(" * 100_000):
        assert (await run(text, echo=True)).outcome in (Outcome.ERROR, Outcome.KILLED, Outcome.MEMORY_LIMIT)
