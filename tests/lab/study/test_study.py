"""Studies: grids, queues that continue, records, tables and statistics."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from scipy import stats

from agentrl.cli import check_training_settings
from agentrl.errors import SettingsError
from agentrl.lab.study.command import RECORD, read_study_record, study_command
from agentrl.lab.study.report import _rewards_by_step, study_figure, study_markdown
from agentrl.lab.study.runs import StudyRun, list_study_runs, split_cores, train_command
from agentrl.lab.study.settings import StudySettings, parse_study
from agentrl.lab.study.statistics import (
    HeldOutScore,
    RunCurve,
    StudyRecord,
    holm_adjusted_p_values,
    interquartile_mean,
    mean_over_seeds,
    paired_differences,
    sign_flip_p_value,
)

GRID = {"algorithm.estimator": ["grpo", "tir_otb"], "rollout.group_size": [4, 16]}


def study(**values: object) -> StudySettings:
    return parse_study({"name": "s", "seeds": [0, 1], **values}, "study.yaml")


def curve(variant: str, seed: int, *means: float, status: str = "finished") -> RunCurve:
    scores = [HeldOutScore(step=10 * place, mean=mean, low=mean, high=mean) for place, mean in enumerate(means)]
    steps = tuple(range(1, 10 * len(means) - 9))
    return RunCurve(
        variant=variant, seed=seed, settings={}, status=status, scores=tuple(scores), steps=steps,
        rewards=(0.5,) * len(steps), model_tokens=(100,) * len(steps), trajectories=(8,) * len(steps),
        seconds=(1.0,) * len(steps),
    )  # fmt: skip


def test_variants_are_the_product_of_named_sets_and_grid():
    found = study(grid=GRID, variants={"small": {"model.tiny.layers": 2}, "large": {}}).all_variants()
    assert len(found) == 8
    assert found["small tir_otb group_size=16"] == {
        "model.tiny.layers": 2, "algorithm.estimator": "tir_otb", "rollout.group_size": 16,
    }  # fmt: skip
    assert list(study().all_variants()) == ["default"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"settings": {"seed": 3}}, "seed must not be in settings, grid or variants, because the study sets it"),
        ({"grid": {"name": ["a"]}}, "name must not be in settings, grid or variants, because the study sets it"),
        ({"seeds": [1, 1]}, "seeds must be distinct; got"),
        ({"grid": {"rollout.group_size": []}}, "grid.rollout.group_size must have at least one value"),
        ({"grid": GRID, "baseline": "grpo"}, "not a variant; valid: grpo group_size=4, grpo group_size=16"),
        ({"sedes": [1]}, "Extra inputs"),
        ({"name": "a/../../b c"}, "String should match pattern"),
        ({"name": ".."}, "String should match pattern"),
        (
            {"grid": {"rollout.group_size": [4, 8, 4]}},
            r"grid.rollout.group_size must have distinct values; got \[4, 8, 4\]",
        ),
        ({"variants": {"lr+": {}, "lr-": {}}}, "variants 'lr\\+' and 'lr-' share the directory lr-: use other"),
        ({"variants": {"größer": {}, "gr-er": {}}}, "share the directory gr-er"),
    ],
)
def test_a_mistake_in_a_study_is_named(values: dict[str, object], said: str):
    with pytest.raises(SettingsError, match=said):
        study(**values)


def test_runs_go_seed_by_seed_and_name_their_settings(tmp_path: Path):
    one = study(grid=GRID, config="tiny", settings={"training.steps": 5, "data.train": [{"path": "p.jsonl"}]})
    runs = list_study_runs(one, tmp_path)
    assert [run.seed for run in runs] == [0] * 4 + [1] * 4
    assert len({run.folder for run in runs}) == 8
    command = train_command(one, runs[5])
    assert "--resume" not in command
    assert command[command.index("--config") + 1] == "tiny"
    assert {'algorithm.estimator="grpo"', "rollout.group_size=16", "training.steps=5", "seed=1"} <= set(command)
    assert 'data.train=[{"path": "p.jsonl"}]' in command


FAKE = """#!/usr/bin/env python3
import json, pathlib, sys
given = dict(item.split("=", 1) for item in sys.argv[1:] if "=" in item)
folder = pathlib.Path(json.loads(given["runs_dir"])) / json.loads(given["name"])
folder.mkdir(parents=True, exist_ok=True)
print("resumed" if "--resume" in sys.argv else "new", flush=True)
if given["algorithm.estimator"] == '"grpo"' and given["seed"] == "1":
    sys.exit("error: the machine is on fire")
