"""Multi-turn tool-integrated reinforcement learning for language-model agents.

``train``, ``evaluate`` and ``load_run`` provide the commands of the command line to scripts and notebooks. ``play``
runs an environment without a model. Decorators register plug-ins by name: ``register_estimator``, ``register_loss``,
``register_metric``, ``register_tracker``, ``register_engine``, ``register_environment``, ``register_protocol``,
``register_tool`` and ``register_reward``. Every name is imported on first use.
"""

import importlib

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "EvaluatedStep": "agentrl.training.run.callbacks",
    "SavedCheckpoint": "agentrl.training.run.callbacks",
    "TrainedStep": "agentrl.training.run.callbacks",
    "evaluate": "agentrl.api.commands",
    "load_run": "agentrl.api.run",
    "play": "agentrl.api.play",
    "register_engine": "agentrl.rollout.engines.base",
    "register_environment": "agentrl_envs.registry",
    "register_estimator": "agentrl.algorithms",
    "register_loss": "agentrl.algorithms",
    "register_metric": "agentrl.telemetry.metrics",
    "register_protocol": "agentrl_envs.registry",
    "register_reward": "agentrl_envs.registry",
    "register_tool": "agentrl_envs.registry",
    "register_tracker": "agentrl.telemetry.trackers",
    "train": "agentrl.api.commands",
}
__all__ = ["__version__", *_PUBLIC_NAMES]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
