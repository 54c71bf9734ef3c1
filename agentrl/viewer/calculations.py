"""Requests of the viewer that need torch and the run's plug-ins: other estimators, and the explanation of a token.

The viewer imports no torch, so :class:`agentrl.viewer.serve.CalculationClient` runs this module in a separate process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from agentrl.algorithms import estimator_needs
from agentrl.algorithms.options import AlgorithmError
from agentrl.errors import AgentRLError, SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import StoredStep, StoredTrajectory, read_step
from agentrl.viewer.explain import explain_token
from agentrl.viewer.run_files import choose_plotted_indices, json_numbers, load_run_plugins, to_json
from agentrl.viewer.what_if import WhatIf, compute_what_if, list_estimator_forms, merge_options_with_defaults
from agentrl_envs.registry import PluginError, describe_error


class CalculationHandlers:
    """Request handlers for one run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._warnings = load_run_plugins(run)

    def answer(self, request: Mapping[str, object]) -> str:
        """Answer a request ``{"ask": NAME, ...}``, where ``...`` are the arguments of the method ``NAME``.

        Returns ``{"answer": ...}`` as JSON, or ``{"error": MESSAGE}`` after an exception of the method or of a plug-in.
        """
        methods: Mapping[object, Callable[..., object]] = {
            "estimators": self.estimators,
            "what_if": self.what_if,
            "explain": self.explain,
        }
        arguments = {name: value for name, value in request.items() if name != "ask"}
        try:
            return to_json({"answer": methods[request["ask"]](**arguments)})
        except (AgentRLError, AlgorithmError, PluginError) as error:
            return to_json({"error": "; ".join([str(error), *self._warnings])})
        except Exception as error:  # noqa: BLE001  (a user's estimator may raise any exception)
            return to_json({"error": describe_error(error)})

    def estimators(self) -> object:
        """Return every estimator with its options."""
        forms = {name: [asdict(form) for form in options] for name, options in list_estimator_forms().items()}
        return {"estimators": forms, "warnings": self._warnings}

    def what_if(
        self, step: int, trajectory: int, estimator: str, options: Mapping[str, object], size: int | None
    ) -> object:
        """Recompute a trajectory's group with another estimator.

        In the result, ``fields`` contains the trajectory's columns.
        """
        stored, chosen = self._read_group_of_trajectory(step, trajectory)
        if estimator_needs(estimator, **merge_options_with_defaults(stored, estimator, options)).step_wide:
            stored = read_step(self._run, step)
        result = compute_what_if(stored, chosen, estimator=estimator, options=options, size=size)
        names = {f"what_if_{name}": name for name in ("advantages", "baselines", "returns")}
        return {
            "estimator": result.estimator,
            "options": result.options,
            "power": result.power,
            "power_before": result.power_before,
            "fields": {name: json_numbers(result.columns[chosen.key][column]) for name, column in names.items()},
            "siblings": [_sibling_curves(item, result) for item in stored.trajectories if item.key in result.columns],
        }

    def explain(self, step: int, trajectory: int, token: int) -> object:
        """Return the lines that ``agentrl explain`` prints for a token."""
        return list(explain_token(self._run, step=step, trajectory=trajectory, token=token).lines())

    def _read_group_of_trajectory(self, step: int, number: int) -> tuple[StoredStep, StoredTrajectory]:
        self._run.require_trajectories(step)
        records = self._run.select_trajectories(step, lambda index, _line: index == number)
        groups = {record["group"] for _, record in records}
        if not groups:
            raise SettingsError(f"step {step} has no trajectory {number}")
        stored = read_step(self._run, step, groups=groups)
        return stored, next(item for item in stored.trajectories if item.number == number)


def _sibling_curves(item: StoredTrajectory, result: WhatIf) -> dict[str, object]:
    columns = result.columns[item.key]
    indices = choose_plotted_indices(len(item.model_token_positions))
    return {
        "number": item.number,
        "index": indices.tolist(),
        "advantages": json_numbers(columns["advantages"][indices]),
        "baselines": json_numbers(columns["baselines"][indices]),
        "mean": float(columns["advantages"].mean()),
    }
