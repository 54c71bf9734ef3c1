"""Tell gymnasium of our environments: importing this module registers them.

gymnasium 1.4 loads no plug-ins by itself, so either name the module in the id or import it first::

    gymnasium.make("agentrl_envs.registration:agentrl/SimpleTIR-v0")

    import agentrl_envs.registration
    gymnasium.make("agentrl/SimpleTIR-v0")
"""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

SIMPLETIR_ID = "agentrl/SimpleTIR-v0"
REASONING_ID = "agentrl/Reasoning-v0"


def register_envs() -> None:
    """Register ``agentrl/SimpleTIR-v0`` and ``agentrl/Reasoning-v0``; a second call does nothing."""
    for name, face in ((SIMPLETIR_ID, "SimpleTIREnv"), (REASONING_ID, "ReasoningEnv")):
        if name not in registry:
            register(id=name, entry_point=f"agentrl_envs.gym:{face}")


register_envs()
