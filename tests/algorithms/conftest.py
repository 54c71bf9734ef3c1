"""What the tests of the algorithms share."""

import pytest

from agentrl.algorithms import ESTIMATORS, LOSSES


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test registers is gone after it: other tests in the same process list what is registered."""
    for registry in (ESTIMATORS, LOSSES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
