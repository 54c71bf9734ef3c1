"""Compatibility with the fields of SandboxFusion's interface."""

from __future__ import annotations

import base64

import pytest

from agentrl_sandbox.client import Execution, Outcome
from agentrl_sandbox.service.fusion import RunCodeRequest, run_code

pytestmark = pytest.mark.slow


def ended(outcome: Outcome, exit_code: int | None, **fields: object) -> Execution:
    given = {"stdout": "out", "stderr": "err", "seconds": 1.5, "truncated": False, "files": {}, **fields}
    return Execution(outcome=outcome, exit_code=exit_code, **given)


async def answered(execution: Execution, **fields: object) -> dict:
    async def run(call):
        return execution

    return (await run_code(RunCodeRequest(code="c", language="python", **fields), run)).model_dump()


async def test_success():
    assert await answered(ended(Outcome.OK, 0, files={"a": b"\x01"})) == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "Finished",
            "execution_time": 1.5,
            "return_code": 0,
            "stdout": "out",
            "stderr": "err",
        },
        "executor_pod_name": None,
        "files": {"a": "AQ=="},
    }


@pytest.mark.parametrize(
    ("outcome", "exit_code"),
    [(Outcome.ERROR, 1), (Outcome.KILLED, -11), (Outcome.MEMORY_LIMIT, -9), (Outcome.OUTPUT_LIMIT, -9)],
)
async def test_another_end_is_failed_and_finished(outcome, exit_code):
    answer = await answered(ended(outcome, exit_code))
    assert (answer["status"], answer["message"]) == ("Failed", "")
    assert (answer["run_result"]["status"], answer["run_result"]["return_code"]) == ("Finished", exit_code)


async def test_a_timeout_is_failed_and_has_no_return_code():
    answer = await answered(ended(Outcome.TIMEOUT, -9))
    assert answer["status"] == "Failed"
    assert answer["run_result"] == {
        "status": "TimeLimitExceeded",
        "execution_time": 1.5,
        "return_code": None,
        "stdout": "out",
        "stderr": "err",
    }


async def test_a_failure_of_the_sandbox_is_said_in_words():
    answer = await answered(ended(Outcome.INFRASTRUCTURE_FAILURE, None, stderr="the runner went"))
    assert (answer["status"], answer["message"], answer["run_result"]["status"]) == (
        "SandboxError",
        "the runner went",
        "Error",
    )


async def test_over_http_even_a_failure_is_200_and_another_language_422(gateway):
    fields = {"code": "broken", "language": "python"}
    answer = await gateway.client.post("/run_code", json=fields)
    assert (answer.status_code, answer.json()["status"]) == (200, "SandboxError")
    assert (await gateway.client.post("/run_code", json={**fields, "language": "cobol"})).status_code == 422


async def test_every_field_is_taken_and_defaults_are_theirs(gateway, runner):
    fields = {
        "code": "c",
        "language": "python",
        "compile_timeout": 5,
        "run_timeout": 5,
        "memory_limit_MB": -1,
        "stdin": "in",
        "files": {"a": base64.b64encode(b"x").decode(), "b": None},
        "fetch_files": ["a", "missing"],
    }
    answer = (await gateway.client.post("/run_code", json=fields)).json()
    assert (answer["run_result"]["stdout"], answer["files"]) == ("cin", {"a": "eA=="})
    defaults = RunCodeRequest(code="c", language="python")
    assert (defaults.run_timeout, defaults.compile_timeout, defaults.memory_limit_MB) == (10, 10, -1)


async def test_files_that_are_no_base64_are_an_error_of_the_sandbox(gateway):
    fields = {"code": "c", "language": "python", "files": {"a": "!"}}
    answer = await gateway.client.post("/run_code", json=fields)
    assert (answer.status_code, answer.json()["status"]) == (200, "SandboxError")
