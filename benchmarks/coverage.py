"""Measure the coverage of the 95 % intervals of ``agentrl eval``, ``agentrl compare`` and ``agentrl study``.

    python benchmarks/coverage.py [--runs 2000] [--seed 0] [--tables scores,moves,seeds]

Coverage is the share of simulated evaluations whose interval contains the true value.

- ``scores``: every row is a population of problems. Each problem's success rate is fixed (*this benchmark*) or drawn
  anew in every run (*problems like these*). Target for *this benchmark*, n >= 2 and at least 3 expected successes and
  failures: 0.93 to 0.97, which is 0.95 plus or minus four standard errors of 2,000 runs. The last columns compare two
  runs by problem; the second has its success rates moved a fifth of the way towards a half.
- ``moves``: comparisons of two runs in which few problems change; all others are always right or always wrong.
- ``seeds``: means and interquartile means over the seeds of a study.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from agentrl.evaluation.compare import difference_on_problems_like_these, difference_on_this_benchmark
from agentrl.evaluation.scores import Floats, Interval, avg_at_k
from agentrl.lab.study.statistics import MeanWithInterval, interquartile_mean, mean_over_seeds

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

MOVES = {
    "10 % from 0 to 1": (0.1, 0.0, 1.0),
    "10 % from 0.5 to 0.8": (0.1, 0.5, 0.8),
    "10 % from 0.3 to 0.6": (0.1, 0.3, 0.6),
    "5 % from 0 to 1": (0.05, 0.0, 1.0),
    "20 % from 0.5 to 0.8": (0.2, 0.5, 0.8),
    "10 % at 0.5, no change": (0.1, 0.5, 0.5),
    "all at 0.5, no change": (1.0, 0.5, 0.5),
}
"""Share of problems that change, and their success rates before and after."""

SEEDS: dict[str, Population] = {
    "normal": lambda rng, seeds: rng.normal(size=seeds),
    "beta(8, 1)": lambda rng, seeds: rng.beta(8, 1, seeds),
    "0.8, one in ten collapses": lambda rng, seeds: np.where(
        rng.random(seeds) < 0.1, 0.1, rng.normal(0.8, 0.05, seeds)
    ),
    "0.8, one in five collapses": lambda rng, seeds: np.where(
        rng.random(seeds) < 0.2, 0.1, rng.normal(0.8, 0.05, seeds)
    ),
}


def main() -> None:
    """Print one row for each population and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tables", default=",".join(TABLES), help="tables to print, separated by commas")
    arguments = parser.parse_args()
    begun = time.monotonic()
    for table in arguments.tables.split(","):
        TABLES[table](arguments.runs, arguments.seed)
    print(f"{arguments.runs} runs per row, {time.monotonic() - begun:.0f} s")


def print_scores(runs: int, seed: int) -> None:
    """Print the table ``scores``."""
    print("| problems x n | success rates | expected successes | this benchmark | problems like these |", end="")
    print(" difference, this benchmark | difference, problems like these |\n" + "|---" * 7 + "|")
    for problems, n in ((30, 32), (40, 32), (500, 32), (30, 8), (128, 4), (30, 1)):
        for name, population in POPULATIONS.items():
            expected, shares = coverage(population, problems, n, runs=runs, seed=seed)
            cells = " | ".join(f"{share:.3f}" for share in shares)
            print(f"| {problems} x {n} | {name} | {expected:.1f} | {cells} |", flush=True)
    print()


def print_moves(runs: int, seed: int) -> None:
    """Print the table ``moves``."""
    print("| problems x n | problems that change | coverage | mean width |\n" + "|---" * 4 + "|")
    for problems, n in ((30, 32), (100, 8), (500, 32), (30, 4)):
        for name, (share, before, after) in MOVES.items():
            rng = np.random.default_rng(seed)
            n_P, truth, held, width = np.full(problems, float(n)), share * (after - before), 0, 0.0
            for _ in range(runs):
                fixed, moves = rng.integers(0, 2, problems), rng.random(problems) < share
                first, second = (rng.binomial(n, np.where(moves, rate, fixed)) for rate in (before, after))
                interval = difference_on_problems_like_these(n_P, first, n_P, second)
                held, width = held + holds(interval, truth), width + interval.high - interval.low
            print(f"| {problems} x {n} | {name} | {held / runs:.3f} | {width / runs:.3f} |", flush=True)
    print()


def print_seeds(runs: int, seed: int) -> None:
    """Print the table ``seeds``."""
    print("| seeds | scores | mean | interquartile mean |\n" + "|---" * 4 + "|")
    for seeds in (3, 5, 10, 20):
        for name, population in SEEDS.items():
            rng = np.random.default_rng(seed)
            many = population(rng, 1_000_000)
            drawn = [population(rng, seeds) for _ in range(runs)]
            shares = []
            for summary in (mean_over_seeds, interquartile_mean):
                truth = summary(many).value
                shares.append(sum(holds(summary(scores), truth) for scores in drawn) / runs)
            print(f"| {seeds} | {name} | {shares[0]:.3f} | {shares[1]:.3f} |", flush=True)
    print()


TABLES = {"scores": print_scores, "moves": print_moves, "seeds": print_seeds}


def coverage(population: Population, problems: int, n: int, *, runs: int, seed: int) -> tuple[float, list[float]]:
    """Return the expected successes on the fixed problems, and the coverage of each of four intervals."""
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
    """Return the success rates of another policy."""
    return rates + 0.2 * (0.5 - rates)


def holds(interval: Interval | MeanWithInterval, value: float) -> bool:
    return interval.low <= value <= interval.high


if __name__ == "__main__":
    main()
