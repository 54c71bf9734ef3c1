"""Print a table about the modules of a source tree, for orientation. The figures are not targets.

    python benchmarks/structure.py [FOLDER ...]

FOLDER: roots of packages, ``agentrl envs/agentrl_envs sandbox/agentrl_sandbox`` if none is given. Another project, or
an earlier commit of this one in a worktree, can be measured for comparison.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

RECORDS = {"dataclass", "NamedTuple", "TypedDict", "BaseModel", "Settings"}


def names_in(node: ast.AST) -> Counter[str]:
    """Count how often each name or attribute occurs below a node."""
    names = Counter(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
    return names + Counter(each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute))


def is_record(node: ast.ClassDef) -> bool:
    """Return True if a class is a dataclass, a named tuple, a typed dictionary or a settings model."""
    return any(RECORDS & set(names_in(each)) for each in [*node.decorator_list, *node.bases])


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the dotted names of all imports in a module, including nested ones. ``from a import b`` yields two."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def main(roots: list[Path]) -> None:
    """Print the table for the packages in ``roots``."""
    files = {path: path.read_text(encoding="utf-8") for root in roots for path in sorted(root.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in files.items()}
    dotted = {path: _dotted(path, roots) for path in files}
    importers = Counter(name for tree in trees.values() for name in imported_modules(tree) & set(dotted.values()))
    lines = {path: text.count("\n") for path, text in files.items()}
    total = sum(lines.values())
    comments = sum(
        token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        for text in files.values()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    imports = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = once = 0
    for tree in trees.values():
        uses = names_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions += 1
                once += node.name.startswith("_") and not node.name.startswith("__") and uses[node.name] == 1
    alone = [path for path in files if importers[dotted[path]] == 1]
    print("| measure | value |\n|---|---|")
    print(f"| lines | {total:,} |")
    print(f"| modules / average lines | {len(files)} / {total / len(files):.0f} |")
    print(f"| modules with exactly one importer / share of lines | {len(alone)} / {share(lines, alone, total)} |")
    print(f"| record classes | {sum(map(is_record, classes))} of {len(classes)} |")
    print(f"| comments on lines of their own per 1,000 lines | {1000 * comments / total:.1f} |")
    print(f"| share of import lines | {100 * imports / total:.1f} % |")
    print(f"| private functions that are named once in their module, share of all | {100 * once / functions:.0f} % |")


def share(lines: dict[Path, int], some: list[Path], total: int) -> str:
    """Return the lines of some files as a share of all lines."""
    return f"{100 * sum(lines[path] for path in some) / total:.0f} %"


def _dotted(path: Path, roots: list[Path]) -> str:
    root = next(root for root in roots if path.is_relative_to(root))
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    main([Path(each) for each in sys.argv[1:] or ("agentrl", "envs/agentrl_envs", "sandbox/agentrl_sandbox")])
