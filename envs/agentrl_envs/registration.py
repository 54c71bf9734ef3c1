"""Registers the gymnasium environments on import.

gymnasium 1.4 does not load plug-ins, so either include this module in the id or import it first::

    gymnasium.make("agentrl_envs.registration:agentrl/SimpleTIR-v0")

    import agentrl_envs.registration
    gymnasium.make("agentrl/SimpleTIR-v0")
"""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

SIMPLETIR_ID = "agentrl/SimpleTIR-v0"
REASONING_ID = "agentrl/Reasoning-v0"


def register_gymnasium_ids() -> None:
    """Register ``agentrl/SimpleTIR-v0`` and ``agentrl/Reasoning-v0``. Has no effect if they are already registered."""
    for name, face in ((SIMPLETIR_ID, "SimpleTIREnv"), (REASONING_ID, "ReasoningEnv")):
        if name not in registry:
            register(id=name, entry_point=f"agentrl_envs.gym:{face}")


register_gymnasium_ids()
