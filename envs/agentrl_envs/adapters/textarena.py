"""Single-player games of TextArena: ``--env textarena:GuessTheNumber-v0``, with the extra ``textarena``.

A problem is a seed of the game (``builtin:seeds``). The prompt is the game's opening text. The unchanged text of a turn
is the move, and the game's messages after the move are the observation. The game itself rejects invalid moves. The
reward is the game's final reward.
"""

from __future__ import annotations

import functools

import gymnasium

from agentrl_envs.adapters.gymnasium_text import GymnasiumEnvironment
from agentrl_envs.factory import PlainTextEnvironmentFactory
from agentrl_envs.registry import PluginError, did_you_mean, install_command
from agentrl_envs.settings import GymnasiumSettings

_PLAYER = 0


def textarena_environment(game: str) -> PlainTextEnvironmentFactory[GymnasiumSettings]:
    """Return the factory of environments of ``game``.

    Raises PluginError if the package is missing or the game is unknown.
    """
    try:
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise PluginError(
            f"environment textarena:{game}: {error}; install it: {install_command('textarena')}"
        ) from error
    if f"{game}-raw" not in ENV_REGISTRY:
        games = sorted(name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw"))
        raise PluginError(f"TextArena has no game {game!r}{did_you_mean(game, games)} ({len(games)} exist)")
    return PlainTextEnvironmentFactory(
        GymnasiumSettings, functools.partial(GymnasiumEnvironment, functools.partial(TextArenaGame, game))
    )


class TextArenaGame(gymnasium.Env[str, str]):
    """One game as a gymnasium text environment. ``options`` are passed to the game's constructor in TextArena."""

    def __init__(self, game: str, **options: object) -> None:
        import textarena

        self._game = textarena.make(f"{game}-raw", **options)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, object]]:
        """Start the game with ``seed``. Returns its opening text."""
        self._game.reset(num_players=1, seed=seed)
        return self._new_messages(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Make a move. The reward is 0 until the game ends."""
        done, _ = self._game.step(action)
        if not done:
            return self._new_messages(), 0.0, False, False, {}
        rewards, _ = self._game.close()
        reward = float((rewards or {}).get(_PLAYER, 0.0))
        return "", reward, True, False, {"verdict": "correct" if reward >= 1.0 else "incorrect"}

    def _new_messages(self) -> str:
        """Return the game's messages since the last move, without the player's messages."""
        _, messages = self._game.get_observation()
        return "".join(f"\n{text}\n" for speaker, text, _ in messages if speaker != _PLAYER)
