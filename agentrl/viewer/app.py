"""Web application of the viewer: one page, its modules, and JSON about runs and evaluations. Writes no files.

The page and its modules are public. Everything under ``/api`` requires the token in the address. Texts of trajectories
are sent as JSON and displayed as text nodes. The page's security policy forbids all other scripts.
"""

from __future__ import annotations

import json
import secrets
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from agentrl.errors import AgentRLError, SettingsError
from agentrl.telemetry.metrics import describe_built_in_metrics
from agentrl.telemetry.plots import palette_css
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.evaluations import (
    comparison_page,
    read_evaluation_page,
    read_evaluation_summary,
    read_rollout_page,
    search_rollouts,
)
from agentrl.viewer.export import STATIC
from agentrl.viewer.metrics_file import cached_metrics_columns
from agentrl.viewer.run_files import to_json
from agentrl.viewer.runs import RunLibrary, read_run_page, read_run_summary
from agentrl.viewer.trajectories import SearchConditions, read_trajectory_page, search_rows
from agentrl_envs.registry import describe_error

Query = Mapping[str, str]


class QueryError(ValueError):
    """Raised if a query contains an invalid value."""


def parse_search(query: Query) -> SearchConditions:
    """Parse the search conditions in a query."""
    conditions = {
        item.name: optional_float(query, item.name) if item.default is None else query.get(item.name, "")
        for item in fields(SearchConditions)
    }
    return SearchConditions(**conditions)  # type: ignore[arg-type]


def select_requested_steps(stored: list[int], query: Query) -> list[int]:
    """Return the stored steps from ``first`` to ``last``, or a single requested step even if it is not stored."""
    first, last = optional_int(query, "first"), optional_int(query, "last")
    if first is not None and first == last:
        return [first]
    return [step for step in stored if (first is None or step >= first) and (last is None or step <= last)]


def parse_position(text: str) -> tuple[int, int]:
    step, _, number = text.partition(":")
    if not (step.isdigit() and number.isdigit()):
        raise QueryError(f"after must be STEP:NUMBER; got {text!r}")
    return int(step), int(number)


def optional_int(query: Query, name: str) -> int | None:
    value = optional_float(query, name)
    return None if value is None else int(value)


def optional_float(query: Query, name: str) -> float | None:
    text = query.get(name, "")
    try:
        return float(text) if text else None
    except ValueError as error:
        raise QueryError(f"{name} must be a number; got {text!r}") from error


SEARCH_SECONDS = 2.0  # time limit of a search; its response contains the position at which to continue

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy. Inline styles are allowed: charts and tokens set colours with them."""

SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Handler = Callable[[Request], object]
Calculate = Callable[[Path, dict[str, object]], object]
"""Function from a run's path and a request of `agentrl.viewer.calculations` to the result."""


