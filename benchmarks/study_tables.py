"""Render the tables of every study and of the variance laboratory next to their records.

``python benchmarks/study_tables.py [NAME ...]`` writes ``benchmarks/studies/NAME.md`` for each ``NAME.json``, with the
differences from both baselines of docs/research/studies.md, and ``benchmarks/studies/variance.md`` with the tables of
``benchmarks/variance.py``. Nothing is trained or sampled.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

STUDIES = Path(__file__).parent / "studies"
BASELINES = ("grpo", "tir_otb")
# Studies without the variants of BASELINES
OTHER_VARIANTS = (
    "rates_2", "rates_8", "rates_forks_4", "rates_budgets_tiny", "stability_2", "distill_2", "forks_4", "forks_default",
    "budgets_tiny", "distill_sft_2", "distill_sft_4", "routes_2",
    "routes_mixtral_2",
)  # fmt: skip


def main(names: list[str]) -> None:
    """Write the tables of the named records (default: all)."""
    for name in names or [*sorted(path.stem for path in STUDIES.glob("*.json")), "variance"]:
        text = variance() if name == "variance" else study(name)
        (STUDIES / f"{name}.md").write_text(text, encoding="utf-8")
        print(f"benchmarks/studies/{name}.md")


def study(name: str) -> str:
    """Return the report of a study, with its differences from the second baseline."""
    record = STUDIES / f"{name}.json"
    with tempfile.TemporaryDirectory() as folder:
        reports = []
        for baseline in BASELINES:
            options = [] if name in OTHER_VARIANTS else ["--baseline", baseline]
            command = ["agentrl", "study", str(record), "--output", folder, *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            reports.append((Path(folder) / "report.md").read_text(encoding="utf-8"))
    first, second = reports
    head, _, rest = first.partition("\n")
    command = f"    agentrl study benchmarks/studies/{name}.json --output runs/{name}"
    text = f"{head}\n\nRendered by `python benchmarks/study_tables.py {name}` from the record:\n\n{command}\n{rest}"
    if first != second:
        text += "\n## Final score: difference from" + second.partition("## Final score: difference from")[2]
    return text.rstrip() + "\n"


def variance() -> str:
    """Return the output of benchmarks/variance.py, with the noise relative to three estimators."""
    parts = [
        "# The variance laboratory\n\nRendered by `python benchmarks/study_tables.py variance` from the records.\n"
    ]
    for baseline in ("rloo", "ogb", "tir_otb"):
        command = [sys.executable, str(STUDIES.parent / "variance.py"), "--baseline", baseline]
        shown = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        parts.append(f"## Relative to `{baseline}`\n\n{shown.strip()}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
