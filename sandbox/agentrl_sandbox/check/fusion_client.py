"""A client for SandboxFusion's interface, so that ``check`` can test other sandboxes too."""

from __future__ import annotations

import time

from agentrl_sandbox.call import Call, to_base64
from agentrl_sandbox.errors import BusyError, SandboxError
from agentrl_sandbox.http import HttpSandbox, JsonObject, ServiceRequest
from agentrl_sandbox.types import Execution, Outcome

_KILLED = 128  # exit codes above this report a signal, as in a shell


class FusionSandbox(HttpSandbox):
    """``POST /run_code`` of SandboxFusion or a compatible service. It has no sessions and no request ids."""

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """Run a program. The interface ignores ``request_id``. Raises SandboxError for sessions and echo."""
        if call.session is not None or call.echo:
            raise SandboxError("SandboxFusion's interface has neither sessions nor echo")
        seconds = self._settings.timeout if call.timeout is None else call.timeout
        body = {
            "code": call.program,
            "language": "python",
            "run_timeout": seconds,
            "stdin": call.stdin,
            "files": to_base64(call.files),
            "fetch_files": call.fetch_files,
        }
        started = time.monotonic()

        def read(answer: JsonObject) -> Execution:
            return fusion_execution(answer, time.monotonic() - started)

        try:
            return await self._call(
                ServiceRequest(method="POST", path="/run_code", body=body, seconds=seconds, read=read)
            )
        except BusyError as error:
            return read({"status": "SandboxError", "message": str(error)})


def fusion_execution(answer: JsonObject, seconds: float) -> Execution:
    """Convert an answer of ``/run_code``.

    >>> result = {"status": "Finished", "return_code": 1, "stdout": "", "stderr": "MemoryError", "execution_time": 0.1}
    >>> fusion_execution({"status": "Failed", "run_result": result}, 0.2).outcome.value
    'memory_limit'
    """
    result = answer.get("run_result")
    if answer["status"] == "SandboxError" or result is None:
        why = str(answer.get("message", ""))
        outcome, code, texts = Outcome.INFRASTRUCTURE_FAILURE, None, ("", why)
    else:
        code = result.get("return_code")
        texts = (result.get("stdout") or "", result.get("stderr") or "")
        outcome = _outcome(result["status"], code, texts[1])
    return Execution(
        outcome=outcome, stdout=texts[0], stderr=texts[1], exit_code=code, seconds=seconds, truncated=False
    )


def _outcome(status: str, code: int | None, stderr: str) -> Outcome:
    if status == "TimeLimitExceeded":
        return Outcome.TIMEOUT
    if code == 0:
        return Outcome.OK
    if "MemoryError" in stderr.strip().rpartition("\n")[2]:
        return Outcome.MEMORY_LIMIT
    return Outcome.KILLED if code is None or code < 0 or code > _KILLED else Outcome.ERROR
