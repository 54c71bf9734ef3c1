"""Ordinary programs that every sandbox must support."""

from __future__ import annotations

from agentrl_sandbox.check.case import Case, ends, fails_with, prints
from agentrl_sandbox.types import Execution, Outcome

_LONG = 400_000
_LIBRARIES = "numpy, scipy, sympy, mpmath, networkx, pandas"


def _keeps_head_and_tail(run: Execution) -> bool:
    return (
        run.outcome is Outcome.OK
        and run.stdout.startswith("head")
        and run.stdout.rstrip().endswith("tail")
        and len(run.stdout) < _LONG
    )


CONFORMANCE = (
    Case("prints", "print(1 + 1)", prints("2\n")),
    Case("prints Unicode", "print('∑ π ≈ 3.14159 🙂')", prints("∑ π ≈ 3.14159 🙂\n")),
    Case("runs as __main__", "print(__name__)", prints("__main__\n")),
    Case("reads stdin to its end", "import sys\nprint(len(sys.stdin.read()))", prints("3\n"), stdin="abc"),
    Case("stdin ends where none is given", "import sys\nprint(repr(sys.stdin.read()))", prints("''\n")),
    Case("reports an exception", "print('before')\n1 / 0", fails_with("ZeroDivisionError")),
    Case("reports a syntax error", "print('before'", fails_with("SyntaxError")),
    Case(
        "reports an exit status",
        "import sys\nsys.exit(3)",
        lambda run: run.outcome is Outcome.ERROR and run.exit_code == 3,
    ),
    Case("takes exit status 0 for success", "import sys\nprint(1)\nsys.exit()", prints("1\n")),
    Case(
        "keeps standard error apart",
        "import sys\nprint('out')\nprint('err', file=sys.stderr)",
        lambda run: (run.outcome, run.stdout, run.stderr) == (Outcome.OK, "out\n", "err\n"),
    ),
    Case("ends an endless loop", "while True:\n    pass", ends(Outcome.TIMEOUT), timeout=1.0),
    Case("ends a long sleep", "import time\ntime.sleep(60)", ends(Outcome.TIMEOUT), timeout=1.0),
    Case(
        "keeps what was printed before a timeout",
        "print('early', flush=True)\nwhile True:\n    pass",
        lambda run: run.outcome is Outcome.TIMEOUT and run.stdout == "early\n",
        timeout=1.0,
    ),
    Case("trims long output", f"print('head' + 'x' * {_LONG} + 'tail')", _keeps_head_and_tail),
    Case("replaces bytes that are not UTF-8", "import os\nos.write(1, b'a\\xffb\\n')", prints("a\ufffdb\n")),
    Case("says that memory ran out", "x = bytearray(1 << 40)", ends(Outcome.MEMORY_LIMIT)),
    Case("has the scientific libraries", f"import {_LIBRARIES}\nprint('all')", prints("all\n"), timeout=60.0),
    Case(
        "solves with SymPy",
        "from sympy import *\nx = symbols('x')\nprint(solve(x**2 - 2, x))",
        prints("[-sqrt(2), sqrt(2)]\n"),
    ),
    Case("computes with NumPy", "import numpy as np\nprint(np.linalg.det(np.eye(50)))", prints("1.0\n")),
    Case(
        "runs processes of a program's own",
        "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p:\n    print(p.map(abs, [-1, -2]))",
        prints("[1, 2]\n"),
    ),
    Case(
        "runs threads",
        "import threading\nt = threading.Thread(target=print, args=('in',))\nt.start()\nt.join()",
        prints("in\n"),
    ),
    Case("writes and reads files", "open('f', 'w').write('kept')\nprint(open('f').read())", prints("kept\n")),
    Case(
        "forgets files",
        "open('left-behind', 'w').close()",
        ends(Outcome.OK),
        after="import os\nprint('dirty' if os.path.exists('left-behind') else 'clean')",
    ),
    Case(
        "forgets variables and imports",
        "import sys\nsys.modules['left'] = sys\nleft = 1",
        ends(Outcome.OK),
        after="import sys\nprint('dirty' if 'left' in globals() or 'left' in sys.modules else 'clean')",
    ),
)
"""In the order of the output; ``suite`` adds cases of more than one program."""
