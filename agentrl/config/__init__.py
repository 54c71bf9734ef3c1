"""A run's settings: composition, layers, checks and error messages. Imports no heavy library."""

from agentrl.config.checks import Command, settings_warnings
from agentrl.config.layers import load_settings, run_config_for_model
from agentrl.config.overlays import shipped_config, shipped_configs
from agentrl.config.settings import (
    Settings,
    dump_yaml,
    may_change_on_resume,
    resume_conflicts,
)

__all__ = [
    "Command",
    "Settings",
    "dump_yaml",
    "load_settings",
    "may_change_on_resume",
    "resume_conflicts",
    "run_config_for_model",
    "settings_warnings",
    "shipped_config",
    "shipped_configs",
]
