"""Self-contained pages of one run, or one evaluation (``report.html``), that need no server and no network.

The page contains the modules and styles of the viewer. Answers of the server are stored in the page compressed and
base64-encoded, so no content of a run is parsed as markup. The page's security policy allows its single script and no
network requests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import IO

from agentrl.errors import SettingsError
from agentrl.telemetry.files import atomic_write, malformed_as_world_error
from agentrl.telemetry.metrics import describe_built_in_metrics
from agentrl.telemetry.plots import palette_css
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import read_step
from agentrl.viewer.evaluations import (
    build_rollout_page,
    read_evaluation_page,
    read_evaluation_summary,
    read_problems_by_key,
    read_rollout_records,
    read_rollout_rows,
)
from agentrl.viewer.metrics_file import cached_metrics_columns
from agentrl.viewer.run_files import read_run_tokenizer, to_json
from agentrl.viewer.runs import read_run_page
from agentrl.viewer.trajectories import build_trajectory_page, read_step_rows

STATIC = Path(__file__).parent / "static"
RUN_ID, EVALUATION_ID = "run", "evaluation"
_LARGEST_RUN = 100_000_000  # bytes; larger files open slowly and cannot be sent by email
_LARGEST_REPORT = 9_500_000  # bytes of conversations in a page; larger pages open slowly
_POLICY = (
    "default-src 'none'; script-src 'sha256-{hash}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

_IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|const|class) (\w+))", re.MULTILINE)


def export_run_page(run: RunDirectory, out: Path, *, steps: Sequence[int] = (), groups: int | None = None) -> None:
    """Write the page of a run with its curves and the trajectories of ``steps`` (default: the newest stored step).

    ``groups`` limits the number of groups per step. Raises SettingsError if a step is not stored or the page is too
    large, and WorldError if the page cannot be written.
    """
    chosen = list(steps) or run.steps_with_trajectories()[-1:]
    for step in chosen:
        run.require_trajectories(step)
    parts = _generate_page_html(f"/run/{RUN_ID}", map(_response_to_script_tag, _server_responses(run, chosen, groups)))

    def write(file: IO[bytes]) -> None:
        written = 0
        for part in parts:
            written += file.write(part.encode())
            if written > _LARGEST_RUN:
                raise SettingsError(
                    f"--export: the page exceeds {_LARGEST_RUN // 1_000_000} MB; choose fewer steps (--steps) or "
                    "groups (--groups)"
                )

    atomic_write(out, write)


def export_evaluation_page(path: Path, out: Path) -> None:
    """Write the page of an evaluation with all conversations, or as many per problem as fit into 10 MB.

    Conversations alternate between right and wrong ones. Raises WorldError if the page cannot be written.
    """
    summary = {"id": EVALUATION_ID, "name": path.name, **read_evaluation_summary(path)}
    answers: dict[str, object] = {
        "/library": {"runs": [], "evaluations": [summary]},
        f"/evaluations/{EVALUATION_ID}": read_evaluation_page(path),
    }
    packed = [*map(_response_to_script_tag, answers.items()), *_compress_rollout_pages(path)]
    parts = _generate_page_html(f"/evaluation/{EVALUATION_ID}", packed)
    atomic_write(out, lambda file: file.writelines(part.encode() for part in parts))


def _compress_rollout_pages(path: Path) -> list[str]:
    """Compress as many rollout pages per problem as fit, in the order of :func:`rank_by_alternating_correctness`."""
    rank_of = rank_by_alternating_correctness(read_rollout_rows(path))
    if not rank_of:
        return []
    # Estimate the number per problem from the size of the compressed file, to avoid packing more than fits.
    count = max(rank_of.values()) + 1
    count = min(count, max(1, count * 4 * _LARGEST_REPORT // (path / "rollouts.jsonl.zst").stat().st_size))
    problems = read_problems_by_key(path)
    packed: dict[int, list[str]] = defaultdict(list)
    for index, record in enumerate(read_rollout_records(path)):
        rank = rank_of.get(index)
        if rank is not None and rank < count:
            answer = build_rollout_page(path, record, problems)
            packed[rank].append(_response_to_script_tag((f"/evaluations/{EVALUATION_ID}/{index}", answer)))
    sizes = accumulate(sum(map(len, packed[rank])) for rank in range(count))
    count = max(1, sum(size <= _LARGEST_REPORT for size in sizes))
    return [part for rank in range(count) for part in packed[rank]]


def rank_by_alternating_correctness(rows: Iterable[Mapping[str, object]]) -> dict[int, int]:
    """Rank the rollouts of each problem, alternating between correct and other rollouts, in order within each kind.

    >>> kinds, row = ["correct", "correct", "correct", "void", "incorrect"], {"benchmark": "b", "problem": "p"}
    >>> rank_by_alternating_correctness({**row, "index": index, "kind": kind} for index, kind in enumerate(kinds))
    {0: 0, 3: 1, 1: 2, 4: 3, 2: 4}
    """
    by_problem: dict[object, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for row in rows:
        by_problem[row["benchmark"], row["problem"]][row["kind"] != "correct"].append(int(str(row["index"])))
    ordered = (
        [one for pair in zip_longest(*parts) for one in pair if one is not None] for parts in by_problem.values()
    )
    return {index: rank for indices in ordered for rank, index in enumerate(indices)}


def _generate_page_html(start_address: str, answers: Iterable[str]) -> Iterator[str]:
    """Yield the HTML of a page that opens at ``start_address``, in parts."""
    script = bundle_scripts(STATIC, "main.js").replace("</script", "<\\/script")
    policy = _POLICY.format(hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode())
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    page = page.replace("<head>", f'<head>\n<meta http-equiv="content-security-policy" content="{policy}">')
    page = page.replace("<body>", f'<body data-start="{start_address}">')
    page = page.replace('<link rel="stylesheet" href="/static/style.css">', f"<style>{style}</style>")
    page = page.replace('<link rel="stylesheet" href="/palette.css">', f"<style>{palette_css()}</style>")
    page = page.replace('<script type="module" src="/static/main.js"></script>\n', "")
    before, _, after = page.partition("</body>")
    yield before
    yield from answers
    yield f"<script>{script}</script>\n"
    yield f"</body>{after}"


def _response_to_script_tag(item: tuple[str, object]) -> str:
    address, answer = item
    # mtime=0: without a time stamp, equal responses have equal bytes.
    packed = base64.b64encode(gzip.compress(to_json(answer).encode(), compresslevel=6, mtime=0)).decode()
    return f'<script type="text/plain" data-answer="{address}">{packed}</script>\n'


def _server_responses(run: RunDirectory, steps: Sequence[int], groups: int | None) -> Iterator[tuple[str, object]]:
    """Yield pairs of address and response. ``/trajectories`` has the rows of all steps, which the page searches."""
    facts = {**read_run_page(run), "id": RUN_ID, "name": run.path.resolve().name}
    facts |= {"trajectory_steps": list(steps), "stored_steps": len(steps)}
    yield "/library", {"runs": [facts], "evaluations": []}
    yield "/metrics", describe_built_in_metrics()
    yield f"/runs/{RUN_ID}", facts
    yield f"/runs/{RUN_ID}/series", cached_metrics_columns(run.metrics_file, run.path).series()
    text = read_run_tokenizer(run)
    included = []
    for step in steps:
        rows, stored = read_step_rows(run, step), read_step(run, step)
        kept = list(dict.fromkeys(row["group"] for row in rows))[:groups]
        chosen = [row for row in rows if row["group"] in kept]
        included += chosen
        for row in chosen:
            with malformed_as_world_error(f"{run.trajectory_file(step)}, line {row['number'] + 1}"):
                page = build_trajectory_page(run, stored, rows, row["number"], text)
            yield f"/runs/{RUN_ID}/steps/{step}/{row['number']}", page
    yield f"/runs/{RUN_ID}/trajectories", {"rows": included, "next": None, "warnings": []}


def bundle_scripts(folder: Path, entry: str) -> str:
    """Bundle ``entry`` and its imports into a classic script, because browsers load no modules from local files.

    Each module becomes a function, after the modules that it imports. An import must be one line with names of
    ``./FILE``, and an export must be a named function, constant or class. Raises ValueError for other forms.
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
        names = ", ".join(_EXPORT.findall(source))
        body = _EXPORT.sub("", _IMPORT.sub(r'const { \1 } = modules["\2"];', source))
        if re.search(r"^(import|export)\b", body, re.MULTILINE):
            raise ValueError(f"{name} has an import or export that cannot be bundled")
        parts.append(f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {names} }};\n}})();')

    add(entry)
    return '"use strict";\nconst modules = {};\n' + "\n".join(parts)
