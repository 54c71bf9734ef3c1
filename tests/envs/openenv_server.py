"""A server that keeps OpenEnv's wire, for tests: ``guess a number from 1 to 8``, by OpenEnv 0.10's messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

METADATA = {"type": "object", "title": "Metadata"}
SCHEMAS: dict[str, Any] = {
    "action": {"properties": {"metadata": METADATA, "guess": {"type": "string"}}, "required": ["guess"]},
    "observation": {
        "properties": {
            "done": {"type": "boolean"},
            "reward": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "metadata": METADATA,
            "hint": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "guesses": {"type": "integer"},
        }
    },
}


class GuessServer:
    """The server's state: how many sessions are open, and how many there have been at once."""

    def __init__(self, sessions: int = 64) -> None:
        self.sessions = sessions
        self.open = self.most = self.refused = 0
        self.resets: list[dict[str, Any]] = []
        self.closed: asyncio.Event = asyncio.Event()
        self.url = ""
        self.server: Server | None = None

    async def session(self, socket: ServerConnection) -> None:
        if self.open >= self.sessions:
            self.refused += 1
            data = {"message": "full", "code": "CAPACITY_REACHED", "active_sessions": self.open}
            await socket.send(json.dumps({"type": "error", "data": data | {"max_sessions": self.sessions}}))
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            number = 0
            async for text in socket:
                message = json.loads(text)
                if message["type"] == "close":
                    return
                if message["type"] == "reset":
                    self.resets.append(message["data"])
                    number = message["data"].get("number", 1 + message["data"]["seed"] % 8)
                await socket.send(json.dumps(self.answer(message, number)))
        finally:
            self.open -= 1
            self.closed.set()

    def answer(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        observation: dict[str, Any] = {"metadata": {}, "hint": "Guess from 1 to 8.", "guesses": 0}
        reward, done = None, False
        if message["type"] == "step":
            try:
                guess = int(message["data"]["guess"])
            except ValueError:
                errors = [{"msg": "not a number"}]
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
                return {"type": "error", "data": data}
            if guess == 0:
                return {"type": "state", "data": {}}
            done = guess == number
            reward = float(done)
            observation["hint"] = None if done else "higher" if guess < number else "lower"
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


@asynccontextmanager
async def guess_server(sessions: int = 64) -> AsyncIterator[GuessServer]:
    """A server on a free port, for as long as the context is open."""
    state = GuessServer(sessions)

    def schemas(_: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        status = HTTPStatus.OK if request.path == "/schema" else HTTPStatus.NOT_FOUND
        return Response(status, status.phrase, Headers({"Content-Length": str(len(BODY))}), BODY)

    async with serve(state.session, "127.0.0.1", 0, process_request=schemas) as server:
        state.server = server
        state.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        yield state


BODY = json.dumps(SCHEMAS).encode()
