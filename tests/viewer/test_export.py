"""Export of a run as one page: packed content, and one message if the page cannot be written."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from viewer.test_api import get, run_id

from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.export import bundle_scripts, export_run_page
from agentrl.viewer.serve import export_command


def answers(page: str) -> dict[str, object]:
    found = re.findall(r'<script type="text/plain" data-answer="([^"]+)">([\w+/=]+)</script>', page)
    return {address: json.loads(gzip.decompress(base64.b64decode(packed))) for address, packed in found}


def test_the_page_holds_what_the_server_answers(client: TestClient, run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    export_run_page(run, out, steps=[2], groups=1)
    page = out.read_text(encoding="utf-8")
    held = answers(page)
    own = f"/runs/{run_id(client)}"
    assert [address for address in held if "/steps/" in address] == [f"/runs/run/steps/2/{n}" for n in range(4)]
    assert held["/runs/run/steps/2/1"] == get(client, f"{own}/steps/2/1")
    assert held["/runs/run/series"] == get(client, f"{own}/series")
    assert page.count("<script") - page.count('<script type="text/plain"') - page.count("<script>") == 0
    assert "onerror=alert" not in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page[: page.index("<script>")])


def test_what_cannot_be_exported_is_said_in_one_message(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page.html"
    with pytest.raises(SettingsError, match=r"no trajectories of step 9; stored steps: 1 to 3"):
        export_run_page(run, out, steps=[9])
    with pytest.raises(SettingsError, match="--export requires exactly one run"):
        export_command([run.path.parent], out, steps=[], groups=None, echo=print)
    with pytest.raises(SettingsError, match="add --export"):
        export_command([run.path], None, steps=[1], groups=None, echo=print)
    monkeypatch.setattr("agentrl.viewer.export._LARGEST_RUN", 50_000)
    with pytest.raises(SettingsError, match="the page exceeds 0 MB; choose fewer steps"):
        export_run_page(run, out)
    assert not list(tmp_path.iterdir())


def test_modules_are_put_in_order_and_others_refused(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text('import { b } from "./b.js";\nconsole.log(b());\n')
    (tmp_path / "b.js").write_text("export const c = 1;\nexport function b() { return c; }\n")
    made = bundle_scripts(tmp_path, "a.js")
    assert made.index('modules["b.js"]') < made.index('modules["a.js"]')
    assert "return { c, b };" in made
    (tmp_path / "b.js").write_text("export default 1;\n")
    with pytest.raises(ValueError, match=r"b\.js has an import or export"):
        bundle_scripts(tmp_path, "a.js")