(folder / "config.yaml").write_text("{}")
seed = int(given["seed"])
rows = [{"step": 0, "eval/avg_at_k": 0.2, "eval/low": 0.1, "eval/high": 0.3}]
for step in (1, 2):
    rows += [{"step": step, "reward/count": 8, "reward/mean": 0.5, "rollout/model_tokens": 100, "time/step_s": 1.0}]
rows += [{"step": 2, "eval/avg_at_k": 0.6 + seed / 10, "eval/low": 0.5, "eval/high": 0.8}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(folder / "summary.json").write_text("{}")
"""


@pytest.fixture
def fake_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the interpreter of the runs: writes a run directory at once."""
    script = tmp_path / "train"
    script.write_text(FAKE)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("agentrl.lab.study.runs.sys.executable", str(script))
    return script


def run_study(file: Path, folder: Path, **options: object) -> list[str]:
    said: list[str] = []
    usual = {"jobs": None, "baseline": None, "retry": False, "report_only": False, "check": check_training_settings}
    chosen = usual | options
    study_command(file, folder, echo=said.append, **chosen)
    return said


def test_a_study_keeps_failures_goes_on_and_reports_from_its_record(tmp_path: Path, fake_train: Path):
    file, home = tmp_path / "study.yaml", tmp_path / "runs"
    file.write_text(
        "name: s\nseeds: [0, 1]\njobs: 2\ntarget: 0.5\ngrid: {algorithm.estimator: [tir_otb, grpo]}\n"
        "settings: {training.steps: 2}\n"
    )
    said = run_study(file, home)
    assert "grpo-seed-1: failed with exit status 1: error: the machine is on fire" in "\n".join(said)
    record = read_study_record(home / RECORD)
    assert [run.status for run in record.runs] == ["finished", "finished", "finished", "failed"]
    assert [run.final_score for run in record.runs] == [0.6, 0.6, 0.7, None]
    report = (home / "report.md").read_text()
    # 0.6 and 0.7: t(1) = 12.706, half-width 12.706 x 0.0707 / sqrt(2).
    assert "| tir_otb | 2 | 0.200 [0.200, 0.200] | 0.650 [0.015, 1.285] |" in report
    assert "| tir_otb | 2 of 2 | 200 | 16 |" in report
    assert "| grpo | 1 | failed | exit status 1 error: the machine is on fire |" in report
    assert (home / "curves.png").stat().st_size > 10_000
    other = "\n".join(run_study(home / RECORD, tmp_path / "other", baseline="grpo"))
    assert "## Final score: difference from tir_otb, paired by seed" in report
    assert "## Final score: difference from grpo" in other
    assert "## Area: difference from grpo" in other
    with pytest.raises(SettingsError, match=r"^--baseline: baseline 'gpro' is not a variant; valid: tir_otb, grpo$"):
        run_study(home / RECORD, None, baseline="gpro")

    assert not [line for line in run_study(file, home) if line.endswith("starts")]  # nothing twice, not failures either
    fake_train.write_text(FAKE.replace('sys.exit("error: the machine is on fire")', "pass"))
    assert "grpo-seed-1: finished" in run_study(file, home, retry=True)
    assert all(run.status == "finished" for run in read_study_record(home / RECORD).runs)

    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "kept.json").write_bytes((home / RECORD).read_bytes())
    run_study(kept / "kept.json", kept)
    assert (kept / "report.md").read_text() == (home / "report.md").read_text()


def record_alone(text: str, file: Path) -> tuple[Path, tuple[RunCurve, ...]]:
    """A folder that holds nothing but the record of the study ``text``, and its runs."""
    home, there = file.parent / "first", file.parent / "second"
    file.write_text(text)
    run_study(file, home)
    there.mkdir()
    (there / RECORD).write_bytes((home / RECORD).read_bytes())
    return there, read_study_record(home / RECORD).runs


