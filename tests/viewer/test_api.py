"""The viewer's JSON of a generated run equals the stored data, to the last digit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient
from viewer.conftest import TOKEN, client_of
from viewer.made_run import END, HOSTILE, OUTPUT, PROGRAM, make_run

from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import read_step
from agentrl.viewer.app import make_app
from agentrl.viewer.explain import explain_command
from agentrl.viewer.runs import RunLibrary
from agentrl.viewer.serve import CalculationClient, open_local_listener, read_or_create_viewer_token
from agentrl.viewer.what_if import recompute_advantages


def get(client: TestClient, path: str, status: int = 200) -> Any:
    answer = client.get(f"/api{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


def run_id(client: TestClient, name: str = "first") -> str:
    (found,) = (run["id"] for run in get(client, "/library")["runs"] if run["name"] == name)
    return str(found)


def test_runs_are_listed_with_their_settings(client: TestClient) -> None:
    (run,) = get(client, "/library")["runs"]
    assert (run["name"], run["state"], run["stored_steps"]) == ("first", "stopped", 3)
    assert run["settings"]["algorithm.estimator"] == "tir_otb"


def test_curves_follow_the_file_and_a_torn_line_is_left_for_later(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", steps=2)
    client = client_of(tmp_path)
    path = f"/runs/{run_id(client)}/series"

    def steps() -> object:
        found = get(client, path)
        return found["axes"][found["series"]["a"]["axis"]]["step"]

    with run.metrics_file.open("ab") as file:
        file.write(b'{"step":3,"a":1}\n{"step":')
    assert steps() == [3]
    with run.metrics_file.open("ab") as file:
        file.write(b'4,"a":2}\n')
    assert steps() == [3, 4]
    RunDirectory(run.path).truncate_after(3, rows=3)  # as --resume does
    assert steps() == [3]


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("&ended=void_turn", [2, 6]),
        ("&dropped=void turn", [2, 6]),
        ("&verdict=incorrect", [1, 5]),
        ("&problem=TOY-1", [4, 5, 6, 7]),
        ("&group=200", [0, 1, 2, 3]),
        ("&least_reward=0.5", [0, 3, 4, 7]),
        ("&most_reward=0.5&tool=ok", [1, 2, 5, 6]),
        ("&tool=timeout", []),
        ("&least_turns=3", []),
        ("&text=BOXED{6}", [1, 5]),
        ("&text=nowhere", []),
        ("&text=LET ME COMPUTE", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("&text=ed{5}.", [0, 3, 4, 7]),
    ],
)
def test_a_step_is_searched(client: TestClient, query: str, numbers: list[int]) -> None:
    found = get(client, f"/runs/{run_id(client)}/trajectories?first=2&last=2{query}")
    assert [row["number"] for row in found["rows"]] == numbers
    assert {row["step"] for row in found["rows"]} <= {2}
    assert found["next"] is None


def test_a_search_of_many_steps_goes_on_where_it_stopped(client: TestClient) -> None:
    path = f"/runs/{run_id(client)}/trajectories?verdict=correct&limit=5"
    first = get(client, path)
    second = get(client, f"{path}&after={first['next']}")
    third = get(client, f"{path}&after={second['next']}")
    rows = [(row["step"], row["number"]) for page in (first, second, third) for row in page["rows"]]
    assert rows == [(step, number) for step in (1, 2, 3) for number in (0, 3, 4, 7)]
    assert third["next"] is None


def test_a_trajectory_is_told_token_by_token(client: TestClient, run: RunDirectory) -> None:
    page = get(client, f"/runs/{run_id(client)}/steps/2/1")
    program, output, answer = page["segments"]
    assert "".join(program["pieces"]) == f"{HOSTILE}\n{PROGRAM}" == program["text"]
    assert "".join(output["pieces"]) == OUTPUT
    assert (answer["pieces"][-1], answer["special"]) == (END, [len(answer["pieces"]) - 1])
    assert page["tool_calls"][0]["outcome"] == "ok"
    assert page["reward_parts"] == {"shorter": -2.5}
    stored = read_step(run, 2)
    item = stored.trajectories[1]
    group = [one for one in stored.trajectories if one.key.group == item.key.group]
    exact = recompute_advantages(stored, group)[item.key]
    for name in ("advantages", "returns", "baselines"):
        np.testing.assert_array_equal(np.float32(page["fields"][name]), exact[name])
    assert item.tokens is not None
    assert page["fields"]["energy"] == item.tokens.energy.tolist()
    assert page["fields"]["engine_log_probs"] == item.columns()["engine_log_probs"].tolist()
    share = item.tokens.gradient_power / stored.total_gradient_power
    np.testing.assert_allclose(page["fields"]["gradient_share"], share, rtol=1e-12)
    assert page["row"]["gradient_share"] == pytest.approx(share.sum(), rel=1e-12)
    assert [sibling["number"] for sibling in page["siblings"]] == [0, 1, 2, 3]
    assert ["curves" in sibling for sibling in page["siblings"]] == [True, True, False, True]
    assert page["siblings"][1]["curves"]["realized_energy"] == stored.realized_energies[item.key].tolist()


def test_damaged_and_newer_files_are_named_and_the_rest_is_shown(tmp_path: Path, run: RunDirectory) -> None:
    shutil.copytree(run.path, tmp_path / "first")
    copy, client = RunDirectory(tmp_path / "first"), client_of(tmp_path)
    tokens = copy.token_statistics_file(2, 0)
    tokens.write_bytes(tokens.read_bytes()[:-20])
    page = get(client, f"/runs/{run_id(client)}/steps/2/1")
    assert "advantages" not in page["fields"]
    assert "cannot read the token statistics" in page["warnings"][0]
    records = copy.trajectory_file(3)
    records.write_bytes(records.read_bytes()[:-20])
    found = get(client, f"/runs/{run_id(client)}/trajectories")
    assert {row["step"] for row in found["rows"]} == {1, 2}
    assert "the file is corrupted" in found["warnings"][0]
    assert "the file is corrupted" in get(client, f"/runs/{run_id(client)}/steps/3/0", 503)["error"]


def test_a_run_of_a_newer_version_is_refused_in_one_message(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", steps=1)
    file = run.token_statistics_file(1, 0)
    table = pq.read_table(file)
    newer = json.loads(table.schema.metadata[b"agentrl"]) | {"format": 2}
    pq.write_table(table.replace_schema_metadata({b"agentrl": json.dumps(newer)}), file)
    client = client_of(tmp_path)
    assert len(get(client, f"/runs/{run_id(client)}/trajectories")["rows"]) == 8
    said = get(client, f"/runs/{run_id(client)}/steps/1/0", 404)["error"]
    assert "has format 2, but this version of agentrl reads format 1" in said


def test_notes_are_shown_and_searched(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first", steps=1)
    (run.path / "notes.md").write_text("try \u202e <b>", encoding="utf-8")
    client = client_of(tmp_path)
    assert get(client, f"/runs/{run_id(client)}")["notes"] == "try \u202e <b>"


def test_what_is_not_there_is_said_in_one_message(client: TestClient) -> None:
    own = run_id(client)
    assert "no trajectories of step 9; stored steps: 1 to 3" in get(client, f"/runs/{own}/steps/9/0", 404)["error"]
    assert "no trajectories of step 9" in get(client, f"/runs/{own}/trajectories?first=9&last=9", 404)["error"]
    assert "no trajectory 8 at step 1; valid: 0 to 7" in get(client, f"/runs/{own}/steps/1/8", 404)["error"]
    assert "the run gone does not exist" in get(client, "/runs/gone", 404)["error"]
    assert (
        "least_turns must be a number; got 'x'" in get(client, f"/runs/{own}/trajectories?least_turns=x", 400)["error"]
    )


def test_only_the_token_and_this_host_open_the_data(client: TestClient) -> None:
    assert client.get("/api/library", headers={"Authorization": "Bearer other"}).status_code == 401
    assert client.get("/api/library", headers={"Host": "elsewhere.example"}).status_code == 400
    answer = client.get("/")
    assert "script-src 'self';" in answer.headers["content-security-policy"]
    assert client.post("/api/library").status_code == 405
    assert client.get("/static/../app.py").status_code == 404


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="contains no run"):
        RunLibrary([tmp_path])
    with pytest.raises(SettingsError, match="does not exist"):
        RunLibrary([tmp_path / "missing"])


def test_the_viewer_needs_no_torch() -> None:
    code = "import sys, json, agentrl.viewer.serve; print(json.dumps([name in sys.modules for name in sys.argv[1:]]))"
    command = [sys.executable, "-c", code, "torch", "transformers"]
    assert json.loads(subprocess.check_output(command, text=True, timeout=120)) == [False, False]


def test_a_port_in_use_is_said_in_one_message() -> None:
    taken = open_local_listener(None)
    with taken, pytest.raises(SettingsError, match=r"cannot listen on 127\.0\.0\.1: .*omit --port"):
        open_local_listener(taken.getsockname()[1])


def test_the_token_stays_the_same_and_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    token = read_or_create_viewer_token()
    file = tmp_path / "agentrl" / "view-token"
    assert (read_or_create_viewer_token(), file.stat().st_mode & 0o777) == (token, 0o600)
    file.chmod(0o644)  # others may have read it
    assert read_or_create_viewer_token() != token


def test_a_process_of_its_own_computes_what_if_and_explains(run: RunDirectory) -> None:
    calculator = CalculationClient()
    app = make_app(RunLibrary([run.path]), token=TOKEN, calculate=calculator.request)
    client = TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {TOKEN}"})
    path = f"/runs/{run_id(client)}/steps/2/1"
    try:
        found = get(client, f'{path}/what_if?estimator=tir_otb&options={{"tail":"self"}}&size=2')
        stored = read_step(run, 2)
        group = [stored.trajectories[0], stored.trajectories[1]]
        exact = recompute_advantages(stored, group, estimator="tir_otb", options={"tail": "self"})[group[1].key]
        np.testing.assert_array_equal(np.float32(found["fields"]["what_if_advantages"]), exact["advantages"])
        assert [sibling["number"] for sibling in found["siblings"]] == [0, 1]
        assert "N must be 1 to 3" in get(client, f"{path}/what_if?estimator=rloo&size=9", 404)["error"]
        assert "options must be JSON" in get(client, f"{path}/what_if?estimator=rloo&options=x", 400)["error"]
        assert get(client, f"{path}/tokens/3") == explain_command(run.path, step=2, trajectory=1, token=3)
        assert "tail" in str(get(client, f"/runs/{run_id(client)}/estimators")["estimators"]["tir_otb"])
    finally:
        calculator.close()
