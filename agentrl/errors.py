"""The trainer's errors.

AgentRLError
├── SettingsError             the user's settings or files: one message, exit code 2
│   ├── UnplaceableError      the cluster has too little for the run (agentrl.cluster.plan)
│   └── ProblemError          problems that cannot be had as asked (agentrl.problems.problem_errors)
│       ├── ProblemFileError
│       ├── ProblemFieldError
│       ├── EmptyProblemsError
│       └── SamplerStateError
├── WorldError                sandbox, engine, disk or network failed after its retries: one message, exit code 1
│   ├── NodeLostError         a machine of the cluster is gone or does not answer (agentrl.cluster.processes)
│   └── WorkerLostError       the rollout worker, or a rank, is gone or does not answer (agentrl.training.worker.wire)
├── FidelityError             trainer and engine disagree on sampled tokens (agentrl.training.step.diagnostics)
└── WeightMismatchError       an engine does not hold the weights it was sent (agentrl.training.worker.transfer)

Everything else is a bug and raises as it is.
"""

from __future__ import annotations

from typing import ClassVar


class AgentRLError(Exception):
    """An error that the command line reports as one message without a traceback."""

    exit_code: ClassVar[int] = 1


class SettingsError(AgentRLError):
    """What the user asked for cannot be done as asked; the message names the value, what is valid and the fix."""

    exit_code: ClassVar[int] = 2


class WorldError(AgentRLError):
    """Something outside the program failed: the message says what, and what it was waiting for."""

    exit_code: ClassVar[int] = 1