def test_a_study_goes_on_from_its_record_on_another_machine(tmp_path: Path, fake_train: Path):
    file = tmp_path / "study.yaml"
    text = "name: s\nseeds: [0]\ngrid: {algorithm.estimator: [tir_otb, rloo]}\nsettings: {training.steps: 2}\n"
    there, before = record_alone(text, file)
    file.write_text(text.replace("[0]", "[0, 2]"))
    said = run_study(file, there)
    assert f"2 stored in {there / RECORD}, 2 waiting" in said[0]
    assert [line for line in said if line.endswith("starts")] == ["tir_otb-seed-2: starts", "rloo-seed-2: starts"]
    after = read_study_record(there / RECORD).runs
    assert after[:2] == before
    assert [(run.seed, run.status) for run in after[2:]] == [(2, "finished")] * 2


def test_a_record_loses_no_run(tmp_path: Path, fake_train: Path):
    file = tmp_path / "study.yaml"
    text = "name: s\nseeds: [1]\ngrid: {algorithm.estimator: [tir_otb, grpo]}\nsettings: {training.steps: 2}\n"
    there, before = record_alone(text, file)
    assert [run.status for run in before] == ["finished", "failed"]
    run_study(file, there, report_only=True)
    assert read_study_record(there / RECORD).runs == before
    assert not [line for line in run_study(file, there) if line.endswith("starts")]  # failed runs wait for --retry
    for other in (text.replace("[1]", "[5]"), text.replace(", grpo", "")):
        file.write_text(other)
        with pytest.raises(SettingsError, match=r"is the only copy of variant '(tir_otb|grpo)' on seed 1, but"):
            run_study(file, there, report_only=True)
    file.write_text(text)
    assert "grpo-seed-1: starts" in run_study(file, there, retry=True)


def test_a_study_that_was_stopped_knows_its_settings(tmp_path: Path, fake_train: Path):
    """Its runs would mix with those of other settings."""
    file, home = tmp_path / "study.yaml", tmp_path / "runs"
    file.write_text("name: s\nseeds: [0]\ngrid: {algorithm.estimator: [tir_otb, rloo]}\n")
    fake_train.write_text(FAKE.replace('if given["algorithm.estimator"] == ', 'if given["algorithm.estimator"] < '))

    def stop(line: str) -> None:
        if line == "rloo-seed-0: starts":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study_command(
            file, home, jobs=1, baseline=None, retry=False, report_only=False, check=check_training_settings, echo=stop
        )
    assert [run.status for run in read_study_record(home / RECORD).runs] == ["finished", "waiting"]
    file.write_text(file.read_text() + "settings: {training.steps: 500}\n")
    with pytest.raises(SettingsError, match="that differs in settings"):
        run_study(file, home)


def test_a_step_without_data_is_no_reward_of_zero(tmp_path: Path, fake_train: Path):
    file, home = tmp_path / "study.yaml", tmp_path / "runs"
    file.write_text("name: s\nseeds: [0]\ngrid: {algorithm.estimator: [tir_otb]}\n")
    empty = '(1, 2):\n    rows += [{"step": step + 2, "reward/count": 0, "time/step_s": 1.0}]\n'
    fake_train.write_text(FAKE.replace("(1, 2):\n", empty))
    run_study(file, home)
    (run,) = read_study_record(home / RECORD).runs
    assert sorted(run.steps) == [1, 2, 3, 4]
    assert run.rewards == (None, 0.5, None, 0.5)
    assert run.model_tokens == (0, 100, 0, 100)
    points = _rewards_by_step([run], window=2)
    assert points == {1: [0.5], 2: [0.5]}
    assert _rewards_by_step([run.model_copy(update={"rewards": (None,) * 4})], window=2) == {}


def test_what_it_cost_is_asked_of_runs_that_ended():
    runs = (curve("a", 0, 0.2, 0.9), curve("a", 1, status="waiting"), curve("a", 2, status="failed"))
    text = study_markdown(StudyRecord(agentrl="1", study=study(variants={"a": {}}, target=0.8), runs=runs))
    assert "| a | 1 of 1 | 1,000 | 80 | 10 |" in text
    assert "| 0 of 1 | 1 |" in text.split("## Cost")[0]  # collapsed, failed


