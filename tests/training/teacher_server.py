"""A server that scores the token ids of a teacher, as vLLM's does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


class TeacherServer(ThreadingHTTPServer):
    def __init__(self, model: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.model = model

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    """Scores prompts in vLLM's format. The first request to every server fails."""

    server: TeacherServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        failed = len(self.server.requests) == 1
        body = json.dumps({"error": {"message": "busy"}} if failed else self.answer(request)).encode()
        self.send_response(503 if failed else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @torch.no_grad()
    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        ids, top = torch.tensor([request["prompt"]]), request["prompt_logprobs"]
        log_p = torch.log_softmax(self.server.model(input_ids=ids).logits[0, :-1], dim=-1)
        entries: list[Any] = [None]
        for row, token in zip(log_p, request["prompt"][1:], strict=True):
            shown = {*row.topk(top).indices.tolist(), token}
            entries.append({str(one): {"logprob": float(row[one]), "rank": 1} for one in shown})
        return {"choices": [{"prompt_logprobs": entries}]}

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def serve_teacher(model: Any) -> Iterator[TeacherServer]:
    """Serve ``model`` in threads of this process."""
    with TeacherServer(model) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
