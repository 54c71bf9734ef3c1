"""Plays a task set of verifiers 0.4 for a gateway of agentrl: ``--env verifiers:TASKSET``.

It runs under the Python of a virtual environment that has verifiers (``environment.python``), by itself: neither this
package nor agentrl need be there. It asks the gateway for rollouts, plays each as an episode and posts its reward.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import sys
import types
import urllib.request
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import verifiers.v1 as vf

KEY = "AGENTRL_GATEWAY_KEY"
HARNESS = "agentrl_python"
_WAIT = 20.0  # seconds of one request for a rollout


class WorkerOptions(TypedDict):
    """What the settings say: verifiers' section ``env``, and how many rollouts are played at once."""

    config: dict[str, object]
    concurrency: int


class AssignedProblem(TypedDict):
    """A problem, as far as a task is found by it."""

    id: str
    info: dict[str, object]


class AssignedRollout(TypedDict):
    """A rollout as the gateway hands it out."""

    rollout_id: str
    base_url: str
    model: str
    problem: AssignedProblem


class Tasks:
    """The tasks of a set by their numbers, read as they are needed; past its end it begins again."""

    def __init__(self, tasks: Iterator[vf.Task]) -> None:
        self._coming = tasks
        self._read: list[vf.Task] = []

    def of(self, problem: AssignedProblem) -> vf.Task:
        """The task with the number ``idx`` of the problem's columns, or the number at the end of its id."""
        number = problem["info"].get("idx", re.search(r"\d*$", problem["id"])[0] or 0)  # type: ignore[index]
        place = int(str(number))
        while len(self._read) <= place and (task := next(self._coming, None)) is not None:
            self._read.append(task)
        if not self._read:
            raise SystemExit("the task set has no task")
        return self._read[place % len(self._read)]


class Worker:
    """Asks for rollouts and plays them."""

    def __init__(self, environment: vf.Env, url: str, concurrency: int) -> None:
        self._environment = environment
        self._tasks = Tasks(iter(environment.taskset))
        self._url = url
        self._free = asyncio.Semaphore(concurrency)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the gateway is never behind one

    async def work(self) -> None:
        """Play until the gateway is gone."""
        async with self._environment.serving(), asyncio.TaskGroup() as playing:
            while True:
                await self._free.acquire()
                try:
                    given = await self._post("", {"wait": _WAIT})
                except TimeoutError:
                    given = None  # a gateway inside the training process does not answer while a step trains
                if given is None:
                    self._free.release()
                else:
                    playing.create_task(self._play(given))

    async def _play(self, rollout: AssignedRollout) -> None:
        """One episode. Its reward is the mean of what its trained agents earned."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        place = f"/{rollout['rollout_id']}"
        try:
            client = EvalClientConfig(base_url=rollout["base_url"], api_key_var=KEY)
            context = ModelContext(model=rollout["model"], client=client)
            episode = await self._environment.run_episode(self._tasks.of(rollout["problem"]), context)
            rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
            error = None
            if episode.ok and rewards:
                await self._post(f"{place}/reward", {"reward": sum(rewards) / len(rewards)})
            else:
                errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
                error = "; ".join(f"{one.type}: {one.message}" for one in errors) or "the episode has no trained agent"
            await self._post(f"{place}/finish", {} if error is None else {"error": error})
        except OSError as problem:  # the rollout is over, by its deadline or with the run
            print(f"verifiers worker: rollout {rollout['rollout_id']}: {problem}", file=sys.stderr)
        finally:
            self._free.release()

    async def _post(self, path: str, body: dict[str, object]) -> AssignedRollout | None:
        """What the gateway answers; None for no content."""
        request = urllib.request.Request(
            f"{self._url}/rollouts{path}",
            data=json.dumps(body).encode(),
            headers={"authorization": f"Bearer {os.environ[KEY]}"},
        )

        def posted() -> AssignedRollout | None:
            with self._opener.open(request, timeout=2 * _WAIT) as answer:
                text = answer.read()
            return None if answer.status == 204 else json.loads(text)

        return await asyncio.to_thread(posted)


def python_harness() -> types.ModuleType:
    """A module with verifiers' own chat harness, run by this Python. The original installs ``uv`` at run time."""
    from verifiers.v1.harnesses.null import NullHarness

    class WithPython:
        """A runtime whose scripts run under this Python."""

        def __init__(self, runtime: vf.Runtime) -> None:
            self._runtime = runtime

        async def prepare_uv_script(self, script: str, env: object = None, *, activate: bool = True) -> list[str]:
            path = f"{self._runtime.scripts_dir}/chat.py"
            draft = f"{path}.{uuid.uuid4().hex}"
            await self._runtime.write(draft, script.encode())
            await self._runtime.run(["mv", "-f", draft, path], {})  # another rollout may be starting it
            return [sys.executable, path]

        def __getattr__(self, name: str) -> object:
            return getattr(self._runtime, name)

    class PythonHarness(NullHarness):  # type: ignore[misc]
        async def setup(self, runtime: vf.Runtime) -> None:
            """Nothing to install."""

        async def launch(
            self, ctx: object, trace: object, runtime: vf.Runtime, *given: object, **named: object
        ) -> object:
            return await super().launch(ctx, trace, WithPython(runtime), *given, **named)

    module = types.ModuleType(HARNESS)
    vars(module).update(PythonHarness=PythonHarness, __all__=["PythonHarness"])
    return module


def load(name: str, config: dict[str, object]) -> vf.Env:
    """The environment around a task set. One of a single agent is played on this machine unless told otherwise."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    sys.modules[HARNESS] = python_harness()
    taskset = config.get("taskset")
    told = {**config, "taskset": {**(taskset if isinstance(taskset, dict) else {}), "id": name}}
    if "id" not in told:
        own = told.get("agent")
        default = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        told["agent"] = {**default, **(own if isinstance(own, dict) else {})}
    return loaders.load_environment(loaders.resolve_env_config(told))


def main() -> None:
    """Work for the gateway that the environment variables name."""
    options: WorkerOptions = json.loads(os.environ["AGENTRL_VERIFIERS"])
    environment = load(sys.argv[1], options["config"])
    asyncio.run(Worker(environment, os.environ["AGENTRL_GATEWAY_URL"], options["concurrency"]).work())


if __name__ == "__main__":
    main()