def test_a_grid_of_numbers_gives_names_that_runs_may_have(tmp_path: Path, fake_train: Path):
    file, home = tmp_path / "study.yaml", tmp_path / "runs"
    grid = "{algorithm.estimator: [tir_otb], optimizer.learning_rate: [1.0e-4, 3.0e-4], rollout.group_size: [4]}"
    file.write_text(f"name: s\nconfig: [horizon_2, horizon_lookups]\nseeds: [0]\ngrid: {grid}\n")
    assert "tir_otb-learning_rate-0.0003-group_size-4-seed-0: finished" in run_study(file, home)


def test_a_variant_that_train_would_refuse_stops_the_study_before_its_first_run(tmp_path: Path, fake_train: Path):
    file, home = tmp_path / "study.yaml", tmp_path / "runs"
    file.write_text("name: s\nseeds: [0]\ngrid: {algorithm.estimator: [tir_otb, tir_otv]}\n")
    with pytest.raises(SettingsError, match=r"variant 'tir_otv': .*did you mean 'tir_otb'"):
        run_study(file, home)
    assert not home.exists()


def test_a_run_that_was_cut_off_is_resumed(tmp_path: Path, fake_train: Path):
    file, home = tmp_path / "study.yaml", tmp_path / "runs"
    file.write_text("name: s\nseeds: [0]\ngrid: {algorithm.estimator: [tir_otb]}\n")
    begun = home / "tir_otb-seed-0"
    begun.mkdir(parents=True)
    (begun / "config.yaml").write_text("{}")
    assert "tir_otb-seed-0: continues" in run_study(file, home)
    assert (home / "logs/tir_otb-seed-0.log").read_text() == "resumed\n"


PATIENT = """#!/usr/bin/env python3
import json, pathlib, signal, sys, time
given = dict(item.split("=", 1) for item in sys.argv[1:] if "=" in item)
folder = pathlib.Path(json.loads(given["runs_dir"])) / json.loads(given["name"])
folder.mkdir(parents=True, exist_ok=True)
def stop(number, frame):
    (folder / "saved").write_text("")
    sys.exit(130)
signal.signal(signal.SIGTERM, stop)
(folder / "config.yaml").write_text("{}")
time.sleep(60)
"""
STUDY = "import sys; from agentrl.cli import main; sys.executable = sys.argv.pop(1); main()"


