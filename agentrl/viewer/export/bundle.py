"""The viewer's modules as one classic script, for a page that is opened from a file: browsers load no modules there."""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|const|class) (\w+))", re.MULTILINE)


def bundle(folder: Path, entry: str) -> str:
    """``entry`` and what it imports, each in a function of its own, those that others need first.

    Modules import names of ``./FILE`` in one line each, and export functions, constants and classes by name.
    """
    parts: list[str] = []
    done: set[str] = set()

    def add(name: str) -> None:
        if name in done:
            return
        done.add(name)
        source = (folder / name).read_text(encoding="utf-8")
        for _, other in _IMPORT.findall(source):
            add(other)
        parts.append(_wrapped(name, source))

    add(entry)
    return '"use strict";\nconst modules = {};\n' + "\n".join(parts)


def _wrapped(name: str, source: str) -> str:
    names = ", ".join(_EXPORT.findall(source))
    body = _EXPORT.sub("", _IMPORT.sub(r'const { \1 } = modules["\2"];', source))
    if re.search(r"^(import|export)\b", body, re.MULTILINE):
        raise ValueError(f"{name} imports or exports in a way that cannot be bundled")
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {names} }};\n}})();'
