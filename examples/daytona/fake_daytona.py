"""A local fake of the parts of Daytona's HTTP API that the plug-in uses."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web


class FakeDaytona:
    """Server that creates and deletes fake sandboxes. Commands run on this machine."""

    def __init__(self) -> None:
        self.alive: dict[str, dict[str, Any]] = {}
        self.created = 0
        self.fails = False
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.post("/api/sandbox", self._create),
                web.get("/api/sandbox/{id}", self._get),
                web.delete("/api/sandbox/{id}", self._delete),
                web.post("/toolbox/{id}/process/execute", self._execute),
                web.route("*", "/{path:.*}", self._other),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _create(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != "Bearer key":
            return web.json_response({"message": "unauthorized", "statusCode": 401}, status=401)
        if self.fails:
            return web.json_response({"message": "no capacity", "statusCode": 400}, status=400)
        wanted = await request.json()
        self.created += 1
        name = f"sandbox-{self.created}"
        self.alive[name] = {
            "id": name, "organizationId": "o", "name": name, "user": "daytona", "env": {}, "labels": wanted["labels"],
            "public": False, "networkBlockAll": wanted["networkBlockAll"], "kvm": False, "target": "eu", "cpu": 1,
            "gpu": 0, "memory": 1, "disk": 1, "state": "started", "toolboxProxyUrl": f"{self.url}/toolbox",
            "snapshot": wanted.get("snapshot"),
        }  # fmt: skip
        return web.json_response(self.alive[name])

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self.alive[request.match_info["id"]])

    async def _delete(self, request: web.Request) -> web.Response:
        gone = self.alive.pop(request.match_info["id"])
        return web.json_response({**gone, "state": "destroyed"})

    async def _execute(self, request: web.Request) -> web.Response:
        assert request.match_info["id"] in self.alive
        command = (await request.json())["command"]
        process = await asyncio.create_subprocess_shell(command, stdout=-1, stderr=asyncio.subprocess.STDOUT)
        out, _ = await process.communicate()
        return web.json_response({"exitCode": process.returncode, "result": out.decode()})

    async def _other(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "not found", "statusCode": 404}, status=404)
