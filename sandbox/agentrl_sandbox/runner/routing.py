"""Chooses the interpreter from which a program is forked. A wrong choice costs time but does not change the result.

The text is scanned with regular expressions, not parsed: parsing untrusted code could exhaust the server, and both
interpreters can import everything.
"""

from __future__ import annotations

import re

_BARE_MODULES = """
math cmath random itertools functools collections fractions decimal operator string re time heapq bisect copy numbers
statistics datetime json typing enum abc io contextlib dataclasses types
"""
BARE_MODULES = tuple(_BARE_MODULES.split())
"""Modules that the bare interpreter has already imported."""

_FREE_MODULES = frozenset(BARE_MODULES) | {"sys", "os", "__future__", "signal", "gc", "errno", "resource", "ctypes"}
_SUSPECT = re.compile(r"\b(import|__import__|importlib|exec|eval|runpy|subprocess|multiprocessing|pickle)\b")
_FROM_IMPORT = re.compile(r"\bfrom[ \t]+([A-Za-z_]\w*)(?:\.\w+)*[ \t]+import\b")
_IMPORT = re.compile(r"\bimport[ \t]+([^\n;#]*)")


def needs_science(program: str) -> bool:
    """Whether the text imports any module that is not cheap in the bare interpreter.

    >>> needs_science("import math, itertools as it\\nprint(math.pi)")
    False
    >>> needs_science("from collections.abc import Iterable")
    False
    >>> needs_science("import math\\nimport numpy as np")
    True
    >>> needs_science("m = __import__('sym' + 'py')")
    True
    """
    if _SUSPECT.search(program) is None:
        return False
    rest = _FROM_IMPORT.sub(lambda match: "" if match[1] in _FREE_MODULES else match[0], program)
    for match in _IMPORT.finditer(rest):
        if not all(_is_free(clause) for clause in match[1].split(",")):
            return True
    return _SUSPECT.search(_IMPORT.sub("", rest)) is not None


def _is_free(clause: str) -> bool:
    words = clause.split()
    return bool(words) and words[0].split(".")[0] in _FREE_MODULES
