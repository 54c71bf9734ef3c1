"""A server that speaks vLLM's HTTP as far as the engine uses it, and misbehaves on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.vllm.plan import WORKER_EXTENSION

Answer = tuple[int, Any]


class FakeVLLM:
    """Samples ``seed + 1, seed + 2, ...`` modulo 100 with log-probability -0.5, without ever an end of its own.

    ``on_generate`` may answer instead: a status with a body, None for the ordinary answer; it may raise ConnectionError
    to break the connection, or wait. ``scores`` gives the log-probability of a prompt's token at a place.
    """

    def __init__(self, codec: TextCodec, *, vocabulary: int = 257) -> None:
        self.codec = codec
        self.vocabulary = vocabulary
        self.version = "default"
        self.checksums: dict[str, tuple[int, int]] | None = None  # None: a server without our extension
        self.loaded: list[str] = []
        self.adapters: dict[str, str] | None = None  # None: a server that takes none
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.broken = 0
        self.controls = self.scale_out = self.caching = self.tokenizes = True
        self.device, self.chunks = "cuda", True
        self.dtype = "torch.float32"
        self.hf_overrides: dict[str, Any] = {}
        self.logprobs_mode = "processed_logprobs"
        self.max_model_len = 4096
        self.awake = asyncio.Event()
        self.awake.set()
        self.says: dict[str, Any] = {}  # what a path answers instead
        self.metrics = ""
        self.answering = True  # False: connections stay open and nothing comes
        self.on_generate: Callable[[dict[str, Any]], Any] = lambda body: None
        self.scores: Callable[[str, int], float] = lambda version, place: -1.0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Close the port and every connection, as a killed process does."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.sleep(0)

    def controls_called(self) -> list[str]:
        """The calls that change something, in order."""
        return [call for call in self.calls if call.split("?")[0] not in _LOOKS]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode().split("\r\n")[0].split(" ")
                length = next((int(line.split(":")[1]) for line in head.decode().lower().split("\r\n")
                               if line.startswith("content-length:")), 0)  # fmt: skip
                body = json.loads(await reader.readexactly(length)) if length else {}
                status, answer = await self._watched(reader, self._answer(method, path, body))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _watched(self, reader: asyncio.StreamReader, work: Any) -> Answer:
        """The answer, unless the client goes first."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            self.broken += 1
            task.cancel()
            raise ConnectionResetError
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        return task.result()

    async def _answer(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        self.calls.append(path)
        if not self.answering:
            await asyncio.Event().wait()
        name, _, query = path.partition("?")
        if name in self.says:
            return 200, self.says[name]
        if name == "/inference/v1/generate":
            return await self._generate(body)
        if name == "/health":
            return 200, b""
        if name == "/metrics":
            return (200, self.metrics.encode()) if self.metrics else (404, b"no")
        if name == "/version":
            return 200, {"version": "0.32.0"}
        if name == "/tokenize":
            return (200, {"tokens": list(self.codec.encode(body["prompt"]))}) if self.tokenizes else (404, b"no")
        if not self.controls:
            return 404, {"detail": "Not Found"}
        return self._control(name, query, body)

    def _control(self, name: str, query: str, body: dict[str, Any]) -> Answer:
        match name:
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/server_info":
                model = {"model": "m", "logprobs_mode": self.logprobs_mode, "max_model_len": self.max_model_len}
                model |= {"dtype": self.dtype, "hf_overrides": self.hf_overrides}
                return 200, {
                    "vllm_config": {
                        "model_config": model,
                        "cache_config": {"enable_prefix_caching": self.caching},
                        "scheduler_config": {"enable_chunked_prefill": self.chunks},
                        "device_config": {"device": self.device},
                        "lora_config": None if self.adapters is None else {"max_lora_rank": 8},
                        "parallel_config": {"worker_extension_cls": "" if self.checksums is None else WORKER_EXTENSION},
                    }
                }
            case "/v1/models":
                return 200, {"data": [{"id": name} for name in ("policy", *(self.adapters or ()))]}
            case "/v1/load_lora_adapter" if self.adapters is not None and body["lora_name"] not in self.adapters:
                self.adapters[body["lora_name"]] = body["lora_path"]
                return 200, b"Success"
            case "/v1/unload_lora_adapter" if self.adapters is not None:
                del self.adapters[body["lora_name"]]
                return 200, b"Success"
            case "/v1/load_lora_adapter":
                return 404, {"detail": "Not Found"}
            case "/get_world_size":
                return 200, {"world_size": 2}
            case "/pause" | "/sleep":
                self.awake.clear()
            case "/resume":
                self.awake.set()
            case "/collective_rpc" if body["method"] == "agentrl_checksums":
                return 200, {"results": [self.checksums]}
            case "/collective_rpc":
                self.loaded.append(body["kwargs"]["weights_path"])
        return 200, {"success": True}

    async def _generate(self, body: dict[str, Any]) -> Answer:
        if not self.scale_out:
            return 403, {"error": {"message": "Scale-out endpoints are disabled."}}
        if max(body["token_ids"]) >= self.vocabulary:
            return 400, {"error": {"message": "Token id is out of vocabulary"}}
        parameters = body["sampling_params"]
        if "prompt_logprobs" in parameters:
            ids = body["token_ids"]
            entries = [{str(token): {"logprob": self.scores(self.version, i)}} for i, token in enumerate(ids[1:])]
            return 200, {"prompt_logprobs": [None, *entries], "choices": [sampled([1], version=self.version)]}
        self.bodies.append(body)
        await self.awake.wait()
        answer = self.on_generate(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer is not None:
            return answer
        first = parameters.get("seed", 0) + 1
        tokens = [(first + i) % 100 for i in range(parameters["max_tokens"])]
        return 200, {"choices": [sampled(tokens, version=self.version)]}


_LOOKS = {
    "/health", "/metrics", "/version", "/tokenize", "/weight_info", "/server_info", "/get_world_size",
    "/inference/v1/generate",
}  # fmt: skip


def sampled(tokens: list[int], *, version: str = "0", reason: str = "length", **changes: Any) -> dict[str, Any]:
    """A choice as vLLM writes it."""
    return {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": tokens,
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5, "rank": 1} for token in tokens]},
        **changes,
    }


@asynccontextmanager
async def fakes(codec: TextCodec, count: int = 1) -> AsyncIterator[list[FakeVLLM]]:
    """So many servers that answer."""
    made = [FakeVLLM(codec) for _ in range(count)]
    for one in made:
        await one.start()
    try:
        yield made
    finally:
        for one in made:
            await one.die()
