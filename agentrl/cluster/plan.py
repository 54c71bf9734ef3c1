"""Where bundles of resources fit, decided before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from agentrl.cluster.processes import Bundle, ClusterNode
from agentrl.errors import SettingsError


class UnplaceableError(SettingsError):
    """The cluster does not have what a run needs."""


def placed(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """A node of its own for each bundle. Raises UnplaceableError, which says what is missing.

    The first bundle must need the most of everything, and the others the same: then taking the tightest node that
    fits, bundle by bundle, finds a way if there is one.
    """
    free = sorted(nodes, key=lambda node: (node.gpus, node.cpus, node.address))
    chosen = []
    for bundle in bundles:
        node = next((node for node in free if node.gpus >= bundle.gpus and node.cpus >= bundle.cpus), None)
        if node is None:
            raise UnplaceableError(f"the run {_lacking(bundles, nodes)}")
        free.remove(node)
        chosen.append(node)
    return chosen


def plan_table(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode]) -> list[list[str]]:
    """A row for each node: name, address, GPUs and CPUs in use, of how many, and for what. Raises UnplaceableError."""
    taken = dict(zip([node.address for node in placed(bundles, nodes)], bundles, strict=True))
    rows = []
    for node in nodes:
        own = taken.get(node.address, Bundle(holds="", cpus=0))
        rows.append(
            [node.name, node.address, f"{own.gpus} of {node.gpus}", f"{own.cpus:g} of {node.cpus:g}", own.holds or "-"]
        )
    return rows


PLAN_COLUMNS = ("node", "address", "GPUs", "CPUs", "what for")


def _lacking(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode]) -> str:
    """What is needed and what there is, in GPUs if these are too few, otherwise in CPUs."""
    gpus, count = bundles[-1].gpus, len(bundles)
    few = sum(node.gpus >= gpus for node in nodes) < count or not any(node.gpus >= bundles[0].gpus for node in nodes)
    if few and bundles[0].gpus:
        return _compared("GPU", [bundle.gpus for bundle in bundles], nodes, lambda node: node.gpus)
    return _compared("CPU", [bundle.cpus for bundle in bundles], nodes, lambda node: node.cpus)


def _compared(
    what: str, needed: Sequence[float], nodes: Sequence[ClusterNode], of: Callable[[ClusterNode], float]
) -> str:
    wants = Counter(needed)
    first = " and ".join(
        f"{number} {'node' if number == 1 else 'nodes'} with {amount:g} {what}{'' if amount == 1 else 's'}"
        for amount, number in wants.items()
    )
    there = sorted(Counter(of(node) for node in nodes).items(), reverse=True)
    found = " and ".join(f"{number} with {amount:g}" for amount, number in there) or "none"
    return f"needs {first}, found {found}"
