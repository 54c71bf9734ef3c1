"""``agentrl new environment``: the package can be installed, its test passes, and it trains."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.scaffold.package import new_environment_command, pinned_requirement, write_environment

FILES = [
    ".gitignore",
    "README.md",
    "config.yaml",
    "my_boxes/__init__.py",
    "my_boxes/data.py",
    "my_boxes/environment.py",
    "pyproject.toml",
    "tests/test_environment.py",
]


def test_every_file_is_written_with_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, *_ = new_environment_command("my-boxes")
    assert first == f"wrote my-boxes/: {', '.join(FILES)}"
    assert sorted(str(path.relative_to("my-boxes")) for path in Path("my-boxes").rglob("*.*")) == FILES
    assert 'my-boxes = "my_boxes.environment:MyBoxes"' in Path("my-boxes/pyproject.toml").read_text()
    assert "class MyBoxes:" in Path("my-boxes/my_boxes/environment.py").read_text()
    assert "$ pip install --no-deps -e ." in Path("my-boxes/README.md").read_text()


def test_the_written_python_keeps_the_linters_rules(tmp_path: Path) -> None:
    folder = tmp_path / "my-boxes"
    write_environment("my-boxes", folder)
    ruff = Path(sys.executable).parent / "ruff"
    rules = ["--select", "E,F,W,I,B,UP,SIM,RUF,PT,C4,BLE,PIE,RET"]
    for command in (["check", *rules], ["format", "--check"]):
        shape = ["--isolated", "--no-cache", "--line-length", "120"]
        done = subprocess.run([ruff, *command, *shape, "."], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My Boxes", r"contain only lowercase letters.*; did you mean 'my-boxes'\?"),
        ("MyBoxes", r"did you mean 'my-boxes'\?"),
        ("../boxes", r"contain only lowercase letters"),
        ("", r"contain only lowercase letters"),
        ("class", r"'class' is reserved by Python"),
        ("json", r"'json' is reserved by Python"),
        ("torch", r"an environment or module with this name is installed"),
        ("simpletir", r"an environment or module with this name is installed"),
    ],
)
def test_a_name_that_cannot_be_used_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        write_environment(name, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my-boxes").mkdir()
    with pytest.raises(SettingsError, match=r"my-boxes already exists: choose another name"):
        write_environment("my-boxes", tmp_path / "my-boxes")
    assert list((tmp_path / "my-boxes").iterdir()) == []


COMMIT = "7921be1537eac1e97bc40179a57f0349c2aee67d"


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (None, "boxes-store==3.2"),
        (
            {"url": "https://example.org/store.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"boxes-store @ git+https://example.org/store.git@{COMMIT}",
        ),
        (
            {
                "url": "ssh://git@example.org/all.git",
                "subdirectory": "packages/store",
                "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT},
            },
            f"boxes-store @ git+ssh://git@example.org/all.git@{COMMIT}#subdirectory=packages/store",
        ),
        ({"url": "file:///home/me/store", "dir_info": {}}, "boxes-store @ file:///home/me/store"),
        ({"url": "file:///my%20store", "dir_info": {"editable": True}}, "boxes-store @ file:///my%20store"),
        (
            {"url": "https://example.org/boxes_store-3.2-py3-none-any.whl", "archive_info": {}},
            "boxes-store @ https://example.org/boxes_store-3.2-py3-none-any.whl",
        ),
    ],
)
def test_a_distribution_is_pinned_to_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_url: dict[str, object] | None, requirement: str
) -> None:
    installed = tmp_path / "boxes_store-3.2.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: boxes-store\nVersion: 3.2\n")
    if direct_url is not None:
        (installed / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.syspath_prepend(tmp_path)
    assert pinned_requirement("boxes-store") == requirement
    Requirement(requirement)  # pip can read it


def test_the_package_depends_on_what_is_installed_here(tmp_path: Path) -> None:
    write_environment("my-boxes", tmp_path / "my-boxes")
    project = tomllib.loads((tmp_path / "my-boxes" / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [pinned_requirement("agentrl-trainer"), pinned_requirement("agentrl-sandbox")]


def test_nothing_is_written_if_agentrl_is_imported_without_being_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.scaffold.package.DISTRIBUTION", "boxes-store")
    with pytest.raises(
        SettingsError, match=r"depends on boxes-store, which is not installed .* pip install -e sandbox -e \.$"
    ):
        write_environment("my-boxes", tmp_path / "my-boxes")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_package_is_installed_tested_and_trained(tmp_path: Path) -> None:
    folder = tmp_path / "my-boxes"
    write_environment("my-boxes", folder)
    python = environment_beside_this(tmp_path / "venv")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-build-isolation", "--no-deps"]
    run([*pip, "--disable-pip-version-check", "-e", folder], tmp_path)
    assert "5 passed" in run([python, "-m", "pytest", "-p", "no:cacheprovider"], folder)
    run([python, "-m", "my_boxes.data"], folder)
    short = [
        "coldstart.steps=5",
        "coldstart.direct_steps=2",
        "training.steps=5",
        "rollout.problems_per_step=4",
        "rollout.group_size=4",
        "name=first",
    ]
    few = ["evaluation.problems=2", "evaluation.samples=2", "algorithm.drop_zero_variance=false"]
    said = run([python, "-m", "agentrl.cli", "train", "--config", "config.yaml", *short, *few], folder)
    assert "environment my-boxes: up to 3 turns, tools: look" in said
    assert json.loads((folder / "runs" / "first" / "summary.json").read_text())["steps"] == 5


def test_the_settings_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_environment("my-boxes", tmp_path / "my-boxes")
    config = (tmp_path / "my-boxes" / "config.yaml").read_text().replace("env: my-boxes", "env: my_boxes:MyBoxes")
    (tmp_path / "config.yaml").write_text(config)
    settings = load_settings(None, tmp_path / "config.yaml")
    assert (settings.training.steps, settings.data.train[0].path) == (30, "data/train.jsonl")


def environment_beside_this(folder: Path) -> Path:
    """A virtual environment that finds, beside its own packages, those of the running one."""
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", paths))
    lines = [f"import site; site.addsitedir({place!r})\n" for place in site.getsitepackages()]
    (own / "beside.pth").write_text("".join(lines))
    return folder / "bin" / "python"


def run(command: list[str | Path], folder: Path) -> str:
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, env={**os.environ, **own})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
