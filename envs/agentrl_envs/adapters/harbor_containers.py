"""Containers of Harbor tasks, in the local Docker engine. Only this module and the sandbox use the Docker SDK.

Containers have no network. They exit when their standard input is closed, and therefore also if this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import socket
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import docker
from docker.errors import BuildError, DockerException, ImageNotFound, NotFound

from agentrl_envs.adapters.harbor_tasks import HarborTask, Healthcheck
from agentrl_envs.episode import UnavailableError
from agentrl_envs.settings import ContainerSettings
from agentrl_envs.threads import BlockingCallPool
from agentrl_envs.types import as_reward

Result = TypeVar("Result")

LABEL = "agentrl-harbor"
"""Label of the containers and built images."""

_MEGABYTE = 1 << 20
_MOST_OUTPUT = _MEGABYTE
_MOST_REWARD = 1 << 16  # maximum bytes of the verifier's reward file
_GRACE = 30.0  # seconds that Docker may need beyond the time limit of a command
_HELPER_SECONDS = 60.0
# The first line of the output is the process group ID, used to kill the command. The output is not limited by a pipe
# to `head`, because the pipe would wait for background processes.
_RUN = 'echo $$; exec timeout -k 1 "$0" bash -c "$1" 2>&1'
_TIMED_OUT, _SIGNALED = 124, 128  # exit code of `timeout`; exit code after a signal, minus the signal's number
# This program opens a listening socket in the helper's network and sends it to this process. The helper can then end.
_LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
with socket.socket(socket.AF_UNIX) as here:
    here.connect("/run/agentrl/socket")
    socket.send_fds(here, [b"."], [listener.fileno()])
    here.recv(1)
"""


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """Output and exit code of a command. ``stopped`` is the reason for stopping the command, or ""."""

    output: str
    exit_code: int
    stopped: str


class TaskContainers:
    """The Docker engine, and the limit on concurrent containers. Belongs to one event loop."""

    def __init__(self, settings: ContainerSettings) -> None:
        self.settings = settings
        self.client: Any = None
        self._slots = asyncio.Semaphore(settings.containers)
        self._threads = BlockingCallPool(2 * settings.containers, name="docker")
        self._images: dict[Path, asyncio.Future[str]] = {}

    async def open(self) -> None:
        """Connect to the engine. Raises UnavailableError if it does not respond."""
        self._images.clear()
        self.client = await self.call_docker(partial(docker.from_env, max_pool_size=4 * self.settings.containers))

    async def call_docker(self, call: Callable[[], Result], *, timeout: float | None = None) -> Result:
        """Run a call of the Docker SDK in a thread. Raises UnavailableError if it fails."""
        try:
            return await self._threads.run(call, timeout=timeout)
        except BuildError as error:
            lines = [str(entry.get("stream", "")).strip() for entry in error.build_log]
            log = "\n".join([line for line in lines if line][-5:])
            raise UnavailableError(f"{log}\n{error.msg}") from error
        except TimeoutError as error:
            raise UnavailableError("Docker did not respond in time") from error
        except (DockerException, OSError) as error:  # the SDK also raises `requests` errors, which are OSErrors
            raise UnavailableError(f"Docker: {error}") from error

    async def start(self, task: HarborTask) -> TaskContainer:
        """Wait for a free slot and start a container of the task. Raises UnavailableError if it does not start."""
        await self._slots.acquire()
        container = TaskContainer(self, task, self._slots.release)
        try:
            image = self._images.get(task.directory)
            if image is None or (image.done() and (image.cancelled() or image.exception() is not None)):
                image = asyncio.ensure_future(self.call_docker(partial(self._find_or_build_image, task)))
                self._images[task.directory] = image
            container.image = await asyncio.shield(image)  # other rollouts wait for the same build
            try:
                await self.call_docker(container.create_and_start)
            except UnavailableError:
                if self._images.get(task.directory) is image:  # the image may have been removed
                    del self._images[task.directory]
                raise
            if task.config.environment.healthcheck is not None:
                await container.wait_until_healthy(task.config.environment.healthcheck)
        except BaseException as error:
            await container.close()
            if isinstance(error, UnavailableError):
                raise UnavailableError(f"the container of task {task.name} did not start: {error}") from error
            raise
        return container

    def _find_or_build_image(self, task: HarborTask) -> str:
        """Return the name of the task's image. Builds the image unless an image of the same files exists."""
        environment = task.config.environment
        if environment.docker_image is not None:
            try:
                self.client.images.get(environment.docker_image)
            except ImageNotFound:
                self.client.images.pull(environment.docker_image)
            return environment.docker_image
        folder = task.directory / "environment"
        arguments = self.settings.build_args
        tag = f"{LABEL}:{_digest_of_build(folder, arguments)}"
        try:
            self.client.images.get(tag)
        except ImageNotFound:
            self.client.images.build(
                path=str(folder),
                tag=tag,
                buildargs=dict(arguments),
                labels={LABEL: task.name},
                timeout=environment.build_timeout_sec,
                rm=True,
                forcerm=True,
            )
        return tag

    def describe(self) -> str:
        """Summarize the containers in one line for the console."""
        return f"containers: up to {self.settings.containers} at once, without a network"

    async def disconnect(self) -> None:
        """Disconnect from the engine, without stopping containers. May be called more than once."""
        client, self.client = self.client, None
        if client is not None:
            client.close()


