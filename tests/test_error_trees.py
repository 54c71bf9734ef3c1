"""The trees of exceptions that docstrings draw are the trees of the code."""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType

import pytest

import agentrl
import agentrl_envs
import agentrl_sandbox

PACKAGES = (agentrl, agentrl_envs, agentrl_sandbox)


def modules() -> list[ModuleType]:
    names = [
        item.name
        for package in PACKAGES
        for item in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not item.name.endswith("__main__")
    ]
    return [importlib.import_module(name) for name in names]


def drawn(text: str) -> dict[str, str | None]:
    """Each name of a drawn tree with the name that it hangs from; the root has None."""
    lines = text.splitlines()
    first = next(index for index, line in enumerate(lines) if "──" in line)
    base = re.search(r"[├└]", lines[first])
    assert base is not None
    root = lines[first - 1].strip().partition("(")[0].split()[0].rstrip(":")
    above: list[tuple[int, str]] = [(-1, root)]
    found: dict[str, str | None] = {root: None}
    for line in lines[first:]:
        match = re.match(r"([│ ]*)[├└]── (?:\w+\.)*(\w+)", line)
        if match is None:
            break
        depth, name = len(match[1]), match[2]
        while above[-1][0] >= depth:
            above.pop()
        found[name] = above[-1][1]
        above.append((depth, name))
    return found


def defined(root: type, package: str) -> dict[str, str | None]:
    """The public subclasses of ``root`` within its distribution, each with the one that it derives from."""
    found: dict[str, str | None] = {root.__name__: None}
    waiting = [root]
    while waiting:
        parent = waiting.pop()
        for child in parent.__subclasses__():
            if child.__module__.split(".")[0] == package and not child.__name__.startswith("_"):
                found[child.__name__] = parent.__name__
                waiting.append(child)
    return found


def trees() -> list[ModuleType]:
    return [item for item in modules() if re.search(r"[├└]── [\w.]*(Error|Failure)\b", item.__doc__ or "")]


@pytest.mark.parametrize("module", trees(), ids=lambda module: module.__name__)
def test_the_drawn_tree_is_the_code_s(module: ModuleType) -> None:
    tree = drawn(module.__doc__ or "")
    root = next(name for name, parent in tree.items() if parent is None)
    assert tree == defined(getattr(module, root), module.__name__.split(".")[0])


def test_a_tree_with_two_levels_is_read() -> None:
    assert drawn("Title.\n\nA (a ValueError)\n├── B  says b\n│   └── x.C  says c\n└── D  says d\n\nMore.") == {
        "A": None,
        "B": "A",
        "C": "B",
        "D": "A",
    }
