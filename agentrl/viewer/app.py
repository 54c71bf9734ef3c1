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
from agentrl.viewer.calculator import Calculator
from agentrl.viewer.evaluation_page import comparison_page, evaluation_page, evaluation_summary, rollout_page
from agentrl.viewer.library import Library
from agentrl.viewer.metrics_file import read_new_rows
from agentrl.viewer.queries import QueryError, asked_steps, position_of, search_of, what_if_question, whole
from agentrl.viewer.run_facts import run_facts, run_summary
from agentrl.viewer.step_table import find_rows
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


def make_app(library: Library, *, token: str, charts: Path, calculator: Calculator) -> Starlette:
    """The application. ``charts``: the file of the charts' library, served as it was installed."""

    def chart_library(_request: Request) -> Response:
        return FileResponse(charts, media_type="text/javascript", headers={"cache-control": "max-age=86400"})

    def page(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    api = [Route(f"/api{path}", _endpoint(answer, token)) for path, answer in _answers(library, calculator).items()]
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


def _answers(library: Library, calculator: Calculator) -> Mapping[str, Answer]:
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
        run, given = library.run(request.path_params["id"]), request.query_params
        steps = asked_steps(run.trajectory_steps(), given)
        if len(steps) == 1:
            run.check_stored(steps[0])
        start = position_of(given.get("after", "0:0"))
        limit = min(whole(given, "limit") or 1_000, 5_000)
        found = find_rows(run, steps, search_of(given), start=start, limit=limit, seconds=SEARCH_SECONDS)
        return {**vars(found), "next": None if found.next is None else "{}:{}".format(*found.next)}

    def trajectory(request: Request) -> object:
        place = request.path_params
        return trajectory_page(library.run(place["id"]), place["step"], place["number"])

    def estimators(request: Request) -> object:
        return calculator.ask(library.run(request.path_params["id"]).path, {"ask": "estimators"})

    def what_if(request: Request) -> object:
        place = request.path_params
        question = {"step": place["step"], "trajectory": place["number"], **what_if_question(request.query_params)}
        return calculator.ask(library.run(place["id"]).path, question)

    def explanation(request: Request) -> object:
        place = request.path_params
        names = {"step": place["step"], "trajectory": place["number"], "token": place["token"]}
        return calculator.ask(library.run(place["id"]).path, {"ask": "explain", **names})

    return {
        "/places": places,
        "/runs/{id}": lambda request: run_facts(library.run(request.path_params["id"])),
        "/runs/{id}/metrics": metrics,
        "/runs/{id}/trajectories": trajectories,
        "/runs/{id}/steps/{step:int}/{number:int}": trajectory,
        "/runs/{id}/steps/{step:int}/{number:int}/tokens/{token:int}": explanation,
        "/runs/{id}/steps/{step:int}/{number:int}/what_if": what_if,
        "/runs/{id}/estimators": estimators,
        "/evaluations/{id}": lambda request: evaluation_page(library.evaluation(request.path_params["id"])),
        "/comparisons/{first}/{second}": lambda request: comparison_page(
            library.evaluation(request.path_params["first"]), library.evaluation(request.path_params["second"])
        ),
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
        except QueryError as error:
            return _json({"error": str(error)}, 400)

    return endpoint


def _json(value: object, status: int) -> Response:
    # Texts may hold lone surrogates, which UTF-8 cannot express and JSON's escapes can.
    return Response(json.dumps(value, separators=(",", ":")), status_code=status, media_type="application/json")


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