def _digest_of_build(folder: Path, arguments: Mapping[str, str]) -> str:
    """Return a digest of the files below a directory and of the build arguments."""
    digest = hashlib.sha256(json.dumps(dict(arguments), sort_keys=True).encode())
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            executable = os.access(path, os.X_OK)
            digest.update(f"\0{path.relative_to(folder)}\0{executable}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


class TaskContainer:
    """The container of one rollout. Created by `TaskContainers.start`."""

    def __init__(self, containers: TaskContainers, task: HarborTask, release: Callable[[], None]) -> None:
        self.task = task
        self.image = ""
        self._user = ""  # default user of the image
        self._containers = containers
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()  # a cancelled start continues in its thread
        self._container: Any = None
        self._stdin: Any = None

    def create_and_start(self) -> None:
        """Create and start the container. Blocks."""
        settings, environment = self._containers.settings, self.task.config.environment
        memory = (environment.memory_mb or settings.memory_mb) * _MEGABYTE
        files = settings.agent_files
        with self._lock:
            if self._release is None:
                return
            client = self._containers.client
            self._user = client.images.get(self.image).attrs["Config"].get("User") or "root"
            self._container = client.containers.create(
                self.image,
                # As process 1, bash ignores signals from inside the container, and reaps processes without a parent.
                ["bash", "-c", "while read -r; do :; done"],
                user="root",  # otherwise, root would lack capabilities in the commands that prepare the verifier
                stdin_open=True,  # closed when this process ends, which ends the loop
                auto_remove=True,
                network_mode="none",
                cap_drop=["MKNOD", "NET_RAW"],
                security_opt=["no-new-privileges"],
                nano_cpus=int(1e9 * (environment.cpus or settings.cpus)),
                mem_limit=memory,
                memswap_limit=memory,
                pids_limit=settings.pids,
                working_dir=environment.workdir,
                environment=environment.env,
                volumes={} if files is None else {os.path.abspath(files): {"bind": "/agent", "mode": "ro"}},
                labels={LABEL: self.task.name},
            )
            self._stdin = self._container.attach_socket(params={"stdin": 1, "stream": 1})
            self._container.start()
            folder = self.task.directory / "environment"
            if environment.docker_image is not None and not (folder / "Dockerfile").exists():
                data = _build_archive({path.name: path for path in folder.glob("*")})
                self._container.put_archive(self._container.attrs["Config"]["WorkingDir"] or "/", data)

    async def wait_until_healthy(self, check: Healthcheck) -> None:
        """Run the health check until it succeeds. Raises UnavailableError after ``check.retries`` failures."""
        began, failures = time.monotonic(), 0
        while (done := await self.execute(check.command, timeout=check.timeout_sec)).exit_code:
            starting = time.monotonic() - began < check.start_period_sec
            failures += not starting
            if failures >= check.retries:
                raise UnavailableError(f"its health check failed {failures} times: {done.output[-500:].strip()}")
            await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)

    async def execute(
        self,
        command: str,
        *,
        timeout: float,
        user: str | int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command in a new ``bash``, for at most ``timeout`` seconds. Raises UnavailableError if Docker fails."""
        run = partial(
            self._execute, command, timeout, self._user if user is None else str(user), dict(environment or {})
        )
        return await self._containers.call_docker(run, timeout=timeout + _GRACE)

    def _execute(self, command: str, timeout: float, user: str, environment: dict[str, str]) -> CommandResult:
        began, kept, full = time.monotonic(), bytearray(), False
        with self._start_process(["bash", "-c", _RUN, f"{timeout:.3f}", command], user, environment) as (run, chunks):
            for chunk in chunks:  # read to the end, because Docker blocks otherwise
                kept += chunk[: _MOST_OUTPUT - len(kept)]
                if len(kept) == _MOST_OUTPUT and not full:
                    full = True
                    group = kept.partition(b"\n")[0].decode()
                    kill = partial(self._run_without_limits, f"kill -9 -- -{group} {group}", user)
                    # Kill in a thread, because `kill` cannot start until the output of the command is read.
                    threading.Thread(target=_call_ignoring_docker_errors, args=(kill,), daemon=True).start()
        code = int(self._containers.client.api.exec_inspect(run)["ExitCode"] or 0)
        late = code >= _TIMED_OUT and time.monotonic() - began >= timeout
        first, _, rest = bytes(kept).partition(b"\n")
        output = rest if first.isdigit() else bytes(kept)  # Docker's error message, for example if there is no bash
        return CommandResult(
            output=output.decode(errors="replace"),
            exit_code=code,
            stopped=f"its output exceeded {_MOST_OUTPUT} bytes" if full else f"it took {timeout:g} s" if late else "",
        )

    def _run_without_limits(self, command: str, user: str) -> None:
        """Run a bash command without limits, even if no further process can be forked."""
        with self._start_process(["bash", "-c", command], user, {}) as (_, chunks):
            for _ in chunks:
                pass

    @contextlib.contextmanager
    def _start_process(
        self, words: list[str], user: str, environment: dict[str, str]
    ) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Start a process in the container. Yields its name and its output."""
        api = self._containers.client.api
        name: str = api.exec_create(self._container.id, words, user=user, environment=environment)["Id"]
        stream = api.exec_start(name, socket=True)
        api._disable_socket_timeout(stream)  # a command may print nothing for minutes
        try:
            yield name, _read_output_frames(stream._response.raw._fp.fp)
        finally:
            stream._response.close()  # the SDK does not close the connection

    async def run_verifier(self) -> float:
        """Run the task's tests and return the reward. Raises UnavailableError if they crash or report no reward."""
        verifier = self.task.config.verifier
        owner = self._user if verifier.user is None else verifier.user
        prepare = (
            "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier /logs/artifacts && "
            f"chown {owner} /tests /logs/verifier"
        )
        if self.task.config.agent.user is not None:
            # The agent's processes may still run. They must not read the expected results.
            prepare += " && chmod 700 /tests /logs/verifier"
        done = await self.execute(prepare, timeout=_GRACE, user="root")
        if done.exit_code:  # for example because the agent's processes have reached the process limit
            await self._containers.call_docker(partial(self._run_without_limits, "kill -9 -1", "root"), timeout=_GRACE)
            done = await self.execute(prepare, timeout=_GRACE, user="root")
        if done.exit_code:
            raise UnavailableError(f"the verifier of task {self.task.name} cannot be prepared: {done.output[-500:]}")
        await self._containers.call_docker(self._upload_tests)
        done = await self.execute(
            "/tests/test.sh >/logs/verifier/test-stdout.txt 2>&1",
            timeout=verifier.timeout_sec,
            user=verifier.user,
            environment=verifier.env,
        )
        try:
            if done.stopped or done.exit_code >= _SIGNALED:
                raise ValueError(done.stopped or f"it ended with exit code {done.exit_code}")
            return await self._containers.call_docker(self._read_reward_files)
        except ValueError as error:
            log = await self.execute("tail -c 500 /logs/verifier/test-stdout.txt", timeout=_GRACE, user="root")
            raise UnavailableError(
                f"the verifier of task {self.task.name} returned no reward: {error}\n{log.output.strip()}"
            ) from error

    def _upload_tests(self) -> None:
        network = self._containers.settings.verifier_network
        if network is not None:
            self._containers.client.networks.get("none").disconnect(self._container)
            self._containers.client.networks.get(network).connect(self._container)
        tests = self.task.directory / "tests"
        self._container.put_archive("/tests", _build_archive({path.name: path for path in tests.iterdir()}))

    def _read_reward_files(self) -> float:
        """Return the reward from the verifier's files. Raises ValueError if they contain none."""
        for name in ("reward.json", "reward.txt"):
            try:
                stream, _ = self._container.get_archive(f"/logs/verifier/{name}")
            except NotFound:
                continue
            data = bytearray()
            for chunk in stream:
                data += chunk[: _MOST_REWARD + tarfile.BLOCKSIZE - len(data)]
            refusal = f"{name} is not a file of at most {_MOST_REWARD >> 10} KiB"
            try:
                with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                    entry = archive.next()
                    if entry is None or not entry.isreg():
                        raise ValueError(refusal)
                    file = archive.extractfile(entry)
                    assert file is not None, "it is a regular file"
                    text = file.read().decode(errors="replace").strip()
            except tarfile.TarError as error:  # the file exceeds the limit, so the archive is truncated
                raise ValueError(refusal) from error
            return _parse_reward(text, name)
        raise ValueError("it wrote neither /logs/verifier/reward.txt nor reward.json")

    async def open_listener(self, port: int, image: str) -> socket.socket:
        """Return a socket of this process that listens on ``127.0.0.1:port`` in the container's network.

        A helper container of ``image`` opens the socket. The image must contain ``python3``. Raises UnavailableError
        if Docker fails.
        """
        return await self._containers.call_docker(
            partial(self._open_listener, port, image), timeout=_HELPER_SECONDS + _GRACE
        )

    def _open_listener(self, port: int, image: str) -> socket.socket:
        with (
            tempfile.TemporaryDirectory(prefix="agentrl-harbor-") as directory,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.bind(f"{directory}/socket")
            server.listen(1)
            server.settimeout(_HELPER_SECONDS)
            helper = self._containers.client.containers.create(
                image,
                ["-c", _LISTEN, str(port)],
                entrypoint=["python3"],
                user=f"{os.getuid()}:{os.getgid()}",  # this user may open the directory
                auto_remove=True,
                network_mode=f"container:{self._container.id}",
                volumes={directory: {"bind": "/run/agentrl", "mode": "rw"}},
                labels={LABEL: "helper"},
            )
            try:
                helper.start()
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(_HELPER_SECONDS)
                    _, sockets, _, _ = socket.recv_fds(connection, 1, 1)
            except BaseException:
                _call_ignoring_docker_errors(helper.remove, force=True)
                raise
        return socket.socket(fileno=sockets[0])

    async def close(self) -> None:
        """Remove the container. May be called more than once."""
        release, self._release = self._release, None
        if release is None:
            return
        try:
            # Shield the removal, so that a cancelled rollout still removes its container.
            with contextlib.suppress(UnavailableError):
                await asyncio.shield(asyncio.ensure_future(self._containers.call_docker(self._remove)))
        finally:
            release()

    def _remove(self) -> None:
        with self._lock:
            # Remove the container before closing stdin, so that the call waits until the container is removed.
            if self._container is not None:
                _call_ignoring_docker_errors(self._container.remove, force=True)
            if self._stdin is not None:
                self._stdin._response.close()


def _build_archive(paths: Mapping[str, Path]) -> bytes:
    """Return an archive of files and directories by name. All entries belong to root and are readable by all users."""

    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mode |= 0o755 if entry.isdir() or entry.name == "test.sh" else 0o444
        return entry

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, path in paths.items():
            archive.add(path, arcname=name, filter=owned)
    return data.getvalue()


def _read_output_frames(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the output in a stream of frames. Each frame begins with a header of 8 bytes.

    ``stream``: the buffered stream of a response. The SDK instead reads the socket below the buffer. It loses output
    that arrives together with the response's headers, for example while this machine is busy.
    """
    while len(head := stream.read(8)) == 8:
        left = int.from_bytes(head[4:], "big")
        while left and (chunk := stream.read1(left)):  # type: ignore[attr-defined]
            left -= len(chunk)
            yield chunk


def _call_ignoring_docker_errors(call: Callable[..., object], **options: object) -> None:
    """Call the Docker SDK. Ignores errors, for example if the container has exited."""
    with contextlib.suppress(DockerException, OSError):
        call(**options)


def _parse_reward(text: str, name: str) -> float:
    """Parse the reward from a file's text. Raises ValueError if the text contains no valid reward.

    >>> _parse_reward("0.5", "reward.txt"), _parse_reward('{"reward": 1, "speed": 3}', "reward.json")
    (0.5, 1.0)
    """
    if name == "reward.txt":
        return as_reward(float(text))
    try:
        values = json.loads(text)
    except RecursionError:
        raise ValueError("reward.json is nested too deeply") from None
    if isinstance(values, dict):
        values = values.get("reward") if "reward" in values or len(values) != 1 else next(iter(values.values()))
    return as_reward(values)
