"""Tasks in Harbor's format. The slow tests run the tasks of examples/harbor in the local Docker engine."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from envs.docker_engine import BASE_IMAGE, need_docker

from agentrl.config.layers import load_settings
from agentrl.errors import SettingsError
from agentrl.problems.settings import ProblemSourceSettings
from agentrl.problems.sources import load_source
from agentrl.rollout.gateway.environment import program_for_environment
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.adapters.harbor import TaskShell
from agentrl_envs.adapters.harbor_containers import LABEL, TaskContainers, _digest_of_build
from agentrl_envs.adapters.harbor_tasks import HarborTask, read_task, read_task_rows
from agentrl_envs.episode import UnavailableError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.registry import PluginError
from agentrl_envs.settings import ContainerSettings, HarborSettings
from agentrl_envs.types import Ended, Problem
from agentrl_sandbox.client import SandboxSettings

TASKS = Path(__file__).parents[2] / "examples" / "harbor" / "tasks"


def a_task(directory: Path, *, toml: str = "", test: str = "echo 1 > /logs/verifier/reward.txt") -> Path:
    shutil.copytree(TASKS / "write-word", directory)
    (directory / "task.toml").write_text(toml, encoding="utf-8")
    (directory / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n", encoding="utf-8")
    return directory


def test_the_tasks_of_a_directory_are_problems() -> None:
    source = load_source(ProblemSourceSettings(path=f"harbor:{TASKS}"), answered=False).source
    assert source.size == 10
    first = source.problem(0)
    assert (first.id, first.statement) == ("copy-file", "Copy /app/in.txt to /app/out.txt.")
    assert first.info == {"task": str(TASKS / "copy-file")}
    single = load_source(ProblemSourceSettings(path=f"harbor:{TASKS}/write-word"), answered=False).source
    assert (single.size, single.problem(0).id) == (1, "write-word")


def test_an_environment_of_tasks_trains_on_its_directory() -> None:
    for env in (f"harbor:{TASKS}", f"harbor:{TASKS}:python /agent/agent.py"):
        assert [entry.path for entry in load_settings(env).data.train] == [f"harbor:{TASKS}"]
    example = load_settings(config_file=TASKS.parent / "config.yaml")
    assert [entry.path.rpartition("/")[2] for entry in example.data.train] == ["write-word", "copy-file", "count-lines"]
    with pytest.raises(
        SettingsError, match=r"rollout\.branching\.width=2: the containers of env=harbor:.* set the width to 1"
    ):
        load_settings(f"harbor:{TASKS}", overrides=["rollout.branching.width=2"])


@pytest.mark.parametrize("command", ["", ":python /agent/agent.py"])
def test_rollouts_in_rounds_need_a_container_each(command: str) -> None:
    rounds = ["training.deterministic=true", "environment.containers=4"]
    with pytest.raises(SettingsError, match=r"containers=4 < rollout\.concurrency=\d+: set rollout\.concurrency=4"):
        load_settings(f"harbor:{TASKS}{command}", overrides=rounds)
    load_settings(f"harbor:{TASKS}{command}", overrides=[*rounds, "rollout.concurrency=4"])


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[environment", "is not valid TOML"),
        ("environment = 'x'", "environment='x': Input should be a valid dictionary"),
        ("verifier = 3", "verifier=3: Input should be a valid dictionary"),
        ("[environment]\nmemory = 'much'", r"environment\.memory='much': .*write a size such as '2G'"),
        ("[environment.healthcheck]\nretries = 2", r"environment\.healthcheck\.command=.*: Field required"),
        ("[verifier]\ntimeout_sec = -1", r"verifier\.timeout_sec=-1: Input should be greater than 0"),
        ("[[steps]]\nname = 'a'", "uses features that are not supported: steps; remove this task"),
        ("[environment]\ngpus = 1", r"not supported: environment\.gpus;"),
        ("[environment]\nos = 'windows'", r"not supported: environment\.os;"),
        ("[verifier]\nenvironment_mode = 'separate'", r"not supported: verifier\.environment_mode;"),
        ("[verifier]\nenv = { KEY = '${NO_KEY}' }", r"verifier\.env\.KEY='\$\{NO_KEY\}': .* not set: NO_KEY"),
        ("[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.org']", r"not supported: agent\.allowed_hosts;"),
    ],
)
def test_tasks_that_cannot_run_are_refused(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        read_task(a_task(tmp_path / "task", toml=toml))


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("instruction.md", "instruction.md cannot be read: No such file"),
        ("tests/test.sh", "does not exist, so the task has no verifier"),
        ("environment/Dockerfile", "neither environment/Dockerfile nor environment.docker_image"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, removed: str, message: str) -> None:
    task = a_task(tmp_path / "task")
    (task / removed).unlink()
    with pytest.raises(PluginError, match=message):
        read_task(task)
    (task / removed).with_suffix(".other").touch()
    with pytest.raises(PluginError, match=message):
        read_task(task)
    (task / removed).write_bytes(b"\xff")
    if removed.endswith(".md"):
        with pytest.raises(PluginError, match=r"instruction\.md is not encoded in UTF-8: .* byte 0xff in position 0"):
            read_task(task)
    with pytest.raises(PluginError, match=r"contains no tasks: neither task\.toml nor \*/task\.toml exists"):
        list(read_task_rows(str(task / "environment")))


def test_commands_of_the_example_s_agent_end_with_their_shell() -> None:
    execute = runpy.run_path(str(TASKS.parent / "agent" / "agent.py"))["execute"]
    began = time.monotonic()
    assert execute("sleep 5 & echo started; echo failed >&2") == "started\nfailed\n"
    assert time.monotonic() - began < 4
    assert execute("head -c 9000000 /dev/zero | tr '\\0' y") == "y" * 2000
    assert execute("printf '\\377'; exit 3") == "\ufffd"
    assert execute("\0exit 3") == "exit code 3"


@pytest.mark.parametrize("command", ["", ":python3 /agent/agent.py"])
def test_a_mounted_directory_with_the_tasks_is_refused(command: str, tmp_path: Path) -> None:
    def load(files: Path) -> None:
        if command:
            program_for_environment(f"harbor:{TASKS}{command}", {"agent_files": str(files)}, AgentGatewaySettings())
        else:
            section = HarborSettings(agent_files=str(files))
            resolve_environment(f"harbor:{TASKS}")(section, SandboxSettings(), GraderSettings(), None)

    load(TASKS.parent / "agent")
    task = TASKS / "write-word"
    for files in (TASKS.parent, TASKS, task, task / "tests", task / "solution"):
        with pytest.raises(PluginError, match=r"agent_files=.* contains tasks of .*, so agents could read their tests"):
            load(files)
    with pytest.raises(PluginError, match="missing is not a directory"):
        load(tmp_path / "missing")


def test_a_task_of_several_steps_is_refused_by_name(tmp_path: Path) -> None:
    task = a_task(tmp_path / "task", toml="[[steps]]\nname = 'a'")
    (task / "instruction.md").unlink()
    with pytest.raises(PluginError, match="not supported: steps;"):
        read_task(task)
    (task / "task.toml").write_text("", encoding="utf-8")
    (task / "trajectory.json").write_text("{}", encoding="utf-8")
    with pytest.raises(PluginError, match=r"not supported: trajectory\.json;"):
        read_task(task)


def test_variables_refer_to_the_environment_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "1")
    toml = "environment.env = { A = '${A}', B = '${NO_B:-2}', C = '$A' }"
    assert read_task(a_task(tmp_path / "task", toml=toml)).config.environment.env == {"A": "1", "B": "2", "C": "$A"}


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(PluginError, match=r"env=harbor:tasks: +names no command"):
        program_for_environment("harbor:tasks: ", {}, AgentGatewaySettings())


def test_environments_of_several_containers_are_refused(tmp_path: Path) -> None:
    task = a_task(tmp_path / "task")
    (task / "environment" / "Dockerfile").rename(task / "environment" / "docker-compose.yaml")
    with pytest.raises(PluginError, match=r"not supported: docker-compose\.yaml;"):
        read_task(task)


def test_sizes_of_the_first_schema_version_are_read(tmp_path: Path) -> None:
    sizes = {"'2048'": 2048, "'2G'": 2048, "'2GB'": 2048, "'1.5 GiB'": 1536, "'512M'": 512, "'65536K'": 64}
    for text, expected in sizes.items():
        task = read_task(a_task(tmp_path / text, toml=f"version = '1.0'\n[environment]\nmemory = {text}"))
        assert task.config.environment.memory_mb == expected
    assert read_task(a_task(tmp_path / "mb", toml="[environment]\nmemory_mb = 64")).config.environment.memory_mb == 64


def test_lines_that_mark_benchmark_data_are_not_shown(tmp_path: Path) -> None:
    task = a_task(tmp_path / "task")
    text = "<!-- harbor-canary GUID 1 -->\n# Canary 2\n\n# Title\nFeed the canary. # canary\n"
    (task / "instruction.md").write_text(text, encoding="utf-8")
    assert read_task(task).instruction == "# Title\nFeed the canary. # canary"


def test_an_image_is_identified_by_the_contents_of_its_files(tmp_path: Path) -> None:
    folder = a_task(tmp_path / "task") / "environment"
    same = shutil.copytree(folder, tmp_path / "copy")
    first = _digest_of_build(folder, {})
    assert _digest_of_build(same, {}) == first != _digest_of_build(folder, {"A": "1"})
    (folder / "more.txt").write_text("", encoding="utf-8")
    second = _digest_of_build(folder, {})
    (folder / "more.txt").chmod(0o755)
    assert len({first, second, _digest_of_build(folder, {})}) == 3


# -- with Docker -----------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def containers() -> AsyncIterator[TaskContainers]:
    need_docker()
    opened = TaskContainers(ContainerSettings(build_args={"BASE_IMAGE": BASE_IMAGE}, containers=4, pids=64))
    await opened.open()
    yield opened
    await opened.disconnect()


async def rewarded(containers: TaskContainers, task: HarborTask, command: str) -> float:
    container = await containers.start(task)
    try:
        assert not (await container.execute(command, timeout=60)).exit_code
        return await container.run_verifier()
    finally:
        await container.close()


@pytest.mark.slow
async def test_each_example_task_is_solved_by_its_solution_and_by_nothing_else(containers: TaskContainers) -> None:
    tasks = [read_task(directory) for directory in sorted(TASKS.iterdir())]
    solutions = [(task.directory / "solution" / "solve.sh").read_text(encoding="utf-8") for task in tasks]
    played = [rewarded(containers, task, text) for task, text in zip(tasks, solutions, strict=True)]
    assert await asyncio.gather(*played) == [1.0] * 10
    assert await asyncio.gather(*(rewarded(containers, task, "true") for task in tasks)) == [0.0] * 10


@pytest.mark.slow
async def test_a_container_is_limited_and_a_failed_verifier_gives_no_reward(
    containers: TaskContainers, tmp_path: Path
) -> None:
    task = read_task(a_task(tmp_path / "task", toml="[environment]\nmemory_mb = 64\n[verifier]\ntimeout_sec = 2"))
    container = await containers.start(task)
    try:
        run = container.execute
        assert (await run("ls /sys/class/net", timeout=5)).output == "lo\n"
        stopped = await run("sleep 60", timeout=1)
        assert (stopped.stopped, stopped.output) == ("it took 1 s", "")
        assert (await run("yes", timeout=30)).stopped == "its output exceeded 1048576 bytes"
        assert (await run("sleep 60 & echo started", timeout=30)).output == "started\n"
        assert (await run("python3 -c 'bytearray(200 << 20)'", timeout=30)).exit_code == 137
        assert "fork" in (await run("for i in $(seq 99); do sleep 600 & done", timeout=5)).output
        assert await container.run_verifier() == 1.0  # after the agent's processes were killed, but process 1 was not
        assert int((await run("ls -d /proc/[0-9]* | wc -l", timeout=5)).output) < 9  # neither processes nor zombies
        for test, reason in (
            ("true", "wrote neither"),
            ("exit 3", "wrote neither"),
            ("echo 1 > /logs/verifier/reward.txt; kill -9 $$", "exit code 137"),
            ("echo 1 > /logs/verifier/reward.txt; sleep 60", "it took 2 s"),
            ("echo nan > /logs/verifier/reward.txt", "nan"),
            ("ln -s /etc/hostname /logs/verifier/reward.txt", "is not a file of at most 64 KiB"),
            ("yes 1 | head -c 1000000 > /logs/verifier/reward.txt", "is not a file of at most 64 KiB"),
            ("yes 1 | head -c 65600 > /logs/verifier/reward.txt", "is not a file of at most 64 KiB"),
            ("yes [ | head -c 60000 > /logs/verifier/reward.json", "reward.json is nested too deeply"),
        ):
            (task.directory / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n", encoding="utf-8")
            with pytest.raises(UnavailableError, match=f"returned no reward: .*{reason}"):
                await container.run_verifier()
    finally:
        await container.close()
    assert not containers.client.containers.list(all=True, filters={"label": f"{LABEL}=task"})


@pytest.mark.slow
async def test_a_container_is_used_once_its_health_check_succeeds(containers: TaskContainers, tmp_path: Path) -> None:
    check = "[environment]\nbuild_timeout_sec = 0.9\n[environment.healthcheck]\ninterval_sec = 0\nretries = {}\n{}"
    counted = "command = 'echo >> /tmp/n; [ $(wc -l < /tmp/n) = 3 ] || { echo not yet; false; }'"
    await (await containers.start(read_task(TASKS / "write-word"))).close()  # builds the image
    healthy = a_task(tmp_path / "healthy", toml=check.format(3, counted))
    assert await rewarded(containers, read_task(healthy), "[ $(wc -l < /tmp/n) = 3 ]") == 1.0
    sick = a_task(tmp_path / "sick", toml=check.format(2, counted))
    with pytest.raises(UnavailableError, match="task sick did not start: its health check failed 2 times: not yet"):
        await containers.start(read_task(sick))
    assert not containers.client.containers.list(all=True, filters={"label": f"{LABEL}=sick"})
    slow = a_task(tmp_path / "slow", toml="[environment]\nbuild_timeout_sec = 0.001")
    (slow / "environment" / "Dockerfile").write_text(f"FROM {BASE_IMAGE}\nRUN sleep 60\n", encoding="utf-8")
    with pytest.raises(UnavailableError, match=r"Docker: .*timed out"):
        await containers.start(read_task(slow))


@pytest.mark.slow
async def test_the_directory_of_the_reward_belongs_to_the_user_of_the_verifier(
    containers: TaskContainers, tmp_path: Path
) -> None:
    directory = a_task(tmp_path / "task", toml="[verifier]\nuser = 0")
    with (directory / "environment" / "Dockerfile").open("a", encoding="utf-8") as file:
        file.write("USER 1000\n")
    container = await containers.start(read_task(directory))
    try:
        assert await container.run_verifier() == 1.0
        assert (await container.execute("id -u; stat -c %u /logs/verifier", timeout=30)).output == "1000\n0\n"
    finally:
        await container.close()


_ATTACKS = """(for ((n = 0; ; n++)); do
    cat /tests/*.sh /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -a SECRET >> /tmp/seen
    echo 1 2>/dev/null > /logs/verifier/reward.json
    echo $n > /tmp/new; mv /tmp/new /tmp/n; sleep 0.02
done) >/dev/null 2>&1 &
until [ -s /tmp/n ]; do sleep 0.02; done"""
_ATTACKED = """first=$(cat /tmp/n); while [ $(cat /tmp/n) -lt $((first + 3)) ]; do sleep 0.02; done  # SECRET
if [ -s /tmp/seen ] || [ -e /logs/verifier/reward.json ] || [ -e /tests/mine ]; then exit 1; fi
echo 0.5 > /logs/verifier/reward.txt"""


@pytest.mark.slow
async def test_processes_of_an_unprivileged_agent_see_no_tests_and_write_no_reward(
    containers: TaskContainers, tmp_path: Path
) -> None:
    toml = "[agent]\nuser = 1000\n[verifier]\nenv = { KEY = 'SECRET' }"
    directory = a_task(tmp_path / "task", toml=toml, test=_ATTACKED)
    (directory / "tests").rename(tmp_path / "shared")
    (directory / "tests").symlink_to(tmp_path / "shared")
    container = await containers.start(read_task(directory))
    try:
        planted = "mkdir -p /tests /logs/verifier && touch /tests/mine && echo 1 > /logs/verifier/reward.json"
        assert not (await container.execute(planted, timeout=30)).exit_code  # as the root of an image would
        assert not (await container.execute(_ATTACKS, timeout=30, user=1000)).exit_code
        assert await container.run_verifier() == 0.5
    finally:
        await container.close()


def built(containers: TaskContainers, dockerfile: str) -> str:
    image, _ = containers.client.images.build(fileobj=io.BytesIO(dockerfile.encode()), labels={LABEL: "test"}, rm=True)
    return str(image.id)


@pytest.mark.slow
async def test_a_helper_runs_as_any_user_and_leaves_nothing_if_it_fails(containers: TaskContainers) -> None:
    container = await containers.start(read_task(TASKS / "write-word"))
    try:
        with pytest.raises(UnavailableError, match="python3"):
            await container.open_listener(42731, built(containers, "FROM scratch\nLABEL empty=true\n"))
        assert not containers.client.containers.list(all=True, filters={"label": f"{LABEL}=helper"})
        (await container.open_listener(42731, built(containers, f"FROM {BASE_IMAGE}\nUSER 1000\n"))).close()
    finally:
        await container.close()


@pytest.mark.slow
@pytest.mark.parametrize("workdir", ["", "workdir = '/tmp'"])
async def test_files_without_a_dockerfile_are_in_the_working_directory(
    containers: TaskContainers, tmp_path: Path, workdir: str
) -> None:
    image = built(containers, f"FROM {BASE_IMAGE}\nENTRYPOINT []\nWORKDIR /new\nUSER 1000\n")
    task = a_task(tmp_path / "task", toml=f"[environment]\ndocker_image = '{image}'\n{workdir}")
    (task / "environment" / "Dockerfile").rename(task / "environment" / ".gitkeep")
    (task / "environment" / "data").mkdir(mode=0o700)
    (task / "environment" / "data" / "a.txt").write_text("hello", encoding="utf-8")
    assert await rewarded(containers, read_task(task), "[ $(cat data/a.txt) = hello ] && [ -e .gitkeep ]") == 1.0


@pytest.mark.slow
async def test_an_image_that_was_removed_is_built_again(containers: TaskContainers, tmp_path: Path) -> None:
    directory = a_task(tmp_path / "task")
    with (directory / "environment" / "Dockerfile").open("a", encoding="utf-8") as file:
        file.write("LABEL removed=true\n")
    container = await containers.start(read_task(directory))
    await container.close()
    containers.client.images.remove(container.image, force=True)
    with pytest.raises(UnavailableError, match="No such image"):
        await containers.start(read_task(directory))
    await (await containers.start(read_task(directory))).close()


@pytest.mark.slow
async def test_output_that_arrives_with_the_head_of_the_response_is_kept(
    containers: TaskContainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = await containers.start(read_task(TASKS / "write-word"))
    begin = http.client.HTTPResponse.begin

    def begin_late(response: http.client.HTTPResponse) -> None:  # like a thread that waits for a processor
        time.sleep(1.0)
        begin(response)

    monkeypatch.setattr(http.client.HTTPResponse, "begin", begin_late)
    try:
        assert (await container.execute("echo hello", timeout=30)).output == "hello\n"
    finally:
        await container.close()


@pytest.mark.slow
async def test_the_built_in_agent_calls_bash_and_gets_the_reward() -> None:
    need_docker()
    section = HarborSettings(build_args={"BASE_IMAGE": BASE_IMAGE}, containers=1)
    environment = resolve_environment(f"harbor:{TASKS}")(section, SandboxSettings(), GraderSettings(), None)
    await environment.open()
    problem = Problem(id="a", statement="Copy it.", answer=None, source="", info={"task": str(TASKS / "copy-file")})
    episode, waiting = environment.episode(problem), environment.episode(problem)
    assert '"name": "bash"' in await episode.start()
    step = await episode.step(called("cp in.txt out.txt; cat out.txt; exit 3"))
    assert (step.observation, step.ended) == (
        "\n<tool_response>\nseven blue boats\n[exit code 3]\n</tool_response>\n",
        None,
    )
    await waiting.start()
    second = asyncio.create_task(waiting.step("No command."))  # waits until the only container is removed
    step = await episode.step("Done.")
    assert (step.reward, step.ended, second.done()) == (1.0, Ended.ANSWERED, False)
    await episode.close()
    assert (await second).reward == 0.0
    await waiting.close()
    await environment.close()


@pytest.mark.slow
async def test_the_commands_of_a_turn_run_in_their_order(containers: TaskContainers) -> None:
    problem = Problem(id="a", statement="Copy it.", answer=None, source="", info={"task": str(TASKS / "copy-file")})
    terminal = TaskShell(containers, problem, 30.0)
    commands = ("sleep 1; echo one > x", "cat x; echo two > x", "cat x")
    try:
        assert await asyncio.gather(*map(terminal.bash, commands)) == ["", "one\n", "two\n"]
    finally:
        await terminal.close()


def called(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


_HELD = """
import asyncio, sys
from agentrl_envs.adapters.harbor_containers import TaskContainers
from agentrl_envs.adapters.harbor_tasks import read_task
from agentrl_envs.settings import ContainerSettings
from pathlib import Path

async def hold():
    containers = TaskContainers(ContainerSettings(build_args={"BASE_IMAGE": sys.argv[2]}))
    await containers.open()
    container = await containers.start(read_task(Path(sys.argv[1])))
    await container.execute("sleep 600 &", timeout=5)
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(hold())
"""


@pytest.mark.slow
async def test_the_container_of_a_killed_process_is_removed(containers: TaskContainers, tmp_path: Path) -> None:
    task = a_task(tmp_path / "orphan")
    words = [sys.executable, "-c", _HELD, str(task), BASE_IMAGE]

    def running() -> list[Any]:
        found: list[Any] = containers.client.containers.list(
            all=True, ignore_removed=True, filters={"label": f"{LABEL}=orphan"}
        )
        return found

    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "started\n"
        assert len(running()) == 1
        process.kill()
    async with asyncio.timeout(30):
        while running():
            await asyncio.sleep(0.1)
