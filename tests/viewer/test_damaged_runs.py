"""Damaged or hostile files of a run cause a message, and other runs are still shown."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from viewer.conftest import client_of
from viewer.made_run import make_run
from viewer.test_api import get, run_id

from agentrl.errors import WorldError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.export import export_run_page

DEEP = b"[" * 100_000 + b"]" * 100_000
BOMB = "a: &a0 [x, x]\n" + "".join(f"b{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


def append(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.write(content)

    return damage


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(content) and None


def trajectories(content: bytes) -> Callable[[Path], None]:
    table = pa.table({"record": [content], "token_ids": [[1]], "log_probs": [[-0.5]]})
    return lambda run: pq.write_table(table, run / "trajectories/00000001.parquet", compression="zstd")


def link(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        secret = run.parent.parent / "secret"
        secret.write_text("password: swordfish\n")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)

    return damage


def pipe(run: Path) -> None:
    os.mkfifo(run / "notes.md")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            append("metrics.jsonl", b'{"step":3,"reward/mean":NaN}\n'), "not a finite number at step 3", id="nan"
        ),
        pytest.param(
            append("metrics.jsonl", b'{"step":3,"a":' + DEEP + b"}\n"), "skipped 1 damaged line", id="deep line"
        ),
        pytest.param(
            append("metrics.jsonl", b'{"step":3,"a":"' + b"x" * (1 << 25) + b'"}\n'), "damaged lines", id="huge"
        ),
        pytest.param(append("alerts.jsonl", b'{"alert":1e999}\n[]\n'), "", id="alerts of another shape"),
        pytest.param(replace("config.yaml", BOMB.encode()), "has aliases", id="aliases"),
        pytest.param(replace("config.yaml", DEEP), "nest", id="deep settings"),
        pytest.param(replace("config.yaml", b"2024-01-01: 2024-01-01\na: .nan\n"), "", id="dates and NaN as settings"),
        pytest.param(link("config.yaml"), "links to a file outside", id="settings elsewhere"),
        pytest.param(link("metrics.jsonl"), "links to a file outside", id="metrics elsewhere"),
        pytest.param(link("notes.md"), "links to a file outside", id="notes elsewhere"),
        pytest.param(pipe, "not a regular file", id="a pipe"),
        pytest.param(append("trajectories/x.parquet", b""), "", id="a file without a step"),
    ],
)
def test_a_damaged_run_is_its_own_notice(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    make_run(tmp_path / "runs" / "good", steps=1)
    run = make_run(tmp_path / "runs" / "bad", steps=2)
    damage(run.path)
    client = client_of(tmp_path / "runs")
    answer = client.get("/api/library")
    assert "swordfish" not in answer.text
    rows = {row["name"]: row for row in json.loads(answer.text, parse_constant=pytest.fail)["runs"]}
    assert (rows["good"]["step"], rows["good"]["warnings"]) == (1, [])
    assert said in " ".join([*rows["bad"].get("warnings", ()), rows["bad"].get("error", "")])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            trajectories(b'{"step":1,"group":1,"sample":0,"prompt_ids":1,"log_probs":1}'),
            "line 1 is damaged (KeyError",
            id="no segments",
        ),
        pytest.param(trajectories(b'{"a":' + DEEP + b"}\n"), "line 1 is damaged (RecursionError", id="a deep line"),
        pytest.param(
            trajectories(b'{"prompt_ids":2}'),
            "line 1 is damaged (ValueError: the record has 2 token ids",
            id="lost tokens",
        ),
        pytest.param(trajectories(b"x" * (1 << 29)), "line 1 is damaged: larger than 256 MB", id="a huge line"),
        pytest.param(link("trajectories/00000001.parquet"), "links to a file outside", id="trajectories elsewhere"),
        pytest.param(replace("tokenizer.json", b'{"model":'), "", id="tokenizer"),
        pytest.param(replace("tokens/00000001.0.parquet", b"PAR1"), "", id="token statistics"),
    ],
)
def test_a_damaged_step_is_its_own_notice(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    run = make_run(tmp_path / "runs" / "bad", steps=2)
    damage(run.path)
    client = client_of(run.path)
    own = run_id(client, "bad")
    found = get(client, f"/runs/{own}/trajectories")
    assert said in " ".join(found["warnings"])
    assert {row["step"] for row in found["rows"]} == ({2} if said else {1, 2})
    one = client.get(f"/api/runs/{own}/steps/1/0").json()
    assert "swordfish" not in json.dumps(one)
    assert one["error"] if said else one["warnings"]


def test_an_export_holds_no_file_from_outside_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "bad", steps=1)
    link("notes.md")(run.path)
    export_run_page(run, tmp_path / "page.html")
    facts = client_of(run.path).get("/api/library").json()["runs"][0]
    assert (facts["notes"], len(facts["warnings"])) == ("", 1)
    link("trajectories/00000001.parquet")(run.path)
    with pytest.raises(WorldError, match="links to a file outside"):
        export_run_page(run, tmp_path / "page.html")


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", steps=1)
    client = client_of(run.path)

    def state() -> str:
        return str(get(client, "/library")["runs"][0]["state"])

    def age() -> None:
        old = time.time() - 3_000
        for file in (run.metrics_file, run.config):
            os.utime(file, (old, old))

    age()
    assert state() == "stopped"
    continued = RunDirectory.resume(run.path)
    age()
    assert state() == "running"  # however old its newest row is
    continued.close()
    (run.path / "lock").write_text("another machine")
    assert state() == "stopped"
    run.metrics_file.write_text('{"step":1,"time/step_s":400}\n')
    age()
    assert state() == "running"  # fewer than ten of its steps ago


def test_the_table_of_runs_and_its_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", steps=1)
    rows = [{"step": step, "a": float(step), "time/step_s": 2.0, "policy/tokens": 10} for step in range(1, 101)]
    rows.append({"step": 100, "eval/avg_at_k": 0.5, "eval/low": 0.4, "eval/high": 0.6})
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    client = client_of(run.path)
    (row,) = get(client, "/library")["runs"]
    assert (row["step"], row["seconds"], row["collapsed"]) == (100, 200.0, True)
    assert row["result"] == {"metric": "eval/avg_at_k", "step": 100, "value": 0.5, "low": 0.4, "high": 0.6}
    assert [alert["alert"] for alert in row["alerts"]] == ["entropy_collapse"]
    path = f"/runs/{run_id(client)}/series"
    found = get(client, f"{path}?points=10&names=a&names=eval/avg_at_k")
    a, score = found["series"]["a"], found["series"]["eval/avg_at_k"]
    assert (a["value"][0], a["low"][0], a["high"][0], a["last"]) == (5.5, 1.0, 10.0, 100.0)
    axes = found["axes"][a["axis"]]
    assert (axes["step"][0], axes["tokens"][0], axes["hours"][-1]) == (10, 100.0, 200 / 3600)
    assert (score["value"], score["low"]) == ([0.5], None)
    assert get(client, f"{path}?since={found['version']}") == {"version": found["version"], "changed": False}
