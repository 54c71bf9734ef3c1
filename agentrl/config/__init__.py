"""A run's settings: composition, layers, checks and error messages. Imports no heavy library."""

from agentrl.config.checks import Command, check_settings, settings_warnings
from agentrl.config.layers import load_settings, run_config_for_model
from agentrl.config.overlays import find_config, shipped_config, shipped_configs
from agentrl.config.settings import (
    RESUME_MAY_CHANGE,
    Settings,
    dump_yaml,
    may_change_on_resume,
    resume_conflicts,
)

__all__ = [
    "RESUME_MAY_CHANGE",
    "Command",
    "Settings",
    "check_settings",
    "dump_yaml",
    "find_config",
    "load_settings",
    "may_change_on_resume",
    "resume_conflicts",
    "run_config_for_model",
    "settings_warnings",
    "shipped_config",
    "shipped_configs",
]
