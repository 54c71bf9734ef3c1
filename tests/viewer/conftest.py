"""A generated run, and a client of the viewer that serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient
from viewer.made_run import HOSTILE, make_run

from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.app import make_app
from agentrl.viewer.runs import RunLibrary
from agentrl.viewer.serve import CalculationClient

TOKEN = "secret"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("runs") / "first", said=f"{HOSTILE}\n")


@pytest.fixture(scope="module")
def client(run: RunDirectory) -> TestClient:
    return client_of(run.path.parent)


def client_of(*paths: Path) -> TestClient:
    app = make_app(RunLibrary(paths), token=TOKEN, calculate=CalculationClient().request)
    return TestClient(app, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {TOKEN}"})
