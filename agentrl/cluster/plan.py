"""Assignment of resource bundles to nodes, before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from agentrl.cluster.processes import Bundle, ClusterNode
from agentrl.errors import SettingsError


class UnplaceableError(SettingsError):
    """The cluster has too few resources for a run."""


def assign_nodes(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Assign each bundle to a different node. Raises UnplaceableError with the missing resources.

    The first bundle must be at least as large as every other bundle in every resource. All other bundles must be equal.
    Under these conditions, choosing the smallest sufficient node for each bundle succeeds whenever an assignment
    exists.
    """
    free = sorted(nodes, key=lambda node: (node.gpus, node.cpus, node.address))
    chosen = []
    for bundle in bundles:
        node = next((node for node in free if node.gpus >= bundle.gpus and node.cpus >= bundle.cpus), None)
        if node is None:
            raise UnplaceableError(f"the run {_describe_shortage(bundles, nodes)}")
        free.remove(node)
        chosen.append(node)
    return chosen


def nodes_with_capacity(
    bundle: Bundle, nodes: Sequence[ClusterNode], taken: Mapping[str, Sequence[Bundle]]
) -> list[ClusterNode]:
    """Return the nodes with room for another bundle. ``taken`` maps node addresses to the bundles placed there.

    Raises UnplaceableError if there is no such node.
    """
    free = [(node, *_free_capacity(node, taken.get(node.address, ()))) for node in nodes]
    sufficient = [node for node, gpus, cpus in free if gpus >= bundle.gpus and cpus >= bundle.cpus]
    if not sufficient:
        raise UnplaceableError(
            f"no node has room for {bundle.purpose} ({_format_resources(bundle.gpus, bundle.cpus)}); available: "
            + ", ".join(f"{_format_resources(gpus, cpus)} on {node.name}" for node, gpus, cpus in free)
        )
    return sufficient


def place_bundles(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode], taken: dict[str, list[Bundle]]) -> None:
    """Add each bundle to ``taken``, on the fullest node with room. Raises UnplaceableError if no node has room."""
    for bundle in bundles:
        room = nodes_with_capacity(bundle, nodes, taken)
        tightest = min(room, key=lambda node: (*_free_capacity(node, taken.get(node.address, ())), node.address))
        taken.setdefault(tightest.address, []).append(bundle)


def placement_table(
    bundles: Sequence[Bundle],
    nodes: Sequence[ClusterNode],
    *,
    beside: Sequence[Bundle] = (),
    everywhere: Bundle | None = None,
) -> list[list[str]]:
    """Return a row per node: name, address, used and total GPUs, used and total CPUs, and purpose.

    ``beside`` contains further bundles, which may share a node. ``everywhere`` is added to each node with room for it.
    Raises UnplaceableError if a bundle does not fit.
    """
    taken: dict[str, list[Bundle]] = {node.address: [] for node in nodes}
    for node, bundle in zip(assign_nodes(bundles, nodes), bundles, strict=True):
        taken[node.address].append(bundle)
    place_bundles(beside, nodes, taken)
    if everywhere is not None:
        for node in nodes_with_capacity(everywhere, nodes, taken):
            taken[node.address].append(everywhere)
    rows = []
    for node in nodes:
        gpus, cpus = _total_resources(taken[node.address])
        purpose = ", ".join(bundle.purpose for bundle in taken[node.address])
        rows.append([node.name, node.address, f"{gpus} of {node.gpus}", f"{cpus:g} of {node.cpus:g}", purpose or "-"])
    return rows


PLAN_COLUMNS = ("node", "address", "GPUs", "CPUs", "purpose")


def _total_resources(bundles: Sequence[Bundle]) -> tuple[int, float]:
    """Return the total GPUs and CPUs of the bundles."""
    return sum(bundle.gpus for bundle in bundles), sum(bundle.cpus for bundle in bundles)


def _free_capacity(node: ClusterNode, bundles: Sequence[Bundle]) -> tuple[int, float]:
    """Return the GPUs and CPUs of a node that are not in use."""
    gpus, cpus = _total_resources(bundles)
    return node.gpus - gpus, node.cpus - cpus


def _format_resources(gpus: int, cpus: float) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}, {cpus:g} CPU{'' if cpus == 1 else 's'}"


def _describe_shortage(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode]) -> str:
    """Describe the shortage: required and available GPUs or, if there are enough GPUs, CPUs."""
    gpus, count = bundles[-1].gpus, len(bundles)
    few = sum(node.gpus >= gpus for node in nodes) < count or not any(node.gpus >= bundles[0].gpus for node in nodes)
    if few and bundles[0].gpus:
        return _compare_with_nodes("GPU", [bundle.gpus for bundle in bundles], nodes, lambda node: node.gpus)
    return _compare_with_nodes("CPU", [bundle.cpus for bundle in bundles], nodes, lambda node: node.cpus)


def _compare_with_nodes(
    resource: str, needed: Sequence[float], nodes: Sequence[ClusterNode], amount_of: Callable[[ClusterNode], float]
) -> str:
    required = " and ".join(
        f"{number} {'node' if number == 1 else 'nodes'} with {amount:g} {resource}{'' if amount == 1 else 's'}"
        for amount, number in Counter(needed).items()
    )
    available = sorted(Counter(amount_of(node) for node in nodes).items(), reverse=True)
    present = " and ".join(f"{number} with {amount:g}" for amount, number in available) or "none"
    return f"requires {required}, but the cluster has {present}"
