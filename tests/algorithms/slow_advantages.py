"""Every estimator once more, slow and obvious: loops over trajectories and tokens, in exact rational numbers.

Only the square roots of standard deviations are taken in float64. Written from the formulas, sharing nothing with the
package.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs

Row = list[Fraction]
Options = dict[str, object]

SCALAR = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "remax", "gpg", "opo", "ogb", "eob")
SCALAR += ("tree_grpo", "treerl")
BY_INDEX = ("otb", "tir_otb", "otb_isolated", "otb_total")
DEFAULTS: Options = {
    "gamma": 1.0,
    "lam": 1.0,
    "tail": "zero",
    "leave_one_out": False,
    "epsilon": 1e-8,
    "pool": 4.0,
    "energy": "logit_proxy",
    "loss_aggregation": "token_mean",
    "normalize": None,
}


class Slow:
    """One batch; rows are numbered as in the inputs, tokens by compact index."""

    def __init__(self, inputs: AdvantageInputs, options: Options) -> None:
        self.inputs = inputs
        self.options = {**DEFAULTS, **options}
        self.places = [[t for t, on in enumerate(row) if on] for row in inputs.response_mask.tolist()]
        self.rewards = self.tokens("rewards")
        self.totals = [sum(row, Fraction()) for row in self.rewards]
        self.lengths = [len(row) for row in self.places]
        ids = inputs.groups.tolist()
        self.rows = range(len(ids))
        self.group = [[j for j in self.rows if ids[j] == ids[i]] for i in self.rows]

    def number(self, option: str) -> Fraction:
        return Fraction(float(self.options[option]))

    def tokens(self, name: str) -> list[Row]:
        grid = getattr(self.inputs, name).tolist()
        return [[Fraction(float(grid[i][t])) for t in row] for i, row in enumerate(self.places)]

    # ---- energies --------------------------------------------------------------------------------------------------

    def energies(self) -> list[Row]:
        """(rho loss_mask)^2 w."""
        names = {
            "length": [],
            "logit_proxy": ["token_energy"],
            "head_exact": ["token_energy", "hidden_norm_squared"],
        }[self.options["energy"]]
        ratios = [name for name in ("importance_weights", "loss_mask") if getattr(self.inputs, name) is not None]
        result = [[Fraction(1)] * length for length in self.lengths]
        for factors in [*map(self.tokens, names), *map(self.tokens, ratios), *map(self.tokens, ratios)]:
            result = [[x * y for x, y in zip(*rows, strict=True)] for rows in zip(result, factors, strict=True)]
        return result

    def scale(self, i: int) -> Fraction:
        if self.options["energy"] != "head_exact":
            return Fraction(1)
        norms = self.tokens("hidden_norm_squared")
        values = [value for j in self.group[i] for value in norms[j]]
        return sum(values, Fraction()) / len(values) or Fraction(1)

    def per_sequence(self, i: int) -> Fraction:
        """What W + eps is divided by."""
        by_mean = self.options["loss_aggregation"] == "seq_mean_token_mean"
        return Fraction(self.lengths[i] ** 2 if by_mean else 1)

    def token_weights(self, name: str) -> list[Row]:
        """W + eps."""
        result = []
        for i, row in enumerate(self.energies()):
            shared: Row = {
                "otb_isolated": row,
                "otb_total": [sum(row)] * len(row),
                "otb": [sum(row[: k + 1]) for k in range(len(row))],
                "tir_otb": [sum(row[: k + 1]) for k in range(len(row))],
            }[name]
            result.append([(w + self.number("epsilon") * self.scale(i)) / self.per_sequence(i) for w in shared])
        return result

    def trajectory_weights(self, name: str) -> Row:
        if name == "opo":
            return [length + self.number("epsilon") for length in self.lengths]
        if name == "ogb":
            return [
                (sum(row) + self.number("epsilon") * self.scale(i)) / self.per_sequence(i)
                for i, row in enumerate(self.energies())
            ]
        exact = [Fraction(float(e)) for e in self.inputs.trajectory_energy]
        means = [sum(exact[j] for j in self.group[i]) / len(self.group[i]) or Fraction(1) for i in self.rows]
        return [
            (e + self.number("epsilon") * mean) / self.per_sequence(i)
            for i, (e, mean) in enumerate(zip(exact, means, strict=True))
        ]

    # ---- returns ---------------------------------------------------------------------------------------------------

    def returns(self) -> list[Row]:
        gamma = self.number("gamma")
        return [
            [sum((gamma ** (j - k) * row[j] for j in range(k, len(row))), Fraction()) for k in range(len(row))]
            for row in self.rewards
        ]

    # ---- estimators: baseline and advantage before normalisation, per token ------------------------------------------

    def scalar(self, name: str, i: int) -> tuple[Fraction | float, Fraction]:
        """(advantage, baseline) of trajectory i."""
        total, members = self.totals[i], self.group[i]
        if name == "remax":
            greedy = Fraction(float(self.inputs.greedy_returns[i]))
            return total - greedy, greedy
        if len(members) == 1:
            return (1 if name == "treerl" else self.factor(name)) * total, Fraction()
        others = [j for j in members if j != i]
        mean = sum(self.totals[j] for j in members) / len(members)
        if name in ("grpo", "tree_grpo"):
            variance = sum((self.totals[j] - mean) ** 2 for j in members) / (len(members) - 1)
            return float(total - mean) / (math.sqrt(variance) + 1e-6), mean
        if name == "rloo":
            mean = sum(self.totals[j] for j in others) / len(others)
        if name in ("opo", "ogb", "eob"):
            weights = self.trajectory_weights(name)
            counted = others if self.options["leave_one_out"] else members
            mean = sum(weights[j] * self.totals[j] for j in counted) / sum(weights[j] for j in counted)
        return self.factor(name) * (total - mean), mean

    def factor(self, name: str) -> Fraction:
        if name != "gpg":
            return Fraction(2 if name == "treerl" else 1)
        differing = sum(len({self.totals[j] for j in self.group[i]}) > 1 for i in self.rows)
        return Fraction(len(self.rows), differing) if differing else Fraction(1)

    def by_index(self, name: str) -> list[Row]:
        """b of otb and its relatives."""
        weights, returns = self.token_weights(name), self.returns()
        # columns[i] maps what is shared (position or compact index) to the compact index
        columns = [{(t if name == "otb" else k): k for k, t in enumerate(row)} for row in self.places]
        result = [[Fraction()] * length for length in self.lengths]

        def shared(i: int, column: int) -> Fraction | None:
            """Row i's baseline in a column, None where fewer than two contribute."""
            members = [j for j in self.group[i] if column in columns[j]]
            if len(members) < 2:
                return None
            counted = [j for j in members if j != i] if self.options["leave_one_out"] else members
            total = sum(weights[j][columns[j][column]] for j in counted)
            return sum(weights[j][columns[j][column]] * returns[j][columns[j][column]] for j in counted) / total

        for i in self.rows:
            for column, k in columns[i].items():
                baseline = shared(i, column)
                if baseline is None:
                    earlier = [b for c in range(column) if (b := shared(i, c)) is not None]
                    tails = {"zero": Fraction(), "self": returns[i][k], "carry": earlier[-1] if earlier else Fraction()}
                    baseline = tails[self.options["tail"]]
                result[i][k] = Fraction() if len(self.group[i]) == 1 else baseline
        return result

    def pooled(self) -> list[Row]:
        """b of the estimator that counts the step's other groups as `pool` more trajectories."""
        weights = self.trajectory_weights("ogb")

        def one(i: int) -> Fraction:
            own = [j for j in self.group[i] if j != i or not self.options["leave_one_out"]]
            other = [j for j in self.rows if j not in self.group[i]]
            if len(self.rows) == 1:
                return Fraction()
            shares = {**dict.fromkeys(own, Fraction(1)), **{j: self.number("pool") / len(other) for j in other}}
            total = sum(share * weights[j] for j, share in shares.items())
            return sum(share * weights[j] * self.totals[j] for j, share in shares.items()) / total

        return [[one(i)] * self.lengths[i] for i in self.rows]

    def gae(self) -> list[Row]:
        gamma, lam, values = self.number("gamma"), self.number("lam"), self.tokens("values")
        result = []
        for i, row in enumerate(self.rewards):
            boot = self.inputs.bootstrap_values
            following, advantage, advantages = (
                Fraction(float(boot[i])) if boot is not None else Fraction(),
                Fraction(),
                [],
            )
            for reward, value in zip(reversed(row), reversed(values[i]), strict=True):
                advantage = reward + gamma * following - value + gamma * lam * advantage
                following = value
                advantages.append(advantage)
            result.append(advantages[::-1])
        return result

    # ---- normalisation and the way back to [B, T] --------------------------------------------------------------------

    def normalized(self, advantages: list[list[Fraction | float]]) -> list[list[Fraction | float]]:
        how = self.options["normalize"]
        if how == "group_std":
            result = []
            for i in self.rows:
                values = [value for j in self.group[i] for value in advantages[j]]
                divisor = 1.0 if len(self.group[i]) == 1 else math.sqrt(_spread(values)[1]) + 1e-6
                result.append([float(value) / divisor for value in advantages[i]])
            return result
        tokens = [value for row in advantages for value in row]
        if how == "whiten" and len(tokens) >= 2:
            mean, variance = _spread(tokens)
            return [[float(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in advantages]
        return advantages

    def grid(self, rows: list[list[Fraction | float]]) -> Tensor:
        result = torch.zeros(self.inputs.response_mask.shape, dtype=torch.float64)
        for i, places in enumerate(self.places):
            for k, t in enumerate(places):
                result[i, t] = float(rows[i][k])
        return result


def _spread(values: list[Fraction | float]) -> tuple[Fraction | float, Fraction | float]:
    """Mean and unbiased variance (0 of one value)."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)


def slow_advantages(name: str, inputs: AdvantageInputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages, returns, baselines), each [B, T] float64."""
    slow = Slow(inputs, options)

    def difference(left: list[Row], right: list[Row], sign: int) -> list[Row]:
        return [[x + sign * y for x, y in zip(*pair, strict=True)] for pair in zip(left, right, strict=True)]

    advantages: list[list[Fraction | float]]
    if name in SCALAR:
        pairs = [slow.scalar(name, i) for i in slow.rows]
        spread: Callable[[int], list] = lambda which: [  # noqa: E731
            [pair[which]] * length for pair, length in zip(pairs, slow.lengths, strict=True)
        ]
        returns = [[total] * length for total, length in zip(slow.totals, slow.lengths, strict=True)]
        advantages, baselines = spread(0), spread(1)
    elif name == "gae":
        advantages, baselines = slow.gae(), slow.tokens("values")
        returns = difference(advantages, baselines, 1)
    else:
        returns = slow.returns()
        baselines = [[Fraction()] * length for length in slow.lengths]
        if name in BY_INDEX:
            baselines = slow.by_index(name)
        if name == "ogb_pooled":
            baselines = slow.pooled()
        if name == "ogb_pooled":
            returns = [[total] * length for total, length in zip(slow.totals, slow.lengths, strict=True)]
        advantages = difference(returns, baselines, -1)
    return slow.grid(slow.normalized(advantages)), slow.grid(returns), slow.grid(baselines)
