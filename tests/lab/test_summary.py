"""What is said of the moments, and what may be asked: summary, verdicts, names and sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agentrl.errors import SettingsError
from agentrl.lab.measure import GradientMoments
from agentrl.lab.settings import measurable_estimators, parse_estimator_choices, parse_lab_settings
from agentrl.lab.summary import EstimatorResult, IntervalEstimate, as_records, describe_findings, summarize_estimators


def make_moments(**changed: float) -> GradientMoments:
    given: dict[str, Any] = {
        "variance": 6.0,
        "mean_squared": 4.0,
        "along": 2.0,
        "reference_squared": 1.0,
        "reference_along": 1.0,
        "along_variance": 3.0,
        "along_squared": 4.0,
        "head_variance": None,
        "diagonal": 2.0,
    }
    return GradientMoments(**{**given, **changed})


def test_summary_by_hand() -> None:
    """Two problems; everything is one number in each."""
    problems = [
        {2: {"a": make_moments(), "b": make_moments(variance=8.0)}},
        {2: {"a": make_moments(variance=2.0, along_variance=1.0), "b": make_moments(variance=8.0)}},
    ]
    best, other = summarize_estimators(problems, resamples=100, seed=0, baseline="b")
    assert (best.estimator, best.variance.value, best.scale.value, best.cosine.value) == ("a", 4.0, 2.0, 1.0)
    assert best.noise.value == pytest.approx((6 + 2) / (4 * 2))
    assert best.directional.value == pytest.approx((3 + 1) / (4 + 4))
    assert best.bias.value == pytest.approx((2 * (4 - 4 + 1) / 2) ** 0.5)
    assert (best.head_variance, best.diagonal) == (None, 2.0)
    assert (best.to_best.value, other.to_best.value) == (1.0, pytest.approx(2.0))
    assert other.to_best.low == pytest.approx(8 / 6)  # the first problem twice
    assert best.to_baseline is not None
    assert best.directional_to_baseline is not None
    assert best.to_baseline.value == pytest.approx(0.5)
    assert best.directional_to_baseline.value == pytest.approx(4 / 6)
    assert summarize_estimators(problems, resamples=100, seed=0)[0].to_baseline is None


def test_the_error_of_drawing_groups_is_taken_out_of_the_scale() -> None:
    """Leave-one-out is exactly unbiased; half of its gradient, with half of its error, is exactly half as long."""
    draws = [(1.0, 1.4), (2.0, 1.1), (0.5, 0.9), (3.0, 2.0), (1.5, 1.5), (0.2, 0.7), (2.5, 2.9), (1.1, 0.6)]
    problems = [
        {2: {"whole": make_moments(reference_squared=true, reference_along=seen, along=seen),
             "half": make_moments(reference_squared=true, reference_along=seen, along=seen / 2),
             "without": make_moments(reference_squared=true, reference_along=seen, along=0.7 * true)}}
        for true, seen in draws
    ]  # fmt: skip
    scales = {line.estimator: line.scale for line in summarize_estimators(problems, resamples=100, seed=0)}
    for label, wanted in (("whole", 1.0), ("half", 0.5), ("without", 0.7)):
        assert (scales[label].value, scales[label].low, scales[label].high) == pytest.approx((wanted,) * 3)
    few = {line.estimator: line.scale for line in summarize_estimators(problems[:2], resamples=100, seed=0)}
    assert few["without"].value == pytest.approx(0.7)
    assert few["whole"].low < 1.0 < few["whole"].high  # two problems say nothing about the error


def test_an_interval_reaches_to_infinity_where_the_signal_may_be_none() -> None:
    """Half of the problems have no signal for ``lost``: a quarter of the resamples of two holds only these."""
    problems = [
        {2: {"rloo": make_moments(), "lost": make_moments(along=2.0)}},
        {2: {"rloo": make_moments(), "lost": make_moments(along=-1.0)}},
    ]
    lines = {line.estimator: line for line in summarize_estimators(problems, resamples=200, seed=0, baseline="rloo")}
    assert lines["lost"].noise.value == pytest.approx(6 * 2 * 2 / 1)
    assert lines["lost"].noise.low == pytest.approx(6 / 4)
    assert lines["lost"].noise.high == math.inf
    assert lines["lost"].to_baseline is not None
    assert lines["lost"].to_baseline.high == math.inf


def test_a_gradient_against_the_true_one_is_no_signal() -> None:
    problems = [{2: {"rloo": make_moments(), "against": make_moments(along=-4.0)}}] * 2
    best, against = summarize_estimators(problems, resamples=100, seed=0)
    assert (best.estimator, against.estimator) == ("rloo", "against")
    assert against.scale.value == -4.0
    assert (against.noise.value, against.noise.low) == (math.inf, math.inf)


def test_a_gradient_lost_in_noise_is_said_to_be(recwarn: pytest.WarningsRecorder) -> None:
    lost = {2: {name: make_moments(reference_squared=-1.0, along_squared=-1.0) for name in ("rloo", "grpo")}}
    lines = summarize_estimators([lost, lost], resamples=100, seed=0, baseline="rloo")
    assert describe_findings(lines) == [
        "N=2: no gradient can be distinguished from noise; use more problems or samples"
    ]
    assert as_records(lines)[0]["noise"] == {"value": None, "low": None, "high": None}
    assert not recwarn.list


def make_line(name: str, ratio: float, low: float) -> EstimatorResult:
    one = IntervalEstimate(value=ratio, low=low, high=ratio)
    return EstimatorResult(
        estimator=name, group_size=4, variance=one, scale=one, noise=one, directional=one, cosine=one, bias=one,
        to_best=one, to_baseline=None, directional_to_baseline=None, head_variance=None, diagonal=0.0
    )  # fmt: skip


def test_verdicts_say_where_the_optimal_baseline_does_not_win() -> None:
    (won,) = describe_findings([make_line("tir_otb", 1.0, 1.0), make_line("rloo", 1.5, 1.2)])
    assert won.endswith("The token baseline tir_otb is the best")
    (lost,) = describe_findings([make_line("rloo", 1.0, 1.0), make_line("tir_otb:tail=carry", 1.5, 1.2)])
    assert lost.endswith(
        "tir_otb:tail=carry, with 1.5 [1.2, 1.5] times the least noise; the difference is outside the interval"
    )
    (close,) = describe_findings([make_line("rloo", 1.0, 1.0), make_line("otb", 1.1, 0.9)])
    assert "the differences from otb are within the interval" in close
    assert close.endswith("times the least noise; the difference is within the interval")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"estimators": "tir_obt"}, "--estimators: tir_obt: unknown estimator 'tir_obt'; did you mean 'tir_otb'"),
        ({"estimators": "tir_otb:tial=carry"}, "did you mean 'tail'"),
        ({"estimators": "tir_otb:tail"}, "options of tir_otb:tail must be written as option=value"),
        ({"estimators": "rloo,grpo,rloo"}, "--estimators lists rloo twice"),
        ({"estimators": "none"}, "none cannot be measured: all its advantages are 0"),
        ({"estimators": "gae"}, "gae cannot be measured: it needs a critic that was trained for this policy"),
        ({"estimators": "otb_cross:energy=length"}, "otb_cross has no option energy, because its energy is fixed"),
        ({"group_sizes": "4,64"}, "--group-sizes 64: a group must have 2 to 32 trajectories, because"),
        ({"group_sizes": "4,x"}, "--group-sizes must be whole numbers, such as 4,8,16; got 'x'"),
        ({"group_sizes": "4,4"}, "--group-sizes must be different sizes"),
        ({"samples": 3}, "--samples must be at least 4"),
        ({"baseline": "rlo"}, "--baseline rlo is not a measured estimator; valid: "),
    ],
)
def test_bad_input_is_named(texts: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_lab_settings(**texts)
    assert message in str(caught.value)


def test_without_names_all_are_measured_that_can_be() -> None:
    from agentrl.algorithms import ESTIMATORS

    assert {choice.label for choice in parse_estimator_choices([])} == {"otb_cross", *ESTIMATORS.names()} - {
        "gae",
        "none",
    }
    assert "gae" not in measurable_estimators()
