"""benchmarks/rollout_simulation.py for tests; its folder is on no path, where rollout.py would hide this one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "rollout_simulation"
_FILE = Path(__file__).parents[2] / "benchmarks" / f"{_NAME}.py"

_spec = importlib.util.spec_from_file_location(_NAME, _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules[_NAME] = _module
_spec.loader.exec_module(_module)

Hardware = _module.Hardware
LockStep = _module.LockStep
SimulatedEngine = _module.SimulatedEngine
SimulatedEnvironment = _module.SimulatedEnvironment
run_virtual = _module.run_virtual
train_codec = _module.train_codec
