"""How often the 95 % intervals of ``agentrl.evaluation`` hold the truth, in simulated evaluations.

    python benchmarks/coverage.py [--runs 2000] [--seed 0]

Every row is a population of problems: each problem's success rate is fixed (*this benchmark*) or drawn anew in every
run (*problems like these*). Target for *this benchmark*, n >= 2 and at least 3 expected successes and failures: 0.93 to
0.97, that is 0.95 give or take the four standard errors of 2,000 runs. The last columns compare two runs by problem,
the second with its success rates moved a fifth of the way towards a half.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from agentrl.evaluation.results.differences import difference_on_problems_like_these, difference_on_this_benchmark
from agentrl.evaluation.results.scores import Floats, Interval, avg_at_k

Population = Callable[[np.random.Generator, int], Floats]

POPULATIONS: dict[str, Population] = {
    "all 0.005": lambda rng, problems: np.full(problems, 0.005),
    "all 0.01": lambda rng, problems: np.full(problems, 0.01),
    "all 0.5": lambda rng, problems: np.full(problems, 0.5),
    "all 0.99": lambda rng, problems: np.full(problems, 0.99),
    "beta(0.05, 2)": lambda rng, problems: rng.beta(0.05, 2, problems),
    "beta(0.5, 5)": lambda rng, problems: rng.beta(0.5, 5, problems),
    "beta(0.3, 0.3)": lambda rng, problems: rng.beta(0.3, 0.3, problems),
    "beta(8, 2)": lambda rng, problems: rng.beta(8, 2, problems),
    "beta(2, 0.05)": lambda rng, problems: rng.beta(2, 0.05, problems),
    "1 in 10 half solved": lambda rng, problems: 0.5 * (rng.random(problems) < 0.1),
}


def main() -> None:
    """Print one row a population and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begun = time.monotonic()
    print("| problems x n | success rates | expected successes | this benchmark | problems like these |", end="")
    print(" difference, this benchmark | difference, problems like these |\n" + "|---" * 7 + "|")
    for problems, n in ((30, 32), (40, 32), (500, 32), (30, 8), (128, 4), (30, 1)):
        for name, population in POPULATIONS.items():
            expected, shares = coverage(population, problems, n, runs=arguments.runs, seed=arguments.seed)
            cells = " | ".join(f"{share:.3f}" for share in shares)
            print(f"| {problems} x {n} | {name} | {expected:.1f} | {cells} |", flush=True)
    print(f"\n{arguments.runs} runs a row, {time.monotonic() - begun:.0f} s")


def coverage(population: Population, problems: int, n: int, *, runs: int, seed: int) -> tuple[float, list[float]]:
    """Expected successes on the fixed problems, and the share of runs in which each of four intervals holds."""
    rng = np.random.default_rng(seed)
    fixed = population(rng, problems)
    many = population(rng, 1_000_000)
    truth, truth_moved = float(many.mean()), float((moved(many) - many).mean())
    n_P = np.full(problems, float(n))
    held = np.zeros(4)
    for _ in range(runs):
        first, second = rng.binomial(n, fixed), rng.binomial(n, moved(fixed))
        drawn = population(rng, problems)
        others, others_moved = rng.binomial(n, drawn), rng.binomial(n, moved(drawn))
        held += [
            holds(avg_at_k(n_P, first).this_benchmark, float(fixed.mean())),
            holds(avg_at_k(n_P, others).problems_like_these, truth),
            holds(difference_on_this_benchmark(n_P, first, n_P, second), float((moved(fixed) - fixed).mean())),
            holds(difference_on_problems_like_these(n_P, others, n_P, others_moved), truth_moved),
        ]
    return float(fixed.sum() * n), list(held / runs)


def moved(rates: Floats) -> Floats:
    """Another policy's success rates."""
    return rates + 0.2 * (0.5 - rates)


def holds(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high


if __name__ == "__main__":
    main()