def test_a_study_that_is_told_to_stop_passes_it_on_to_its_runs(tmp_path: Path):
    """As `kill`, a job scheduler or a supervisor does it: the signal reaches the study alone."""
    train, file, home = tmp_path / "train", tmp_path / "study.yaml", tmp_path / "runs"
    train.write_text(PATIENT)
    train.chmod(0o755)
    file.write_text("name: s\nseeds: [0, 1, 2]\njobs: 2\ngrid: {algorithm.estimator: [tir_otb]}\n")
    command = [sys.executable, "-c", STUDY, str(train), "study", str(file), "--output", str(home)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while len(list(home.glob("*/config.yaml"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    said, _ = process.communicate(timeout=50)
    assert process.returncode == 130, said
    assert len(list(home.glob("*/saved"))) == 2
    assert not (home / "tir_otb-seed-2").exists()
    assert not list(home.glob("logs/*.failed"))


def test_other_settings_under_the_same_name_are_refused(tmp_path: Path, fake_train: Path):
    file, home = tmp_path / "study.yaml", tmp_path / "runs"
    file.write_text("name: s\nseeds: [0]\ngrid: {algorithm.estimator: [tir_otb]}\nsettings: {training.steps: 2}\n")
    run_study(file, home)
    file.write_text(file.read_text().replace("2}", "3}"))
    with pytest.raises(SettingsError, match="that differs in settings: give this study another name"):
        run_study(file, home)
    with pytest.raises(SettingsError, match="is not a record of a study"):
        run_study(begun_json(tmp_path), home)


def begun_json(folder: Path) -> Path:
    path = folder / "broken.json"
    path.write_text('{"agentrl": "1"}')
    return path


def test_scores_areas_costs_and_collapses():
    run = curve("a", 0, 0.2, 0.6, 1.0)
    assert run.final_score == 1.0
    assert run.mean_score_over_steps == pytest.approx(0.6)
    assert run.cost_to_reach(0.5, run.model_tokens) == 1000
    assert run.cost_to_reach(0.9, run.trajectories) == 160
    assert run.cost_to_reach(1.1, run.model_tokens) is None
    assert not run.has_collapsed(0.5)
    assert curve("a", 0, 0.2, 0.9, 0.3).has_collapsed(0.5)
    assert not curve("a", 0, status="failed").has_collapsed(0.5)  # why it failed is not known
    assert curve("a", 0, 0.2, 0.4, status="interrupted").final_score is None


def test_scores_at_equal_tokens_are_interpolated():
    run = curve("a", 0, 0.2, 0.6, 1.0)  # evaluations after 0, 1,000 and 2,000 tokens
    assert run.last_and_mean_score_until(1500) == pytest.approx((0.8, (1000 * 0.4 + 500 * 0.7) / 1500))
    assert run.last_and_mean_score_until(2001) is None  # it sampled fewer
    assert curve("a", 0, 0.2, 0.6, status="failed").last_and_mean_score_until(10) is None
    runs = tuple(curve(name, seed, 0.2, 0.6 + high) for name, high in (("a", 0.0), ("b", 0.2)) for seed in (0, 1))
    record = StudyRecord(agentrl="1", study=study(variants={"a": {}, "b": {}}, tokens=500), runs=runs)
    text = study_markdown(record)
    assert "| b | 2 | 0.500 [0.500, 0.500] | 0.350 [0.350, 0.350] | 1,000 |" in text
    assert "## Score after 500 tokens: difference from a, paired by seed" in text
    assert study_figure(record).axes[0].get_xlabel() == "sampled tokens"


def test_differences_are_paired_by_seed():
    scores = {"base": {0: 0.1, 1: 0.5, 2: 0.9}, "other": {0: 0.2, 1: 0.7, 2: 1.2}, "lonely": {0: 1.0}}
    (found,) = paired_differences(scores, "base")
    expected = stats.ttest_rel([0.2, 0.7, 1.2], [0.1, 0.5, 0.9]).confidence_interval()
    assert (found.variant, found.difference.seeds) == ("other", 3)
    assert (found.difference.low, found.difference.high) == pytest.approx((expected.low, expected.high))
    assert found.p_value == 0.25  # all three of one sign: two of eight patterns
    assert found.adjusted_p == 0.25


def test_sign_flips_of_many_seeds_and_of_none():
    assert sign_flip_p_value(np.full(10, 0.1)) == pytest.approx(2 / 1024)
    assert sign_flip_p_value(np.full(15, 0.1)) == pytest.approx(2.0**-14, rel=1e-9)
    assert sign_flip_p_value(np.zeros(4)) == 1.0


def test_holm_never_reverses_an_order():
    raw = {"a": 0.2, "b": 0.01, "c": 0.02}
    assert holm_adjusted_p_values(raw) == {"b": 0.03, "c": 0.04, "a": 0.2}
    assert holm_adjusted_p_values({"a": 0.03, "b": 0.028, "c": 0.04}) == pytest.approx(
        {"b": 0.084, "a": 0.084, "c": 0.084}
    )
    assert holm_adjusted_p_values({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("seeds", [3, 5, 20])
def test_intervals_over_seeds_contain_the_mean_of_a_normal_population_in_95_percent(seeds: int):
    draws = np.random.default_rng(0).normal(size=(1000, seeds))
    hits = sum(found.low <= 0 <= found.high for found in map(mean_over_seeds, draws))
    assert 0.93 <= hits / 1000 <= 0.97  # four standard errors and more; a percentile bootstrap: 0.77, 0.85, 0.93


@pytest.mark.parametrize("seeds", [5, 8])
def test_intervals_of_interquartile_means_hold_where_a_fifth_of_the_runs_collapse(seeds: int):
    rng = np.random.default_rng(0)
    found = [interquartile_mean(collapsing(rng, seeds)) for _ in range(500)]
    truth = interquartile_mean(collapsing(rng, 200_000)).value
    assert 0.92 <= sum(one.low <= truth <= one.high for one in found) / 500 <= 0.98


def collapsing(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.where(rng.random(count) < 0.2, 0.1, rng.normal(0.8, 0.05, size=count))


def test_a_single_seed_has_no_interval():
    assert np.isnan([mean_over_seeds([0.4]).low, interquartile_mean([0.4]).high]).all()


def test_a_report_without_any_finished_run_says_so():
    record = StudyRecord(agentrl="1", study=study(grid=GRID), runs=(curve("grpo group_size=4", 0, status="waiting"),))
    text = study_markdown(record)
    assert "0 of 1 runs finished" in text
    assert "No variant has two finished seeds in common with the baseline." in text
    assert "| grpo group_size=4 | 0 | waiting |  |" in text


def test_a_status_is_what_the_files_say(tmp_path: Path):
    run = StudyRun(variant="a", seed=0, values={}, folder=tmp_path / "a-seed-0")
    assert run.status == "waiting"
    run.folder.mkdir()
    run.run_directory.config.write_text("{}")
    assert run.status == "interrupted"
    run.log_file.parent.mkdir()
    run.failure_file.write_text("exit status 1")
    assert run.status == "failed"
    run.run_directory.summary.write_text(json.dumps({}))
    assert run.status == "finished"


@pytest.mark.parametrize("count", [1, 3, 8, 9, 26])
def test_every_variant_is_named_inside_the_picture(count: int):
    names = [f"estimator_{place} learning_rate=0.0001" for place in range(count)]
    one = study(variants={name: {} for name in names}, baseline=names[-1])
    figure = study_figure(StudyRecord(agentrl="0", study=one, runs=[curve(name, 0, 0.2, 0.8) for name in names]))
    figure.draw_without_rendering()
    legend = figure.axes[0].get_legend()
    texts = legend.get_texts() if legend else [text for axes in figure.axes for text in axes.findobj(Text)]
    boxes = {text.get_text(): text.get_window_extent() for text in texts if text.get_text() in names}
    assert list(boxes) == names
    assert not [box for box in boxes.values() if not figure.bbox.contains(*box.p0) or not figure.bbox.contains(*box.p1)]
    assert not [pair for pair in itertools.combinations(boxes.values(), 2) if Bbox.intersection(*pair)]
    assert any("1 seeds, bands are 95 % intervals over seeds" in text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize(
    ("steps", "title", "points"),
    [
        (8, "Training reward", [1, 2, 3, 4, 5, 6, 7, 8]),
        (25, "Training reward, means of ten steps", [10, 20]),
    ],
)
def test_rewards_of_a_short_study_are_drawn_by_step(steps: int, title: str, points: list[int]):
    numbers = tuple(range(1, steps + 1))
    run = RunCurve(
        variant="a", seed=0, settings={}, status="finished", scores=curve("a", 0, 0.2).scores, steps=numbers,
        rewards=(0.5,) * steps, model_tokens=(100,) * steps, trajectories=(8,) * steps, seconds=(1.0,) * steps,
    )  # fmt: skip
    one = study(variants={"a": {}}, baseline="a")
    rewards = study_figure(StudyRecord(agentrl="0", study=one, runs=[run])).axes[1]
    assert rewards.get_title(loc="left") == title
    assert list(rewards.get_lines()[0].get_xdata()) == points


CORES = """#!/usr/bin/env python3
import json, os, pathlib, sys
given = dict(item.split("=", 1) for item in sys.argv[1:] if "=" in item)
folder = pathlib.Path(json.loads(given["runs_dir"])) / json.loads(given["name"])
folder.mkdir(parents=True)
(folder / "cores").write_text(json.dumps(sorted(os.sched_getaffinity(0))))
sys.exit(1)
"""


@pytest.mark.parametrize(("jobs", "count"), [(1, 3), (2, 3), (2, 1)])
def test_runs_at_a_time_have_cores_of_their_own(tmp_path: Path, fake_train: Path, jobs: int, count: int):
    """A run takes as many threads as it has cores. Two runs with the threads of both wait for each other."""
    fake_train.write_text(CORES)
    file, home, mine = tmp_path / "study.yaml", tmp_path / "runs", os.sched_getaffinity(0)
    file.write_text(f"name: s\nseeds: {list(range(count))}\ngrid: {{algorithm.estimator: [tir_otb]}}\n")
    run_study(file, home, jobs=jobs)
    given = [set(json.loads(path.read_text())) for path in home.glob("*/cores")]
    assert len(given) == count
    assert all(cores in split_cores(mine, min(jobs, count)) for cores in given)
    assert os.sched_getaffinity(0) == mine
