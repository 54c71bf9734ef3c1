"""Worker that plays a task set of verifiers 0.4 for agentrl's gateway: ``--env verifiers:TASKSET``.

The worker runs as a script under the Python of a virtual environment that contains verifiers (``environment.python``).
It imports neither this package nor agentrl. It requests rollouts from the gateway, plays each rollout as an episode and
posts the reward.
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
_MAX_WAIT_SECONDS = 20.0  # seconds that a request for a rollout may wait in the gateway


class WorkerOptions(TypedDict):
    """The settings: the section ``env`` of verifiers, and the maximum number of concurrent rollouts."""

    config: dict[str, object]
    concurrency: int


class AssignedProblem(TypedDict):
    """The fields of a problem that identify its task."""

    id: str
    info: dict[str, object]


class AssignedRollout(TypedDict):
    """A rollout that the gateway assigned to this worker."""

    rollout_id: str
    base_url: str
    model: str
    problem: AssignedProblem


class LazyTaskList:
    """The tasks of a set by index, read on demand. Indices beyond the last task wrap around."""

    def __init__(self, tasks: Iterator[vf.Task]) -> None:
        self._unread = tasks
        self._read: list[vf.Task] = []

    def task_for_problem(self, problem: AssignedProblem) -> vf.Task:
        """Return the task whose index is in column ``idx`` or, without this column, at the end of the problem's id."""
        number = problem["info"].get("idx", re.search(r"\d*$", problem["id"])[0] or 0)  # type: ignore[index]
        index = int(str(number))
        while len(self._read) <= index and (task := next(self._unread, None)) is not None:
            self._read.append(task)
        if not self._read:
            raise SystemExit("the task set contains no tasks")
        return self._read[index % len(self._read)]


class RolloutWorker:
    """Requests rollouts from the gateway and plays them, up to ``concurrency`` at a time."""

    def __init__(self, environment: vf.Env, url: str, concurrency: int) -> None:
        self._environment = environment
        self._tasks = LazyTaskList(iter(environment.taskset))
        self._url = url
        self._free_slots = asyncio.Semaphore(concurrency)
        # Ignore proxies, because the gateway is local.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def play_rollouts(self) -> None:
        """Play rollouts until the gateway disconnects."""
        async with self._environment.serving(), asyncio.TaskGroup() as playing:
            while True:
                await self._free_slots.acquire()
                try:
                    assigned = await self._post("", {"wait": _MAX_WAIT_SECONDS})
                except TimeoutError:
                    assigned = None  # a gateway in the training process does not respond during a training step
                if assigned is None:
                    self._free_slots.release()
                else:
                    playing.create_task(self._play(assigned))

    async def _play(self, rollout: AssignedRollout) -> None:
        """Play one episode. The reward is the mean reward of its trainable agents."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        path = f"/{rollout['rollout_id']}"
        try:
            client = EvalClientConfig(base_url=rollout["base_url"], api_key_var=KEY)
            context = ModelContext(model=rollout["model"], client=client)
            episode = await self._environment.run_episode(self._tasks.task_for_problem(rollout["problem"]), context)
            rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
            error = None
            if episode.ok and rewards:
                await self._post(f"{path}/reward", {"reward": sum(rewards) / len(rewards)})
            else:
                errors = [*episode.errors, *(one for trace in episode.traces for one in trace.errors)]
                error = (
                    "; ".join(f"{one.type}: {one.message}" for one in errors) or "the episode has no trainable agent"
                )
            await self._post(f"{path}/finish", {} if error is None else {"error": error})
        except OSError as problem:  # the gateway has ended the rollout, or the run is over
            print(f"verifiers worker: rollout {rollout['rollout_id']} has ended: {problem}", file=sys.stderr)
        finally:
            self._free_slots.release()

    async def _post(self, path: str, body: dict[str, object]) -> AssignedRollout | None:
        """Post to the gateway and return the response, or None if the response has no content."""
        request = urllib.request.Request(
            f"{self._url}/rollouts{path}",
            data=json.dumps(body).encode(),
            headers={"authorization": f"Bearer {os.environ[KEY]}"},
        )

        def posted() -> AssignedRollout | None:
            with self._opener.open(request, timeout=2 * _MAX_WAIT_SECONDS) as answer:
                text = answer.read()
            return None if answer.status == 204 else json.loads(text)

        return await asyncio.to_thread(posted)


def make_harness_for_this_python() -> types.ModuleType:
    """Return a module with a copy of verifiers' chat harness that runs under this Python interpreter.

    The original harness installs ``uv`` at run time.
    """
    from verifiers.v1.harnesses.null import NullHarness

    class WithPython:
        """A runtime whose scripts run under this Python interpreter."""

        def __init__(self, runtime: vf.Runtime) -> None:
            self._runtime = runtime

        async def prepare_uv_script(self, script: str, env: object = None, *, activate: bool = True) -> list[str]:
            path = f"{self._runtime.scripts_dir}/chat.py"
            draft = f"{path}.{uuid.uuid4().hex}"
            await self._runtime.write(draft, script.encode())
            await self._runtime.run(["mv", "-f", draft, path], {})  # atomic: another rollout may be starting the script
            return [sys.executable, path]

        def __getattr__(self, name: str) -> object:
            return getattr(self._runtime, name)

    class PythonHarness(NullHarness):  # type: ignore[misc]
        async def setup(self, runtime: vf.Runtime) -> None:
            """Do nothing, because no package is installed at run time."""

        async def launch(
            self, ctx: object, trace: object, runtime: vf.Runtime, *args: object, **kwargs: object
        ) -> object:
            return await super().launch(ctx, trace, WithPython(runtime), *args, **kwargs)

    module = types.ModuleType(HARNESS)
    vars(module).update(PythonHarness=PythonHarness, __all__=["PythonHarness"])
    return module


def load_environment(name: str, config: dict[str, object]) -> vf.Env:
    """Load the environment of a task set.

    Environments with one agent run on this machine unless ``config`` sets another runtime.
    """
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    sys.modules[HARNESS] = make_harness_for_this_python()
    taskset = config.get("taskset")
    configured = {**config, "taskset": {**(taskset if isinstance(taskset, dict) else {}), "id": name}}
    if "id" not in configured:
        agent = configured.get("agent")
        default = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        configured["agent"] = {**default, **(agent if isinstance(agent, dict) else {})}
    return loaders.load_environment(loaders.resolve_env_config(configured))


def main() -> None:
    """Run a worker for the gateway that the environment variables specify."""
    options: WorkerOptions = json.loads(os.environ["AGENTRL_VERIFIERS"])
    environment = load_environment(sys.argv[1], options["config"])
    asyncio.run(RolloutWorker(environment, os.environ["AGENTRL_GATEWAY_URL"], options["concurrency"]).play_rollouts())


if __name__ == "__main__":
    main()
