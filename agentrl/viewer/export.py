"""`agentrl view RUN --export page.html`: a run with chosen steps as one file that needs no server and no network.

The page is the viewer's, with its modules and styles inside. The server's answers are stored in the page compressed and
base64-encoded, so no content of a run is read as markup. The page's security policy allows its single script and no
network requests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from agentrl.errors import SettingsError
from agentrl.telemetry.files import atomic_write, wrong_shape
from agentrl.telemetry.metrics import defined_metrics
from agentrl.telemetry.plots import palette_css
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import read_step
from agentrl.viewer.metrics_file import metrics_of
from agentrl.viewer.run_files import to_json, token_text
from agentrl.viewer.runs import run_facts
from agentrl.viewer.trajectories import page_of, step_rows

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


STATIC = Path(__file__).parent / "static"
RUN_ID = "run"
_MOST = 100_000_000  # bytes; browsers open larger files slowly, and mails do not carry them
_POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def export_page(run: RunDirectory, out: Path, *, steps: Sequence[int] = (), groups: int | None = None) -> None:
    """Write the page: the run's curves, and the trajectories of ``steps`` (default: the newest that is stored).

    ``groups``: at most so many of each step. Raises SettingsError for steps that are not stored, and where the page
    would be too large to open; WorldError where it cannot be written.
    """
    chosen = list(steps) or run.trajectory_steps()[-1:]
    for step in chosen:
        run.check_stored(step)
    atomic_write(out, lambda file: _write(file, _page(run, chosen, groups)))


def _write(file: IO[bytes], parts: Iterator[str]) -> None:
    written = 0
    for part in parts:
        written += file.write(part.encode())
        if written > _MOST:
            raise SettingsError(
                f"--export: the page is over {_MOST // 1_000_000} MB: choose fewer steps (--steps) or groups (--groups)"
            )


def _page(run: RunDirectory, steps: Sequence[int], groups: int | None) -> Iterator[str]:
    script = bundle(STATIC, "main.js").replace("</script", "<\\/script")
    policy = _POLICY.format(hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    page = page.replace("<head>", f'<head>\n<meta http-equiv="content-security-policy" content="{policy}">')
    page = page.replace('<link rel="stylesheet" href="/static/style.css">', f"<style>{style}</style>")
    page = page.replace('<link rel="stylesheet" href="/palette.css">', f"<style>{palette_css()}</style>")
    page = page.replace('<script type="module" src="/static/main.js"></script>\n', "")
    before, _, after = page.partition("</body>")
    yield before
    for address, answer in _answers(run, steps, groups):
        packed = base64.b64encode(gzip.compress(to_json(answer).encode(), compresslevel=6, mtime=0)).decode()
        yield f'<script type="text/plain" data-answer="{address}">{packed}</script>\n'
    yield f"<script>{script}</script>\n"
    yield f"</body>{after}"


def _answers(run: RunDirectory, steps: Sequence[int], groups: int | None) -> Iterator[tuple[str, object]]:
    """What the page asks for, by the addresses of the server; the rows of all steps stand under ``/trajectories``."""
    facts = {**run_facts(run), "id": RUN_ID, "name": run.path.resolve().name}
    facts |= {"trajectory_steps": list(steps), "stored_steps": len(steps)}
    yield "/places", {"runs": [facts], "evaluations": []}
    yield "/metrics", defined_metrics()
    yield f"/runs/{RUN_ID}", facts
    yield f"/runs/{RUN_ID}/series", metrics_of(run.metrics_file, run.path).series()
    text = token_text(run)
    found = []
    for step in steps:
        rows, stored = step_rows(run, step), read_step(run, step)
        kept = list(dict.fromkeys(row["group"] for row in rows))[:groups]
        chosen = [row for row in rows if row["group"] in kept]
        found += chosen
        for row in chosen:
            with wrong_shape(f"{run.trajectory_file(step)}, line {row['number'] + 1}"):
                page = page_of(run, stored, rows, row["number"], text)
            yield f"/runs/{RUN_ID}/steps/{step}/{row['number']}", page
    yield f"/runs/{RUN_ID}/trajectories", {"rows": found, "next": None, "problems": []}
