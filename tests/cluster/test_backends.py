"""A backend from outside the package is selected by name, and its traits take effect."""

from __future__ import annotations

import pytest

from agentrl.cluster.backends import ClusterBackend, has_many_nodes, open_cluster
from agentrl.cluster.local import LocalCluster
from agentrl.cluster.settings import ClusterSettings
from agentrl.config import load_settings
from agentrl.errors import SettingsError


class Farm(ClusterBackend):
    many_nodes = True

    def open(self, settings: ClusterSettings, gpus: object) -> LocalCluster:
        return LocalCluster(["0"] * settings.nodes)


def test_a_backend_is_selected_by_its_path() -> None:
    kind = f"{__name__}:Farm"
    settings = load_settings(overrides=[f"cluster={kind}", "cluster.nodes=2", "training.num_processes=2"])
    cluster = open_cluster(settings.cluster, None)
    assert [node.gpus for node in cluster.nodes()] == [2]
    assert has_many_nodes(kind)


@pytest.mark.parametrize("kind", ["auto", "local", "environment"])
def test_a_backend_of_one_machine_has_one_node(kind: str) -> None:
    assert not has_many_nodes(kind)
    assert isinstance(open_cluster(ClusterSettings(kind=kind), None), LocalCluster)


def test_an_unknown_backend_is_named_with_the_valid_ones() -> None:
    with pytest.raises(SettingsError, match=r"unknown cluster 'rey'.*did you mean.*ray.*valid: auto, "):
        load_settings(overrides=["cluster=rey"])
