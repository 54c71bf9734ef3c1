"""Policy losses: values and gradients by hand, clipping at its edges, and masks that let nothing through."""

import math

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import (
    AGGREGATIONS,
    LOSSES,
    AlgorithmError,
    InvalidInputError,
    InvalidOptionError,
    LossInputs,
    NoOptions,
    UnknownNameError,
    aggregate,
    check_aggregation,
    default_aggregation,
    policy_loss,
    register_estimator,
    register_loss,
)
from agentrl_envs.registry import NameTakenError


def run(
    name: str, ratios: list[float], advantages: list[float], **options: float
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The loss of one row with these ratios, its metrics, and its gradient with respect to the log-probabilities."""
    old = torch.full((1, len(ratios)), -0.5, dtype=torch.float64)
    log_probs = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    loss, metrics = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=old,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        loss_mask=torch.ones(1, len(ratios), dtype=torch.bool),
        **options,
    )
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs, allow_unused=True)
    return loss, metrics, gradient


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_ppo_by_hand_for_both_signs_inside_and_outside_the_interval():
    ratios, advantages = [1.0, 1.1, 1.5, 0.5, 1.5, 0.5], [2.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    loss, metrics, gradient = run("ppo", ratios, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss, row([-2.0, 1.1, -1.28, -0.5, 1.5, 0.8]))
    # d(-A ratio)/d log p = -A ratio, and 0 where the clipped branch counts
    torch.testing.assert_close(gradient, row([-2.0, 1.1, 0.0, -0.5, 1.5, 0.0]))
    assert float(metrics["clip_fraction_high"]) == pytest.approx(1 / 6)
    assert float(metrics["clip_fraction_low"]) == pytest.approx(1 / 6)
    assert float(metrics["ratio_max"]) == pytest.approx(1.5)
    assert float(metrics["ratio_min"]) == pytest.approx(0.5)
    assert float(metrics["ratio_mean"]) == pytest.approx(6.1 / 6)
    assert int(metrics["tokens"]) == 6


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    loss, metrics, gradient = run("dual_clip", [5.0, 5.0, 2.0, 0.5], [-1.0, 1.0, -1.0, -1.0], clip_high=0.28)
    torch.testing.assert_close(loss, row([3.0, -1.28, 2.0, 0.8]))
    torch.testing.assert_close(gradient, row([0.0, 0.0, 2.0, 0.0]))
    assert float(metrics["dual_clip_fraction"]) == 0.25
    other, _, _ = run("dual_clip", [5.0], [-2.0], dual_clip=4.0)
    assert float(other.detach()) == pytest.approx(8.0)


def test_reinforce_has_the_gradient_of_ppo_at_ratio_one():
    advantages = [0.7, -1.3, 0.0]
    loss, _, gradient = run("reinforce", [1.0, 1.0, 1.0], advantages)
    _, _, of_ppo = run("ppo", [1.0, 1.0, 1.0], advantages)
    torch.testing.assert_close(loss, row([0.35, -0.65, 0.0]))
    torch.testing.assert_close(gradient, of_ppo)
    torch.testing.assert_close(gradient, -row(advantages))


def test_no_old_log_probs_means_ratio_one():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    arguments = {"advantages": torch.ones(1, 2), "loss_mask": torch.ones(1, 2).bool()}
    loss, _ = policy_loss("ppo", log_probs=log_probs, old_log_probs=None, **arguments)
    assert loss.tolist() == [[-1.0, -1.0]]
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, -1.0]]


def test_the_log_ratio_is_clamped_so_nothing_overflows():
    old = torch.tensor([[-100.0, 0.0]])
    log_probs = torch.tensor([[0.0, -100.0]], requires_grad=True)
    loss, _ = policy_loss(
        "ppo", log_probs=log_probs, old_log_probs=old, advantages=-torch.ones(1, 2), loss_mask=torch.ones(1, 2)
    )
    assert loss[0, 0].item() == pytest.approx(math.exp(20), rel=1e-6)
    loss.sum().backward()
    assert log_probs.grad is not None
    assert bool(torch.isfinite(log_probs.grad).all())


BUILT_IN = list(LOSSES.names())


@pytest.mark.parametrize("name", BUILT_IN)
def test_garbage_off_the_mask_reaches_no_value_and_no_gradient(name):
    log_probs = torch.tensor([[-1.0, torch.nan, -torch.inf, torch.inf]], requires_grad=True)
    loss, metrics = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=torch.tensor([[-1.0, 0.0, torch.nan, -torch.inf]]),
        advantages=torch.tensor([[1.0, torch.inf, torch.nan, 3.0]]),
        loss_mask=torch.tensor([[1, 0, 0, 0]]),
    )
    loss.sum().backward()
    assert loss[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, 0.0, 0.0, 0.0]]
    assert all(bool(torch.isfinite(value)) for value in metrics.values())
    assert float(metrics["ratio_max"]) == 1.0


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_empty_mask_gives_a_zero_connected_to_the_graph(name):
    log_probs = torch.full((2, 3), torch.nan, requires_grad=True)
    loss, metrics = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=torch.zeros(2, 3),
        advantages=torch.zeros(2, 3),
        loss_mask=torch.zeros(2, 3).bool(),
    )
    loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.abs().sum() == 0.0
    assert float(metrics["approx_kl"]) == 0.0
    assert float(metrics["ratio_min"]) == 1.0


def test_advantages_and_old_log_probs_get_no_gradient():
    tensors = {name: torch.zeros(1, 2, requires_grad=True) for name in ("log_probs", "old_log_probs", "advantages")}
    loss, metrics = policy_loss("ppo", loss_mask=torch.ones(1, 2), **tensors)
    loss.sum().backward()
    assert tensors["old_log_probs"].grad is None
    assert tensors["advantages"].grad is None
    assert not any(metric.requires_grad for metric in metrics.values())


def test_approx_kl_is_k3_of_old_against_new():
    _, metrics, _ = run("reinforce", [0.5, 2.0], [1.0, 1.0])
    expected = ((0.5 - 1 - math.log(0.5)) + (2.0 - 1 - math.log(2.0))) / 2
    assert float(metrics["approx_kl"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("pppo", {}, UnknownNameError, "unknown loss 'pppo'; did you mean 'ppo'"),
        ("reinforce", {"clip_low": 0.1}, UnknownNameError, "unknown option 'clip_low' of loss 'reinforce'"),
        ("ppo", {"clip_hi": 0.1}, UnknownNameError, "did you mean 'clip_high'"),
        ("ppo", {"clip_low": 1.5}, InvalidOptionError, "clip_low=1.5"),
        ("ppo", {"clip_high": -0.1}, InvalidOptionError, "clip_high=-0.1"),
        ("dual_clip", {"dual_clip": 1.0}, InvalidOptionError, "dual_clip=1.0 must be greater than 1"),
        ("dual_clip", {"clip_low": -1.0}, InvalidOptionError, "clip_low=-1.0"),
        ("ppo", {"clip_high": math.nan}, InvalidOptionError, "clip_high=nan"),
        ("gspo", {"clip_low": -1e-4}, InvalidOptionError, "clip_low=-0.0001"),
        ("gmpo", {"clip_high": math.inf}, InvalidOptionError, "clip_high=inf must be at least 0 and finite"),
        ("sapo", {"temperature_negative": 0.0}, InvalidOptionError, "temperature_negative=0.0 must be positive"),
        ("ppo", {"clip_low": "x"}, InvalidOptionError, r"clip_low='x' must be in \[0, 1\]"),
        ("ppo", {"clip_high": True}, InvalidOptionError, "clip_high=True must be at least 0"),
        ("dual_clip", {"dual_clip": None}, InvalidOptionError, "dual_clip=None must be greater than 1"),
        ("kl_cov", {"covariance_fraction": "x"}, InvalidOptionError, r"covariance_fraction='x' must be in \(0, 1\]"),
        ("clip_cov", {"covariance_low": "x"}, InvalidOptionError, "covariance_low='x' must be a number"),
        ("sapo", {"temperature_positive": [1]}, InvalidOptionError, r"temperature_positive=\[1\] must be positive"),
        ("dppo_tv", {"clip_high": 1.1}, InvalidOptionError, r"clip_high=1.1 must be in \[0, 1\]"),
        ("dppo_kl", {"clip_low": -0.1}, InvalidOptionError, "clip_low=-0.1"),
        ("clip_cov", {"covariance_low": 6.0}, InvalidOptionError, "covariance_low=6.0 is above covariance_high=5.0"),
        (
            "clip_cov",
            {"covariance_fraction": 0.0},
            InvalidOptionError,
            r"covariance_fraction=0.0 must be in \(0, 1\]",
        ),
        ("kl_cov", {"kl_coefficient": -1.0}, InvalidOptionError, "kl_coefficient=-1.0"),
        ("kl_cov", {"clip_low": 0.1}, UnknownNameError, "unknown option 'clip_low' of loss 'kl_cov'"),
        ("gsppo", {}, UnknownNameError, "did you mean 'gspo'"),
    ],
)
def test_wrong_names_and_options_are_named(name, options, error, message):
    with pytest.raises(error, match=message):
        run(name, [1.0], [1.0], **options)


TENSORS = ("log_probs", "old_log_probs", "advantages", "loss_mask")


@pytest.mark.parametrize("which", [*TENSORS[1:], "response_mask", "weights", "selected"])
def test_shapes_must_agree(which):
    tensors = {name: torch.ones(2, 3) for name in TENSORS}
    with pytest.raises(InvalidInputError, match=rf"{which} must be \[B, T\] like log_probs; got \(2, 4\)"):
        policy_loss("kl_cov", **{**tensors, which: torch.ones(2, 4)})


@pytest.mark.parametrize("which", ["log_probs", "old_log_probs", "advantages", "weights"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_at_a_token_of_the_loss_is_named(which, value):
    tensors = {name: torch.ones(2, 3) for name in (*TENSORS, "weights")}
    tensors[which][1, 2] = value
    with pytest.raises(InvalidInputError, match=rf"{which} is {value} at a model token: row 1, position 2"):
        policy_loss("ppo", **tensors)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"log_probs": torch.ones(2, 3, dtype=torch.int64)}, "log_probs must be .* floating-point; got .* torch.int64"),
        ({"log_probs": torch.ones(3)}, r"log_probs must be \[B, T\] floating-point; got \(3,\)"),
        ({"loss_mask": torch.full((2, 3), 2)}, "loss_mask must be bool or contain only 0 and 1"),
        ({"response_mask": torch.zeros(2, 3)}, "loss_mask is True at tokens where response_mask is False"),
        ({"selected": torch.zeros(2, 3)}, "loss 'ppo' selects no tokens"),
    ],
)
def test_inputs_that_make_no_sense(tensors, message):
    with pytest.raises(InvalidInputError, match=message):
        policy_loss("ppo", **{**{name: torch.ones(2, 3) for name in TENSORS}, **tensors})


def test_weights_multiply_the_loss_after_clipping_and_get_no_gradient():
    weights = torch.tensor([[0.5, 2.0, math.nan]], requires_grad=True)
    old = torch.zeros(1, 3)
    loss, _ = policy_loss(
        "ppo",
        log_probs=torch.tensor([[1.5, 1.1, 1.0]]).log(),
        old_log_probs=old,
        advantages=torch.ones(1, 3),
        loss_mask=torch.tensor([[1, 1, 0]]),
        weights=weights,
    )
    torch.testing.assert_close(loss, torch.tensor([[-0.6, -2.2, 0.0]]))
    assert not loss.requires_grad


def test_gspo_takes_the_ratio_of_all_model_tokens_also_of_those_left_out_of_the_loss():
    old = torch.zeros(1, 4, dtype=torch.float64)
    log_probs = torch.tensor([[0.02, 0.04, 0.06, math.nan]], dtype=torch.float64)
    masks = {"loss_mask": torch.tensor([[1, 0, 1, 0]]), "response_mask": torch.tensor([[1, 1, 1, 0]])}
    arguments = {"log_probs": log_probs, "old_log_probs": old, "advantages": -torch.ones(1, 4).double()}
    loss, _ = policy_loss("gspo", **arguments, **masks)
    u = math.exp(0.04)
    torch.testing.assert_close(loss, row([u, 0.0, u, 0.0]))


def test_gspo_clips_whole_sequences_by_hand():
    """Mean log-ratio ln 1.1: outside [0.9, 1.05], so A > 0 earns nothing and A < 0 everything."""
    ratios, options = [1.21, 1.0], {"clip_low": 0.1, "clip_high": 0.05}
    up, metrics, gradient_up = run("gspo", ratios, [1.0, 1.0], **options)
    down, _, gradient_down = run("gspo", ratios, [-1.0, -2.0], **options)
    torch.testing.assert_close(up, row([-1.05, -1.05]))
    torch.testing.assert_close(gradient_up, row([0.0, 0.0]))
    torch.testing.assert_close(down, row([1.1, 2.2]))
    torch.testing.assert_close(gradient_down, row([1.1, 2.2]))
    assert float(metrics["clip_fraction_high"]) == 1.0


def test_the_mean_log_ratio_of_gspo_is_cut_at_ten_and_keeps_its_gradient():
    loss, _, gradient = run("gspo", [math.exp(15.0)], [-1.0])
    torch.testing.assert_close(loss, row([math.exp(10)]))
    torch.testing.assert_close(gradient, row([math.exp(10)]))


def test_gmpo_by_hand_gives_one_value_a_sequence_under_its_aggregation():
    """Log-ratios ln 1.1 and ln 3, the second cut at ln 2: geometric mean sqrt(2.2); mean advantage 2."""
    loss, _, _ = run("gmpo", [1.1, 3.0], [1.0, 3.0], clip_low=0.5, clip_high=math.log(2))
    value = -2 * math.sqrt(2.2)
    torch.testing.assert_close(loss, row([value, value]))
    total = aggregate(loss, torch.ones(1, 2), "seq_mean_token_mean")
    assert float(total.detach()) == pytest.approx(value)


def test_gmpo_holds_back_each_token_by_the_sign_of_its_own_advantage():
    loss, _, gradient = run("gmpo", [3.0, 3.0], [1.0, -2.0], clip_low=0.4, clip_high=math.log(2))
    value = 0.5 * math.sqrt(6.0)
    torch.testing.assert_close(loss, row([value, value]))
    torch.testing.assert_close(gradient, row([0.0, value]))  # the sum of two times half the value


def test_cispo_by_hand():
    loss, metrics, gradient = run("cispo", [2.0, 0.5, 1.0], [1.0, -1.0, 2.0], clip_low=0.3, clip_high=0.4)
    torch.testing.assert_close(gradient, row([-1.4, 0.7, -2.0]))
    torch.testing.assert_close(loss, row([-1.4 * (math.log(2) - 0.5), 0.7 * (math.log(0.5) - 0.5), 1.0]))
    assert [float(metrics[f"clip_fraction_{side}"]) for side in ("low", "high")] == pytest.approx([1 / 3, 1 / 3])


def test_sapo_by_hand():
    """The gate is 2 / t at ratio 1; its slope there is 1, whatever t."""
    loss, _, gradient = run("sapo", [1.0, 1.0, 2.0], [1.0, -1.0, 1.0])
    sigmoid = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(loss, row([-2.0, 2 / 1.05, -4 * sigmoid]))
    torch.testing.assert_close(gradient, row([-1.0, 1.0, -4 * sigmoid * (1 - sigmoid) * 2.0]))


def test_dppo_keeps_tokens_by_how_far_their_probability_moved():
    """p_old = e^-0.5 = 0.607, and A p / p_old the gradient of what is kept."""
    ratios, advantages = [1.2, 1.3, 0.8, 0.7, 0.5], [1.0, 1.0, -1.0, -1.0, 1.0]
    _, _, by_tv = run("dppo_tv", ratios, advantages, clip_low=0.15, clip_high=0.15)
    torch.testing.assert_close(by_tv, row([-1.2, 0.0, 0.8, 0.0, -0.5]))
    p = math.exp(-0.5)
    kl = [p * -math.log(r) + (1 - p) * math.log((1 - p) / (1 - p * r)) for r in ratios]
    _, _, by_kl = run("dppo_kl", ratios, advantages, clip_low=(kl[2] + kl[3]) / 2, clip_high=(kl[0] + kl[1]) / 2)
    torch.testing.assert_close(by_kl, row([-1.2, 0.0, 0.8, 0.0, -0.5]))


def test_the_ratio_of_dppo_is_truncated_at_twenty():
    old = torch.full((1, 1), -10.0)
    log_probs = (old + math.log(30)).requires_grad_()
    loss, _ = policy_loss(
        "dppo_tv", log_probs=log_probs, old_log_probs=old, advantages=-torch.ones(1, 1), loss_mask=torch.ones(1, 1)
    )
    assert torch.autograd.grad(loss.sum(), log_probs)[0].item() == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("loss", "estimator", "expected"),
    [
        ("ppo", "grpo", "seq_mean_token_mean"),
        ("ppo", "rloo", "seq_mean_token_mean"),
        ("reinforce", "rloo", "token_mean"),
        ("reinforce", "tir_otb", "token_mean"),
        ("ppo", "otb", "token_mean"),
        ("ppo", "dr_grpo", "seq_mean_token_sum_norm"),
        ("gspo", "dr_grpo", "seq_mean_token_mean"),
        ("gmpo", "tir_otb", "seq_mean_token_mean"),
        ("sapo", "rloo", "seq_mean_token_mean"),
        ("cispo", "rloo", "token_mean"),
        ("kl_cov", "grpo", "seq_mean_token_mean"),
    ],
)
def test_default_aggregations(loss, estimator, expected):
    assert default_aggregation(loss, estimator) == expected
    check_aggregation(loss, expected)


def test_the_default_aggregation_of_a_users_estimator_is_its_trait(own_registries):
    register_estimator("mine", aggregation="seq_mean_token_sum")(lambda inputs, options: None)
    assert default_aggregation("ppo", "mine") == "seq_mean_token_sum"
    assert default_aggregation("gspo", "mine") == "seq_mean_token_mean"


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
@pytest.mark.parametrize("mode", [mode for mode in AGGREGATIONS if mode != "seq_mean_token_mean"])
def test_losses_on_sequences_admit_one_aggregation(loss, mode):
    with pytest.raises(
        InvalidOptionError, match=f"aggregation of loss '{loss}'='{mode}' is not one of seq_mean_token_mean"
    ):
        check_aggregation(loss, mode)


def test_traits_say_what_a_loss_needs():
    assert [name for name in BUILT_IN if LOSSES.traits(name).step_wide] == ["clip_cov", "kl_cov"]
    with pytest.raises(UnknownNameError, match="did you mean 'ppo'"):
        LOSSES.traits("pppo")


def test_reinforce_alone_ignores_the_old_log_probabilities():
    log_probs, advantages = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.0, -0.5]])

    def values(name: str, old: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(1, 2, dtype=torch.bool)
        return policy_loss(name, log_probs=log_probs, old_log_probs=old, advantages=advantages, loss_mask=mask)[0]

    same = [name for name in BUILT_IN if torch.equal(values(name, log_probs), values(name, log_probs - 1e-4))]
    assert same == ["reinforce"]


def test_user_code_adds_a_loss_by_a_decorator(own_registries):
    @register_loss("squared")
    def squared(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
        return inputs.log_probs.square(), {}

    loss, _, _ = run("squared", [1.0], [1.0])
    assert float(loss.detach()) == 0.25
    with pytest.raises(NameTakenError, match="already registered"):
        register_loss("ppo")(lambda inputs, options: (inputs.log_probs, {}))


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda inputs: inputs.log_probs, "a tensor"),
        (lambda inputs: inputs.log_probs.mean(), "a tensor"),
        (lambda inputs: (inputs.log_probs.mean(), {}), "a loss of shape []"),
        (lambda inputs: (inputs.log_probs, {"mine": 1.0}), "metrics that are not all tensors"),
        (lambda inputs: None, "a NoneType"),
    ],
)
def test_a_loss_that_returns_something_else_is_told_what_to_return(own_registries, made, found):
    register_loss("mine")(lambda inputs, options: made(inputs))
    with pytest.raises(AlgorithmError) as raised:
        run("mine", [1.0], [1.0])
    assert str(raised.value) == (
        f"loss 'mine' returned {found}: return (per_token, metrics), a tensor of shape [1, 1] with the loss of each "
        "token (not averaged) and a dict of scalar tensors, which may be empty"
    )
