"""Tell gymnasium of our environments (called by gymnasium through its plug-in entry point)."""

from __future__ import annotations

from gymnasium.envs.registration import register

SIMPLETIR_ID = "agentrl/SimpleTIR-v0"


def register_envs() -> None:
    """Register ``agentrl/SimpleTIR-v0``."""
    register(id=SIMPLETIR_ID, entry_point="agentrl_envs.gym_env:SimpleTIREnv")