def make_app(library: RunLibrary, *, token: str, calculate: Calculate) -> Starlette:
    """Build the ASGI application of the viewer. Requests for data must contain ``token``.

    ``calculate`` handles the requests that need torch (:class:`agentrl.viewer.serve.CalculationClient`).
    """

    def page(_request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    api = [
        Route(f"/api{path}", _wrap_handler(handler, token))
        for path, handler in _ApiHandlers(library, calculate).handlers_by_path().items()
    ]
    return Starlette(
        routes=[
            Route("/", page),
            Route("/palette.css", lambda _request: Response(palette_css(), media_type="text/css")),
            *api,
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[
            # Reject other host names, to prevent DNS rebinding by web pages.
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(BaseHTTPMiddleware, dispatch=_add_security_headers),
            Middleware(GZipMiddleware, minimum_size=2_000, compresslevel=1),
        ],
    )


class _ApiHandlers:
    """Request handlers of the API."""

    def __init__(self, library: RunLibrary, calculate: Calculate) -> None:
        self._library = library
        self._calculate = calculate

    def handlers_by_path(self) -> Mapping[str, Handler]:
        """Return the handler of each path."""
        trajectory = "/runs/{id}/steps/{step:int}/{number:int}"
        return {
            "/library": self.library,
            "/metrics": lambda _request: describe_built_in_metrics(),
            "/runs/{id}": lambda request: read_run_page(self._run(request)),
            "/runs/{id}/series": self.series,
            "/runs/{id}/trajectories": self.trajectories,
            "/runs/{id}/estimators": lambda request: self._calculate_for_run(request, {"ask": "estimators"}),
            trajectory: self.trajectory,
            f"{trajectory}/what_if": self.what_if,
            f"{trajectory}/tokens/{{token:int}}": self.explanation,
            "/evaluations/{id}": lambda request: read_evaluation_page(self._evaluation(request)),
            "/evaluations/{id}/{index:int}": lambda request: read_rollout_page(
                self._evaluation(request), request.path_params["index"]
            ),
            "/evaluations/{id}/search": lambda request: search_rollouts(
                self._evaluation(request), request.query_params.get("text", "")
            ),
            "/comparisons/{first}/{second}": lambda request: comparison_page(
                self._evaluation(request, "first"), self._evaluation(request, "second")
            ),
        }

    def library(self, _request: Request) -> object:
        """Return all runs (:func:`read_run_summary`) and evaluations. Unreadable entries have a field ``error``."""
        by_kind = {"run": list[object](), "evaluation": list[object]()}
        for folder in self._library.folders():
            try:
                is_run = folder.kind == "run"
                about = read_run_summary(RunDirectory(folder.path)) if is_run else read_evaluation_summary(folder.path)
                to_json(about)  # serialize here, so that an error affects only this entry
            except Exception as error:  # noqa: BLE001  (a run that cannot be read must not hide the others)
                about = {"error": str(error) if isinstance(error, AgentRLError) else describe_error(error)}
            by_kind[folder.kind].append({"id": folder.id, "name": folder.name, **about})
        return {"runs": by_kind["run"], "evaluations": by_kind["evaluation"]}

    def series(self, request: Request) -> object:
        """Return the curves of a run (:meth:`MetricsColumns.series`). ``names`` may be repeated in the query."""
        run, query = self._run(request), request.query_params
        return cached_metrics_columns(run.metrics_file, run.path).series(
            names=query.getlist("names"),
            points=min(max(optional_int(query, "points") or 800, 2), 10_000),
            since=query.get("since", ""),
        )

    def trajectories(self, request: Request) -> object:
        run, query = self._run(request), request.query_params
        steps = select_requested_steps(run.steps_with_trajectories(), query)
        if len(steps) == 1:
            run.require_trajectories(steps[0])
        start = parse_position(query.get("after", "0:0"))
        limit = min(optional_int(query, "limit") or 1_000, 5_000)
        return search_rows(run, steps, parse_search(query), start=start, limit=limit, seconds=SEARCH_SECONDS)

    def trajectory(self, request: Request) -> object:
        return read_trajectory_page(self._run(request), request.path_params["step"], request.path_params["number"])

    def what_if(self, request: Request) -> object:
        query = request.query_params
        try:
            options = json.loads(query.get("options", "{}"))
        except ValueError as error:
            raise QueryError(f"options must be JSON; got {query['options']!r}") from error
        if not isinstance(options, dict):
            raise QueryError(f"options must be a JSON object; got {query['options']!r}")
        asked = {"estimator": query.get("estimator", ""), "options": options, "size": optional_int(query, "size")}
        return self._calculate_for_trajectory(request, {"ask": "what_if", **asked})

    def explanation(self, request: Request) -> object:
        return self._calculate_for_trajectory(request, {"ask": "explain", "token": request.path_params["token"]})

    def _calculate_for_run(self, request: Request, question: dict[str, object]) -> object:
        return self._calculate(self._run(request).path, question)

    def _calculate_for_trajectory(self, request: Request, question: dict[str, object]) -> object:
        path = request.path_params
        return self._calculate_for_run(request, {"step": path["step"], "trajectory": path["number"], **question})

    def _run(self, request: Request) -> RunDirectory:
        return self._library.run(request.path_params["id"])

    def _evaluation(self, request: Request, name: str = "id") -> Path:
        return self._library.evaluation(request.path_params[name])


def _wrap_handler(handler: Handler, token: str) -> Callable[[Request], Response]:
    """Wrap a handler to check the token and convert failures to messages that the page displays."""

    def endpoint(request: Request) -> Response:
        token_sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        # Compare in constant time, so that response times do not reveal the token.
        if not secrets.compare_digest(token_sent.encode(), token.encode()):
            return _json({"error": "the token is invalid: open the address that `agentrl view` printed"}, 401)
        try:
            return _json(handler(request), 200)
        except SettingsError as error:
            return _json({"error": str(error)}, 404)
        except (AgentRLError, OSError) as error:
            return _json({"error": str(error)}, 503)
        except QueryError as error:
            return _json({"error": str(error)}, 400)
        except Exception as error:  # noqa: BLE001  (a damaged file or a bug: the page shows a message, the terminal the traceback)
            traceback.print_exc()
            return _json({"error": f"{request.url.path} failed: {describe_error(error)}"}, 500)

    return endpoint


def _json(value: object, status: int) -> Response:
    return Response(to_json(value), status_code=status, media_type="application/json")


async def _add_security_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    return response
