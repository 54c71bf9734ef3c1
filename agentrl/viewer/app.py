"""The viewer's addresses: one page, its modules, and JSON about runs and evaluations. Nothing is ever written.

The page and its modules are public; everything under ``/api`` asks for the token of the address. Texts of trajectories
travel as JSON, and the page shows them as text nodes; its security policy forbids every script but its own.
"""

from __future__ import annotations

import secrets
import traceback
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
from agentrl.inspection.json_values import to_json
from agentrl.telemetry.metrics.catalogue import defined_metrics
from agentrl.telemetry.palette import palette_css
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.calculator import Calculator
from agentrl.viewer.evaluation_page import comparison_page, evaluation_page, evaluation_summary, rollout_page
from agentrl.viewer.library import Library
from agentrl.viewer.metrics_file import metrics_of
from agentrl.viewer.queries import QueryError, asked_steps, position_of, search_of, what_if_question, whole
from agentrl.viewer.run_facts import run_facts, run_summary
from agentrl.viewer.step_table import find_rows
from agentrl.viewer.trajectory_page import trajectory_page
from agentrl_envs.registry import describe_error

STATIC = Path(__file__).parent / "static"
SEARCH_SECONDS = 2.0  # a search of many steps answers after this time, and says where it goes on

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Inline styles are allowed because charts and tokens set colours. No content of a run is used as a style."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Answer = Callable[[Request], object]


def make_app(library: Library, *, token: str, calculator: Calculator) -> Starlette:
    """Return the ASGI application of the viewer. Every request for data must carry ``token``."""

    def page(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    api = [
        Route(f"/api{path}", _endpoint(answer, token))
        for path, answer in _Answers(library, calculator).by_path().items()
    ]
    return Starlette(
        routes=[
            Route("/", page),
            Route("/palette.css", lambda _request: Response(palette_css(), media_type="text/css")),
            *api,
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(_Headers),
            Middleware(GZipMiddleware, minimum_size=2_000, compresslevel=1),
        ],
    )


class _Answers:
    """What the addresses answer with."""

    def __init__(self, library: Library, calculator: Calculator) -> None:
        self._library = library
        self._calculator = calculator

    def by_path(self) -> Mapping[str, Answer]:
        """The answer of each path."""
        trajectory = "/runs/{id}/steps/{step:int}/{number:int}"
        return {
            "/places": self.places,
            "/metrics": lambda _request: defined_metrics(),
            "/runs/{id}": lambda request: run_facts(self._run(request)),
            "/runs/{id}/series": self.series,
            "/runs/{id}/trajectories": self.trajectories,
            "/runs/{id}/estimators": lambda request: self._calculated(request, {"ask": "estimators"}),
            trajectory: self.trajectory,
            f"{trajectory}/what_if": self.what_if,
            f"{trajectory}/tokens/{{token:int}}": self.explanation,
            "/evaluations/{id}": lambda request: evaluation_page(self._evaluation(request)),
            "/evaluations/{id}/{place:int}": lambda request: rollout_page(
                self._evaluation(request), request.path_params["place"]
            ),
            "/comparisons/{first}/{second}": lambda request: comparison_page(
                self._evaluation(request, "first"), self._evaluation(request, "second")
            ),
        }

    def places(self, _request: Request) -> object:
        """Return all runs (:func:`run_summary`) and evaluations. Unreadable ones have only the field ``problem``."""
        found = {"run": list[object](), "evaluation": list[object]()}
        for place in self._library.places():
            try:
                is_run = place.kind == "run"
                about = run_summary(RunDirectory(place.path)) if is_run else evaluation_summary(place.path)
                to_json(about)  # raises here, not for the whole list
            except Exception as error:  # noqa: BLE001  (a run that cannot be read must not hide the others)
                about = {"problem": str(error) if isinstance(error, AgentRLError) else describe_error(error)}
            found[place.kind].append({"id": place.id, "name": place.name, **about})
        return {"runs": found["run"], "evaluations": found["evaluation"]}

    def series(self, request: Request) -> object:
        """Return the curves of a run (:meth:`MetricsColumns.series`). The query may repeat ``names``."""
        run, given = self._run(request), request.query_params
        return metrics_of(run.metrics_file, run.path).series(
            names=given.getlist("names"),
            points=min(max(whole(given, "points") or 800, 2), 10_000),
            since=given.get("since", ""),
        )

    def trajectories(self, request: Request) -> object:
        run, given = self._run(request), request.query_params
        steps = asked_steps(run.trajectory_steps(), given)
        if len(steps) == 1:
            run.check_stored(steps[0])
        start = position_of(given.get("after", "0:0"))
        limit = min(whole(given, "limit") or 1_000, 5_000)
        found = find_rows(run, steps, search_of(given), start=start, limit=limit, seconds=SEARCH_SECONDS)
        return {**vars(found), "next": None if found.next is None else "{}:{}".format(*found.next)}

    def trajectory(self, request: Request) -> object:
        return trajectory_page(self._run(request), request.path_params["step"], request.path_params["number"])

    def what_if(self, request: Request) -> object:
        return self._calculated(request, {**_named(request), **what_if_question(request.query_params)})

    def explanation(self, request: Request) -> object:
        return self._calculated(request, {"ask": "explain", **_named(request), "token": request.path_params["token"]})

    def _calculated(self, request: Request, question: dict[str, object]) -> object:
        return self._calculator.ask(self._run(request).path, question)

    def _run(self, request: Request) -> RunDirectory:
        return self._library.run(request.path_params["id"])

    def _evaluation(self, request: Request, name: str = "id") -> Path:
        return self._library.evaluation(request.path_params[name])


def _named(request: Request) -> dict[str, object]:
    """The trajectory that the path names."""
    return {"step": request.path_params["step"], "trajectory": request.path_params["number"]}


def _endpoint(answer: Answer, token: str) -> Callable[[Request], Response]:
    """Answer requests in Starlette's threads. Every failure becomes one message, which the page shows."""

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
        except Exception as error:  # noqa: BLE001  (a damaged file or a bug: the page shows the error, the terminal its traceback)
            traceback.print_exc()
            return _json({"error": f"{request.url.path} cannot be answered: {describe_error(error)}"}, 500)

    return endpoint


def _json(value: object, status: int) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")


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
