"""The ladder of horizons: solvable as demonstrated, in as many turns as named, not answerable without looking."""

import pytest
from problems.test_arithmetic import assert_solves

from agentrl.problems.horizon import HORIZON_FAMILIES, HorizonSource


@pytest.mark.parametrize("family", list(HORIZON_FAMILIES))
def test_demonstrations_solve_their_problems_in_the_turns_that_the_name_says(family: str):
    turns = int(family.rpartition("_")[2])
    for split in ("train", "heldout"):
        lengths = set()
        for demonstration in HorizonSource(split=split, seed=3, families=[family]).demonstrations(300):
            assert_solves(demonstration)
            lengths.add(len(demonstration.turns))
        assert max(lengths) == turns
        assert len(lengths) == 1 or family.startswith("search")
