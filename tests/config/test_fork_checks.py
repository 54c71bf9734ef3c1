"""What needs whole rollouts is refused with forked rollouts, before a run starts."""

from __future__ import annotations

import pytest
from config.support import refused

from agentrl.config import load_settings

FORKS = "rollout.branching.width=2"


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("reward.overlong_buffer=64", "reward.overlong_buffer"),
        ("algorithm.estimator=otb", "algorithm.estimator=otb"),
        ("algorithm.loss=gspo", "algorithm.loss=gspo"),
        ("correction.weights=sequence", "correction.weights=sequence"),
        ("algorithm.void_turns=mask", "algorithm.void_turns=mask"),
        ("algorithm.truncated=mask", "algorithm.truncated=mask"),
        ("reward.functions={environment: 1.0}", "reward.functions"),
        ("environment.history=template", "environment.history=template"),
    ],
)
def test_a_setting_that_needs_whole_rollouts_is_named(override: str, named: str) -> None:
    message = refused(FORKS, override)
    assert FORKS in message
    assert named in message


def test_an_mcp_server_with_state_is_named() -> None:
    server = ["environment.protocol=hermes", "environment.tools=[mcp:server]"]
    assert "mcp:server" in refused(FORKS, *server)


def test_forks_alone_are_valid() -> None:
    assert load_settings("simpletir", "tiny", [FORKS]).rollout.branching.max_leaves == 2


def test_the_placement_of_forks_is_validated() -> None:
    message = refused(FORKS, "rollout.branching.where=entropy")
    assert "expected a list of turns, entropy>X, energy>X or measured" in message
    assert 'rollout.branching.where="entropy"' in message
    settings = load_settings("simpletir", "tiny", [FORKS, "rollout.branching.where=energy>0.5"])
    assert settings.rollout.branching.max_leaves == 16


def test_the_sessions_of_trees_are_limited() -> None:
    session = ["environment.interpreter=session", "rollout.concurrency=64", "rollout.branching.width=4"]
    assert "may hold 80 sessions" in refused(*session)  # 16 trees of 4 branches and the session that forked
    load_settings("simpletir", "tiny", [*session, "sandbox.max_sessions=80"])
    many = ["rollout.branching.width=2", "rollout.branching.leaves=17", "rollout.branching.live=17"]
    many += ["rollout.branching.where=measured", "sandbox.max_sessions=200", *session[:2]]
    assert "sandbox.max_processes=32: the 48 sessions of a tree share max_processes" in refused(*many)
