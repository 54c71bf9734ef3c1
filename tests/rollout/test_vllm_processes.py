"""How servers are started and ended, without vLLM: their command lines, their places, the process that watches them."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.cluster.local import THIS_MACHINE, LocalProcess
from agentrl.cluster.processes import ProcessSpec, gpus_visible_before_launch
from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.models.settings import ModelSettings
from agentrl.rollout.engines.pooled_server import ServerLoad, choose_server
from agentrl.rollout.engines.processes import ServerProcess
from agentrl.rollout.engines.vllm.plan import (
    VLLMPlan,
    colocated_memory_fraction,
    plan_policy_servers,
    plan_servers_on_gpus,
)
from agentrl.rollout.settings import RolloutSettings


def plans(
    *,
    gpus: int = 0,
    ranks: int = 1,
    backend: str = "file",
    memory_fraction: float = 0.85,
    **vllm: Any,
) -> list[VLLMPlan]:
    plan = VLLMPlan(
        rollout=RolloutSettings(engine="vllm", max_prompt_tokens=100, max_response_tokens=200, vllm=vllm),
        max_tokens=300,
        model="served",
        tokenizer="policy",
        dtype="bfloat16",
        host="127.0.0.1",
        port=0,
        backend=backend,
        memory_fraction=memory_fraction,
    )
    return plan_servers_on_gpus(plan, gpus=[str(number) for number in range(gpus)], training_gpus=ranks)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_a_server_on_the_cpu_is_configured_for_training() -> None:
    (plan,) = plans(extra_args=["--max-num-seqs", "7"])
    command, environment = plan.arguments(), plan.environment_variable_changes()
    assert command[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert {name: option(command, name) for name in ("--model", "--tokenizer", "--dtype", "--max-model-len")} == {
        "--model": "served",
        "--tokenizer": "policy",
        "--dtype": "bfloat16",
        "--max-model-len": "300",
    }
    assert option(command, "--logprobs-mode") == "processed_logprobs"
    assert option(command, "--generation-config") == "vllm"
    assert {"--enable-scale-out", "--enable-prefix-caching", "--enforce-eager"} <= set(command)
    assert "--no-enable-chunked-prefill" in command
    assert command[-2:] == ["--max-num-seqs", "7"]
    absent = {"--enable-sleep-mode", "--weight-transfer-config", "--tensor-parallel-size", "--hf-overrides"}
    assert not absent & set(command)
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["RANK"] is environment["MASTER_PORT"] is None  # unset
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment


@pytest.mark.parametrize(
    ("free", "largest", "expected"),
    [
        (64.5, 0, "0.78"),  # of 80 GiB beside 15 GB of parameters, with 2 GiB of margin
        (64.5, 2, "0.73"),  # with 2 + 2 x 2 GiB of margin
        (79.5, 0, "0.85"),
        (6.0, 0, "0.05"),
    ],
)
def test_a_colocated_server_takes_what_training_leaves(free: float, largest: int, expected: str) -> None:
    fraction = colocated_memory_fraction(int(free * 2**30), 80 * 2**30, largest=largest * 2**30)
    (plan,) = plans(gpus=1, placement="colocated", memory_fraction=fraction)
    assert option(plan.arguments(), "--gpu-memory-utilization") == expected


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
def test_an_explicit_memory_fraction_is_not_measured() -> None:
    (plan,) = plan_policy_servers(
        RolloutSettings(engine="vllm", vllm={"placement": "colocated", "gpu_memory_utilization": 0.4}),
        ModelSettings(),
        "policy",
        served="served",
        longest=300,
        training_gpus=1,
        backend="ipc",
        gpus=["0"],  # not on this machine: reading its memory would raise
    )
    assert option(plan.arguments(), "--gpu-memory-utilization") == "0.4"


def test_too_little_memory_beside_training_is_said_before_a_server_starts() -> None:
    with pytest.raises(SettingsError, match=r"training leaves 5\.0 of 80\.0 GiB .*placement=dedicated"):
        colocated_memory_fraction(5 * 2**30, 80 * 2**30)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"gpus": 8, "ranks": 4, "replicas": 2, "tensor_parallel_size": 2}, ["4,5", "6,7"]),
        ({"gpus": 4, "ranks": 4, "replicas": 2, "tensor_parallel_size": 2, "placement": "colocated"}, ["0,1", "2,3"]),
        ({"gpus": 2, "ranks": 2, "replicas": 2, "devices": [9, 7]}, ["9", "7"]),
    ],
)
def test_servers_get_gpus_of_their_own(arguments: dict[str, Any], expected: list[str]) -> None:
    made = plans(backend="nccl", **arguments)
    assert [plan.environment_variable_changes()["CUDA_VISIBLE_DEVICES"] for plan in made] == expected
    assert len({plan.address for plan in made}) == len(made)
    for plan in made:
        assert option(plan.arguments(), "--tensor-parallel-size") == str(len(plan.gpus))
        assert option(plan.arguments(), "--weight-transfer-config") == '{"backend": "nccl"}'
        assert option(plan.arguments(), "--hf-overrides") == '{"head_dtype": "float32"}'
        sleeps = arguments.get("placement") == "colocated"
        for name in ("--enable-sleep-mode", "--sleep-mode-offload-cudagraph"):
            assert (name in plan.arguments()) == sleeps


def test_ipc_handles_may_travel() -> None:
    (plan,) = plans(gpus=1, backend="ipc", placement="colocated")
    assert plan.environment_variable_changes()["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": "colocated"}, "colocated needs GPUs .* no GPU is visible"),
        ({"tensor_parallel_size": 2}, "need GPUs, but none is visible"),
        ({"gpus": 4, "ranks": 3, "replicas": 2}, r"2 servers with 1 GPUs each need 2 GPUs, but only 1 of the 4"),
    ],
)
def test_servers_that_fit_nowhere(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plans(**arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"placement": "external"}, "addresses must be set for placement=external"),
        ({"addresses": ["http://a:1"]}, "addresses must be set for placement=external"),
        ({"devices": [1], "replicas": 2}, "got 1"),
        ({"placement": "colocated", "transfer": "nccl"}, "set transfer=ipc"),
    ],
)
def test_settings_that_contradict_one_another(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSettings(vllm=settings)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.deterministic=true"], "training.deterministic=true requires rollout.engine=transformers"),
        (["rollout.vllm.addresses=[localhost:8000]"], "'localhost:8000' is not an address; valid: http://HOST:PORT"),
        (
            ["rollout.vllm.placement=colocated", "rollout.vllm.addresses=[]", "training.zero_stage=3"],
            "off the GPU only at stages 1 and 2",
        ),
    ],
)
def test_a_run_that_servers_cannot_serve_does_not_begin(overrides: list[str], message: str) -> None:
    external = ["rollout.vllm.placement=external", "rollout.vllm.addresses=[http://localhost:8000]"]
    with pytest.raises(SettingsError, match=re.escape(message)):
        load_settings(overrides=["rollout.engine=vllm", *external, *overrides])


def test_gpus_are_those_from_before_a_launcher_gave_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_GPUS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_visible_before_launch(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert gpus_visible_before_launch(2) == ["4", "5"]
    monkeypatch.setenv("AGENTRL_GPUS", "4,5,6,7")
    assert gpus_visible_before_launch(2) == ["4", "5", "6", "7"]


# -- processes ------------------------------------------------------------------------------------------------------

# A server of two processes, of which the first says both numbers.
FAMILY = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}\\n')\n"
    "time.sleep(600)"
)
# Someone who wants a server, and waits.
PARENT = (
    "import os, subprocess, sys, time\n"
    "supervise = [sys.executable, '-m', 'agentrl.cluster.supervise', str(os.getpid())]\n"
    "subprocess.Popen([*supervise, *sys.argv[1:]])\n"
    "time.sleep(600)"
)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


def family(file: Path) -> list[psutil.Process]:
    text = wait_for(lambda: file.exists() and file.read_text().endswith("\n") and file.read_text())
    return [psutil.Process(int(number)) for number in text.split()]


def assert_gone(processes: list[psutil.Process]) -> None:
    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # it ended between the two calls
            return False

    wait_for(lambda: not any(map(runs, processes)))


@pytest.mark.parametrize("who", ["parent", "server", "supervisor is told"])
def test_a_server_ends_whole_whoever_ends_first(tmp_path: Path, who: str) -> None:
    command = [sys.executable, "-c", FAMILY, str(tmp_path / "pids")]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *command])
    try:
        server, child = family(tmp_path / "pids")
        supervisor = server.parent()
        assert supervisor is not None
        {"parent": parent.kill, "server": server.kill, "supervisor is told": supervisor.terminate}[who]()
        assert_gone([server, child, supervisor])
    finally:
        parent.kill()
        parent.wait()


def test_a_server_that_is_killed_at_once_ends_whole(tmp_path: Path) -> None:
    arguments = ("-c", FAMILY, str(tmp_path / "pids"))
    process = LocalProcess(ProcessSpec(role="server", number=0, arguments=arguments, supervised=True), THIS_MACHINE)
    server, child = family(tmp_path / "pids")
    process.wait_or_kill(0.0)
    assert_gone([server, child])


def test_the_last_words_of_a_server_are_those_that_tell(tmp_path: Path) -> None:
    class Failing(VLLMPlan):
        def arguments(self) -> list[str]:
            lines = "print('INFO starting'); print('ValueError: no such model'); print('INFO bye'); raise SystemExit(1)"
            return ["-c", lines]

    served = {"model": "m", "tokenizer": "m", "dtype": "float32", "max_tokens": 10}
    plan = Failing(rollout=RolloutSettings(), host="127.0.0.1", port=1, **served)  # type: ignore[arg-type]
    server = ServerProcess(plan, tmp_path)
    assert server.log_excerpt() == "(the log is empty)"
    server.launch()
    wait_for(lambda: server.has_exited)
    assert server.log_excerpt() == "ValueError: no such model"
    server.stop()


def test_a_supervisor_whose_parent_is_gone_starts_nothing_that_stays(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-c", FAMILY, str(tmp_path / "pids")]
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cluster.supervise", str(gone.pid), *command],
        timeout=60,
        env=os.environ,
    )
    assert done.returncode == 256 - signal.SIGKILL


# -- balance --------------------------------------------------------------------------------------------------------


def test_load_counts_what_may_still_be_sampled() -> None:
    loads = [ServerLoad(), ServerLoad()]
    with (
        loads[0].count_request("short", context=10, reserved=1000),
        loads[1].count_request("long", context=500, reserved=100),
    ):
        assert choose_server(loads, "new", context=10) == 1


def test_a_full_server_and_one_that_is_down_get_nothing() -> None:
    loads = [ServerLoad(limit=1), ServerLoad(is_up=False), ServerLoad(tokens=1000)]
    with loads[0].count_request("a", context=1, reserved=1):
        assert choose_server(loads, "new", context=1) == 2
        loads[2].is_up = False
        assert choose_server(loads, "new", context=1) is None
    assert choose_server(loads, "new", context=1) == 0


def test_a_server_that_failed_a_request_is_asked_again_only_if_no_other_is_up() -> None:
    loads = [ServerLoad(), ServerLoad(tokens=2000)]
    assert choose_server(loads, "t", context=1, failed_servers=frozenset({0})) == 1
    loads[1].is_up = False
    assert choose_server(loads, "t", context=1, failed_servers=frozenset({0})) == 0
