"""A feature whose optional package is missing ends with one message that names the extra."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.api.inputs import write_problem_file
from agentrl.api.run import Run
from agentrl.errors import SettingsError
from agentrl.lab.study.command import study_command
from agentrl.problems.rows import read_hub


def rows_of_a_data_set(folder: Path) -> object:
    return next(read_hub("owner/name", split="train", subset=None, revision=None))


def metrics_of_a_run(folder: Path) -> object:
    (folder / "config.yaml").write_text("{}")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    return Run(folder).metrics


def upload_of_a_run(folder: Path) -> object:
    return Run(folder).push_to_hub("owner/name")


def a_study(folder: Path) -> object:
    return study_command(
        folder / "study.yaml",
        None,
        jobs=None,
        baseline=None,
        retry=False,
        report_only=False,
        check=lambda *given: None,
        echo=print,
    )


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("datasets", "hub", rows_of_a_data_set),
        ("huggingface_hub", "hub", upload_of_a_run),
        ("pandas", "frames", metrics_of_a_run),
        ("scipy", "lab", a_study),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, extra: str, use: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match=rf"needs the package {package}: pip install 'agentrl-trainer\[{extra}\]'"):
        use(tmp_path)


def test_problems_need_no_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    file = write_problem_file([{"problem": "1 + 1?", "answer": "2"}], tmp_path)
    assert json.loads(Path(file).read_text()) == {"problem": "1 + 1?", "answer": "2"}
