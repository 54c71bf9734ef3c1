"""The viewer's addresses: one page, its modules, and JSON about runs and evaluations. Nothing is ever written.

The page and its modules are public; everything under ``/api`` asks for the token of the address. Texts of trajectories
travel as JSON, and the page shows them as text nodes; its security policy forbids every script but its own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import AgentRLError, SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.evaluation_page import evaluation_page, evaluation_summary, rollout_page
from agentrl.viewer.library import Library
from agentrl.viewer.metrics_file import read_new_rows
from agentrl.viewer.run_facts import run_facts, run_summary
from agentrl.viewer.step_table import Search, find_rows
from agentrl.viewer.trajectory_page import trajectory_page

STATIC = Path(__file__).parent / "static"
SEARCH_SECONDS = 2.0  # a search of many steps answers after this time, and says where it goes on

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Styles may stand in elements because the charts' library writes them there; no content of a run becomes a style."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Answer = Callable[[Request], object]


def make_app(library: Library, *, token: str, charts: Path) -> Starlette:
    """The application. ``charts``: the file of the charts' library, served as it was installed."""

    def chart_library(_request: Request) -> Response:
        return FileResponse(charts, media_type="text/javascript", headers={"cache-control": "max-age=86400"})

    def page(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    api = [Route(f"/api{path}", _endpoint(answer, token)) for path, answer in _answers(library).items()]
    return Starlette(
        routes=[
            Route("/", page),
            Route("/plotly.min.js", chart_library),
            *api,
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(_Headers),
            Middleware(GZipMiddleware, minimum_size=2_000, compresslevel=1),
        ],
    )


def _answers(library: Library) -> Mapping[str, Answer]:
    """What each address answers with."""

    def places(_request: Request) -> object:
        found = {"run": list[object](), "evaluation": list[object]()}
        for place in library.places():
            try:
                is_run = place.kind == "run"
                about = run_summary(RunDirectory(place.path)) if is_run else evaluation_summary(place.path)
            except (AgentRLError, OSError) as error:
                about = {"problem": str(error)}
            found[place.kind].append({"id": place.id, "name": place.name, **about})
        return {"runs": found["run"], "evaluations": found["evaluation"]}

    def metrics(request: Request) -> object:
        run = library.run(request.path_params["id"])
        found = read_new_rows(run.metrics_file, request.query_params.get("position", ""))
        return vars(found)

    def trajectories(request: Request) -> object:
        run = library.run(request.path_params["id"])
        steps = _asked_steps(run.trajectory_steps(), request)
        if len(steps) == 1:
            run.check_stored(steps[0])
        start = _position(request.query_params.get("after", "0:0"))
        limit = min(_whole(request, "limit") or 1_000, 5_000)
        found = find_rows(run, steps, _search(request), start=start, limit=limit, seconds=SEARCH_SECONDS)
        return {**vars(found), "next": None if found.next is None else "{}:{}".format(*found.next)}

    def trajectory(request: Request) -> object:
        place = request.path_params
        return trajectory_page(library.run(place["id"]), place["step"], place["number"])

    return {
        "/places": places,
        "/runs/{id}": lambda request: run_facts(library.run(request.path_params["id"])),
        "/runs/{id}/metrics": metrics,
        "/runs/{id}/trajectories": trajectories,
        "/runs/{id}/steps/{step:int}/{number:int}": trajectory,
        "/evaluations/{id}": lambda request: evaluation_page(library.evaluation(request.path_params["id"])),
        "/evaluations/{id}/{place:int}": lambda request: rollout_page(
            library.evaluation(request.path_params["id"]), request.path_params["place"]
        ),
    }


def _endpoint(answer: Answer, token: str) -> Callable[[Request], Response]:
    """Answers in a thread of starlette's; the errors of files and of what was asked are one message each."""

    def endpoint(request: Request) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), token.encode()):
            return _json({"error": "the address lacks its token: open the one that `agentrl view` printed"}, 401)
        try:
            return _json(answer(request), 200)
        except SettingsError as error:
            return _json({"error": str(error)}, 404)
        except (AgentRLError, OSError) as error:
            return _json({"error": str(error)}, 503)
        except _QueryError as error:
            return _json({"error": str(error)}, 400)

    return endpoint


def _json(value: object, status: int) -> Response:
    # Texts may hold lone surrogates, which UTF-8 cannot express and JSON's escapes can.
    return Response(json.dumps(value, separators=(",", ":")), status_code=status, media_type="application/json")


class _QueryError(ValueError):
    """An address whose query has a value that cannot be read."""


def _search(request: Request) -> Search:
    given = request.query_params
    return Search(
        text=given.get("text", ""),
        problem=given.get("problem", ""),
        ended=given.get("ended", ""),
        verdict=given.get("verdict", ""),
        tool=given.get("tool", ""),
        dropped=given.get("dropped", ""),
        group=_whole(request, "group"),
        least_reward=_number(request, "least_reward"),
        most_reward=_number(request, "most_reward"),
        least_turns=_whole(request, "least_turns"),
        most_turns=_whole(request, "most_turns"),
        least_staleness=_whole(request, "least_staleness"),
    )


def _asked_steps(stored: list[int], request: Request) -> list[int]:
    """The stored steps from ``first`` to ``last``; a single step is asked for even where it is not stored."""
    first, last = _whole(request, "first"), _whole(request, "last")
    if first is not None and first == last:
        return [first]
    return [step for step in stored if (first is None or step >= first) and (last is None or step <= last)]


def _position(text: str) -> tuple[int, int]:
    step, _, number = text.partition(":")
    if not (step.isdigit() and number.isdigit()):
        raise _QueryError(f"after={text!r} is not STEP:NUMBER")
    return int(step), int(number)


def _whole(request: Request, name: str) -> int | None:
    value = _number(request, name)
    return None if value is None else int(value)


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    try:
        return float(text) if text else None
    except ValueError as error:
        raise _QueryError(f"{name}={text!r} is not a number") from error


class _Headers:
    """Adds the security headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in given)]
            await send(message)

        await self._app(scope, receive, send_with_headers)
