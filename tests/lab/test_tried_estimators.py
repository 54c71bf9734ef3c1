"""The baselines of benchmarks/tried_estimators.py: by hand, and that they end at `tir_otb`, `ogb`, `otb_isolated`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# In a process of its own: the module registers estimators.
PROGRAM = """
import torch, tried_estimators
from agentrl.algorithms import AdvantageInputs, compute_advantages

draw = torch.Generator().manual_seed(0)
mask = torch.rand(8, 12, generator=draw) < 0.7
mask[:, 0] = True
rewards = torch.zeros(8, 12, dtype=torch.float64)
rewards[torch.arange(8), 11 - mask.flip(-1).int().argmax(-1)] = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1]).double()
inputs = AdvantageInputs(rewards=rewards, response_mask=mask, groups=torch.arange(8) // 4,
                         token_energy=torch.rand(8, 12, generator=draw).double())
for leave_one_out in (False, True):
    for name, options, same in (
        ("otb_shrunk", {"trust": 1e-9}, "tir_otb"),
        ("otb_shrunk", {"trust": 1e9}, "ogb"),
        ("otb_smoothed", {"reach": 1e-3}, "otb_isolated"),
    ):
        found = compute_advantages(name, inputs, leave_one_out=leave_one_out, **options).advantages
        wanted = compute_advantages(same, inputs, leave_one_out=leave_one_out).advantages
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        middle = {"trust": 4.0} if name == "otb_shrunk" else {"reach": 8.0}
        other = compute_advantages(name, inputs, leave_one_out=leave_one_out, **middle).advantages
        assert (other - wanted).abs().max() > 1e-3, (name, leave_one_out)

# At the first token of group 0: W_0 G = 1, W_0 = 1 + 5; elsewhere 1 + 0.5 + 0 + 2 and 1 + 0.5 + 8 + 2, means over 4.
energy = torch.tensor([[1.0, 2.0], [5.0, 1.0], [1.0, 1.0], [0.5, 0.5], [8.0, 2.0], [2.0, 1.0]]).double()
rewards = torch.zeros_like(energy)
rewards[:, -1] = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
inputs = AdvantageInputs(rewards=rewards, response_mask=torch.ones(6, 2, dtype=torch.bool),
                         groups=torch.tensor([0, 0, 1, 1, 2, 2]), token_energy=energy)
found = compute_advantages("tir_otb_pooled", inputs, pool=2.0).baselines[:2, 0]
wanted = torch.full((2,), (1 + 2 * 3.5 / 4) / (6 + 2 * 11.5 / 4), dtype=torch.float64)
torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
print("same")
"""


def test_values_by_hand_and_limits_that_are_estimators_of_the_library() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=BENCHMARKS, capture_output=True, text=True)
    assert done.stdout == "same\n", done.stderr
