"""The real command with an endpoint over HTTP: interrupted, resumed, compared and regraded."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from warm import WarmPopen, run_warm

from agentrl.evaluation.transcripts import read_rollouts

pytestmark = pytest.mark.slow

NUMBER = re.compile(r"What is (\d+) \+ (\d+)\?")


class Endpoint:
    """HTTP server of one model that adds with a program. Rejects every fifth request with a Retry-After header."""

    def __init__(self) -> None:
        self.requests = 0
        self.conversations: list[list[dict[str, str]]] = []
        self.pause = 0.0
        self.reply = reply
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                """Log nothing."""

            def do_GET(self) -> None:
                self._send(200, "application/json", json.dumps({"data": [{"id": "adder"}]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                endpoint.requests += 1
                if endpoint.requests % 5 == 0:
                    self._send(429, "application/json", '{"error": "slow down"}', **{"Retry-After": "0.05"})
                    return
                endpoint.conversations.append(body["messages"])
                time.sleep(endpoint.pause)
                text = endpoint.reply(body["messages"])
                events = [
                    *({"choices": [{"delta": {"content": piece}}]} for piece in re.findall(r"(?s).{1,7}", text)),
                    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
                ]
                data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
                self._send(200, "text/event-stream", data)

            def _send(self, status: int, kind: str, text: str, **headers: str) -> None:
                data = text.encode()
                self.send_response(status)
                for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore errors of clients that the test kills."""

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


def reply(messages: list[dict[str, str]]) -> str:
    """Return a program in the first turn, then its output in a box. The answer to problem 3 is wrong."""
    found = NUMBER.search(messages[0]["content"])
    if found is None:
        return "Hello"
    if len(messages) == 1:
        return f"Let me add.\n```python\nprint({found[1]} + {found[2]})\n```\nnever read"
    shown = messages[-1]["content"].split("Code execution result:")[1].strip()
    return f"It is \\boxed{{{-1 if found[1] == '3' else shown}}}."


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint()
    thread = threading.Thread(target=served.server.serve_forever, daemon=True)
    thread.start()
    yield served
    served.server.shutdown()
    served.server.server_close()
    thread.join()


def write_problems(folder: Path) -> Path:
    rows = [{"id": f"q{n}", "problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(30)]
    (folder / "aime24.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def agentrl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli", *arguments]


def test_an_endpoint_is_evaluated_through_a_kill(endpoint: Endpoint, tmp_path: Path) -> None:
    data = write_problems(tmp_path)
    command = agentrl("eval", "--base-url", endpoint.url, "--benchmarks", "aime24", "--data-dir", str(data), "--n", "2")
    command += ["--output", "out", "evaluation.endpoint.concurrency=4", "telemetry.plots=false"]
    log = tmp_path / "out" / "rollouts.jsonl.zst"
    endpoint.pause = 0.2
    with WarmPopen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 120
        while not log.exists() or sum(1 for _ in read_rollouts(log)) < 5:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout.read().decode()  # type: ignore[union-attr]
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    finished = {transcript.key for transcript in read_rollouts(log)}
    asked = len(endpoint.conversations)
    endpoint.pause = 0.0
    done = run_warm(command, cwd=tmp_path, stderr=subprocess.PIPE, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    transcripts = list(read_rollouts(log))
    assert len({one.key for one in transcripts}) == len(transcripts) == 60
    assert len(endpoint.conversations) - asked == 2 * (60 - len(finished)) + 1  # two turns each, and the first probe
    one = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["aime24"]
    assert one["avg"]["mean"] == pytest.approx(29 / 30)
    assert one["per_problem"]["q3"] == {"samples": 2, "correct": 0}
    assert (one["tool_calls"]["outcomes"], one["ended"], one["turns"]) == ({"ok": 60}, {"answered": 60}, 2)
    assert [(turn.origin, turn.text) for turn in transcripts[0].turns[:1]] == [
        ("model", f"Let me add.\n```python\nprint({transcripts[0].problem[1:]} + {transcripts[0].problem[1:]})\n```")
    ]
    assert "Scores (adder)" in done.stdout
    assert (tmp_path / "out" / "report.html").is_file()

    for arguments, said in ((["compare", "out", "out"], "+0.000"), (["regrade", "out"], "no verdict changed")):
        done = run_warm(agentrl(*arguments), cwd=tmp_path, stderr=subprocess.PIPE, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout
    done = run_warm([*command, "seed=1"], cwd=tmp_path, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2
    assert "seed: 0 -> 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_endpoint_that_is_down_is_said_after_its_retry_deadline(tmp_path: Path) -> None:
    data = write_problems(tmp_path)
    command = agentrl("eval", "--base-url", "http://127.0.0.1:9/v1", "--benchmarks", "aime24", "--data-dir", str(data))
    done = subprocess.run(
        [*command, "evaluation.endpoint.retry_deadline=0.2"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "error: the endpoint http://127.0.0.1:9/v1 is not available: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "evaluations").exists()


def test_an_endpoint_that_writes_half_characters_is_evaluated(endpoint: Endpoint, tmp_path: Path) -> None:
    """The halves of one character arrive in two events, and the answer contains a lone half."""
    data = write_problems(tmp_path)
    endpoint.reply = lambda messages: "six by\ud83d\ude00 \\boxed{\ud83d}"
    command = agentrl("eval", "--base-url", endpoint.url, "--benchmarks", "aime24", "--data-dir", str(data), "--n", "1")
    command += ["--output", "out", "telemetry.plots=false"]
    done = run_warm(command, cwd=tmp_path, stderr=subprocess.PIPE, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = list(read_rollouts(tmp_path / "out" / "rollouts.jsonl.zst"))
    assert {one.turns[0].text for one in stored} == {"six by\U0001f600 \\boxed{\ufffd}"}
