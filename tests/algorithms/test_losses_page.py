"""docs/reference/losses.md lists exactly what is registered, with the defaults that hold."""

from dataclasses import MISSING, fields
from pathlib import Path

import torch

from agentrl.algorithms import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    LOSSES,
    REWARD_KL_ESTIMATORS,
    CorrectionOptions,
    rollout_correction,
)

PAGE = (Path(__file__).parents[2] / "docs/reference/losses.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def defaults(options: type) -> list[str]:
    assert all(field.default is not MISSING for field in fields(options))
    return [f"`{field.name}={field.default!r}`" for field in fields(options)]


def test_every_loss_with_its_options_and_aggregation():
    rows = {row[0].strip("`"): row for row in table("Losses")}
    assert sorted(rows) == list(LOSSES.names())
    for name, (_, _, options, aggregation, source) in rows.items():
        traits = LOSSES.traits(name)
        assert options.split() == defaults(LOSSES[name].options), name
        assert aggregation == f"`{traits.aggregation}`" + (" only" if len(traits.aggregations) == 1 else ""), name
        assert source, name


def test_every_aggregation():
    assert tuple(row[0].strip("`") for row in table("Aggregations")) == AGGREGATIONS


def test_every_kl_estimator():
    rows = table("KL to a reference policy")
    assert tuple(row[0].strip("`") for row in rows) == KL_ESTIMATORS
    assert tuple(row[0].strip("`") for row in rows if row[3] != "not supported") == REWARD_KL_ESTIMATORS


def test_every_option_of_the_correction():
    rows = table("Rollout correction")
    assert [row[0] for row in rows] == defaults(CorrectionOptions)
    first = {row[0].strip("`").partition("=")[0] for row in rows if row[2] == "yes"}
    changed = {"self_normalize": True, "ratio_mask": "token", "divergence_mask": "k3"}
    assert first == set(changed)
    for name, value in changed.items():
        assert CorrectionOptions(**{"weights": "token", name: value}).step_wide


def test_every_diagnostic():
    metrics = rollout_correction(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1)).metrics
    assert [name for name in metrics if name not in ("tokens", "trajectories") and f"`{name}`" not in PAGE] == []


def test_the_worked_example_prints_what_the_page_says(own_registries, capsys):
    section = PAGE.split("\n## Your own loss\n")[1]
    exec(compile(section.split("```python\n")[1].split("```")[0], "losses.md", "exec"), {})
    (printed,) = capsys.readouterr().out.splitlines()
    assert f"\nThis prints `{printed}`." in section
