"""The rollouts of a stored run, and `Run.push_to_hub` against a local endpoint."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl.api.run import Run
from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.trajectory import Segment, Trajectory
from agentrl_envs.types import Ended, Problem


class Hub(ThreadingHTTPServer):
    """The calls of huggingface_hub that create a repository and commit small files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}
        self.summary = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer secret":
            self._answer(401, {"error": "Invalid token"})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(200, {"url": f"{self.server.url}/owner/name"})
        elif self.path == "/api/models/owner/name/preupload/main":
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self._answer(200, {"files": [{**one, "shouldIgnore": False} for one in files]})
        elif self.path == "/api/models/owner/name/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.server.summary = line["value"]["summary"]
                else:
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(200, {"commitOid": "1" * 40, "commitUrl": f"{self.server.url}/owner/name/commit/{'1' * 40}"})
        else:  # the check of a model card
            self._answer(200, {"errors": [], "warnings": []})

    def _answer(self, status: int, content: object) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    policy = tmp_path / "sums" / "policy"
    policy.mkdir(parents=True)
    (policy / "README.md").write_text("# sums\n")
    (policy / "model.safetensors").write_bytes(b"weights")
    return Run(tmp_path / "sums")


def branch(number: int, of: int, *, sample: int, reward: float) -> Trajectory:
    said = Segment(
        origin="model",
        token_ids=(7,),
        log_probs=(-0.5,),
        version_spans=((0, 1),),
        text=f"branch {number}",
        reward=reward if number == of - 1 else 0.0,
    )
    return Trajectory(
        problem=Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy"),
        step=1,
        group=0,
        sample=sample,
        prompt_ids=(9,),
        segments=(said,),
        ended=Ended.STOPPED,
        branch=number,
        branches=of,
        weight=1 / of,
        reward_elsewhere=0.0 if number == of - 1 else reward,
    )


def test_a_rollout_has_all_its_branches(run: Run) -> None:
    stored = [
        branch(0, 2, sample=0, reward=1.0),
        branch(1, 2, sample=0, reward=1.0),
        branch(0, 1, sample=1, reward=0.5),
    ]
    files = RunDirectory(run.path)
    files.trajectories.mkdir()
    files.write_trajectories(1, [item.to_record() for item in stored])
    first, second = run.rollouts(1)
    assert first.trajectories == tuple(stored[:2])
    assert (first.reward, first.model_tokens, first.excluded, first.ended) == (1.0, 2, False, Ended.STOPPED)
    assert second.trajectories == tuple(stored[2:])
    assert second.problem.statement == "2 + 3?"
    assert str(first).index("branch 0") < str(first).index("branch 1")
    with pytest.raises(SettingsError, match="no trajectories of step 2"):
        next(run.rollouts(2))


def test_the_policy_is_uploaded(run: Run, hub: Hub) -> None:
    url = run.push_to_hub("owner/name", private=True, token="secret", endpoint=hub.url)
    assert url == f"{hub.url}/owner/name/commit/{'1' * 40}"
    assert hub.files == {"README.md": b"# sums\n", "model.safetensors": b"weights"}
    assert hub.summary == "Policy of the agentrl run sums"
    (created,) = hub.created
    assert created["name"] == "name"
    assert created["organization"] == "owner"


def test_what_prevents_an_upload_is_named(run: Run, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"cannot upload .*sums/policy to owner/name: .*401"):
        run.push_to_hub("owner/name", token="wrong", endpoint=hub.url)
    with pytest.raises(SettingsError, match="repo_id='no name!'"):
        run.push_to_hub("no name!", token="secret", endpoint=hub.url)
    with pytest.raises(SettingsError, match="has not finished"):
        Run(tmp_path).push_to_hub("owner/name", token="secret", endpoint=hub.url)
    assert hub.created == []
