"""A head whose vocabulary is spread over two ranks, against the whole head on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.cases import FIELDS
from kernels.sharded_on_ranks import CASES, inputs, loss_of
from ranks import finish, start_ranks

from agentrl.kernels import token_statistics

pytestmark = [pytest.mark.slow, pytest.mark.on_device]

SCRIPT = Path(__file__).with_name("sharded_on_ranks.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks computed."""
    folder = tmp_path_factory.mktemp("ranks")
    outputs = [folder / f"{rank}.pt" for rank in range(2)]
    finish(start_ranks(SCRIPT, outputs, shared_gpu=True), seconds=300)
    return [torch.load(output, weights_only=False) for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_what_the_whole_head_gives(results: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]
    hidden, weight, bias, targets = inputs(case)
    whole = token_statistics(
        hidden.double(),
        weight.double(),
        targets,
        temperature=case.temperature,
        bias=None if bias is None else bias.double(),
        backend="reference",
    )
    loss_of(whole).backward()
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[case.dtype]
    values = min(bound, 1e-5)
    for rank in results:
        for field in (*FIELDS, "hidden_norm_squared"):
            expected = getattr(whole, field).detach()
            torch.testing.assert_close(rank[name][field].double(), expected, rtol=values, atol=values / 100)
    for part in ("hidden", "weight", "bias"):
        given = {"hidden": hidden, "weight": weight, "bias": bias}[part]
        if given is None:
            continue
        found = [rank[name][part] for rank in results]
        if part == "hidden":
            assert torch.equal(found[0], found[1])
            joined = found[0]
        else:
            joined = torch.cat(found)
        assert joined.dtype == case.dtype
        torch.testing.assert_close(joined.double(), given.grad.double(), rtol=bound, atol=bound)


def test_what_does_not_fit_is_told_on_every_rank(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["errors"] == [
            "rank 1 of the group has no row of the head; rows by rank: [11, 0]",
            "targets must lie in [0, 11); got 0 to 11",
        ]


def test_the_targets_lie_on_both_ranks() -> None:
    for case in CASES.values():
        *_, targets = inputs(case)
        assert {bool(target < case.split) for target in targets} == {True, False}
