"""token_statistics: every backend against sums written out, at ordinary and at extreme logits."""

import doctest
import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.cases import FIELDS, needs_triton, problem
from torch import Tensor

from agentrl.kernels import BACKENDS, KernelInputError, Support, TokenStatistics, chunked, records, token_statistics
from agentrl.kernels import gradients as head_gradients

pytestmark = pytest.mark.on_device

EVERY_BACKEND = [pytest.param(name, marks=needs_triton if name == "triton" else ()) for name in sorted(BACKENDS)]


def from_logits(logits: list[float], target: int, backend: str, *, dtype: torch.dtype = torch.float64, **options):
    """Statistics of one token with these logits: a hidden state 1 and the logits as the weight."""
    weight = torch.tensor(logits, dtype=dtype).unsqueeze(-1)
    return token_statistics(torch.ones(1, 1, dtype=dtype), weight, torch.tensor([target]), backend=backend, **options)


def values(statistics: TokenStatistics) -> list[float]:
    return [float(getattr(statistics, name).detach()) for name in FIELDS]


def slow(logits: list[float], target: int) -> list[float]:
    """Log-probability, entropy, sum p^2 and ||e_y - p||^2 with exact sums of Python floats."""
    top = max(logits)
    masses = [math.exp(z - top) for z in logits]
    total = math.fsum(masses)
    p = [m / total for m in masses]
    entropy = -math.fsum(x * math.log(x) for x in p if x > 0)
    rest = math.fsum(m for v, m in enumerate(masses) if v != target) / total
    others = math.fsum(x * x for v, x in enumerate(p) if v != target)
    log_prob = logits[target] - top - math.log(total)
    return [log_prob, entropy, others + p[target] ** 2, rest * rest + others]


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    ("logits", "target"),
    [
        ([0.0, 0.0, 0.0, 0.0], 2),
        ([math.log(3.0), 0.0], 0),
        ([5.0, -3.0, 0.5, 2.0, 2.0], 1),
        ([80.0, 0.0, -80.0], 0),
        ([80.0, 0.0, -80.0], 2),
        ([1000.0, 999.0, 998.0], 1),
        ([-1000.0, -999.0, -998.0], 1),
        ([3.0], 0),
    ],
)
def test_every_backend_gives_the_sums_written_out(backend, logits, target):
    assert values(from_logits(logits, target, backend)) == pytest.approx(slow(logits, target), rel=1e-12, abs=1e-15)


def test_three_quarters_by_hand():
    statistics = from_logits([math.log(3.0), 0.0], 0, "chunked")
    entropy = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert values(statistics) == pytest.approx([math.log(0.75), entropy, 0.625, 0.125], rel=1e-14)
    assert float(statistics.hidden_norm_squared) == 1.0


@pytest.mark.parametrize("miss", [1e-3, 1e-5, 1e-7, 1e-9, 1e-12])
def test_energy_stays_right_in_float32_where_the_target_has_nearly_all_the_mass(miss):
    # two other tokens of mass miss / 2 each: w = miss^2 + 2 (miss / 2)^2
    side = math.log(miss / 2 / (1 - miss))
    statistics = from_logits([side, 0.0, side], 1, "chunked", dtype=torch.float32)
    assert float(statistics.energy) == pytest.approx(1.5 * miss**2, rel=1e-5)
    assert float(statistics.log_probs) == pytest.approx(math.log1p(-miss), rel=1e-5)


def test_a_large_common_offset_costs_no_accuracy_in_float32():
    shifted = from_logits([1000.0, 999.0, 998.0, 1000.5], 1, "chunked", dtype=torch.float32)
    assert values(shifted) == pytest.approx(slow([1000.0, 999.0, 998.0, 1000.5], 1), rel=1e-6)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_impossible_tokens_add_nothing(backend):
    bias = torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64, requires_grad=True)
    statistics = from_logits([math.log(3.0), 7.0, 0.0], 0, backend, bias=bias)
    assert values(statistics) == pytest.approx(slow([math.log(3.0), 0.0], 0), rel=1e-12)
    (statistics.log_probs + statistics.entropy).sum().backward()
    assert bias.grad is not None
    assert bool(torch.isfinite(bias.grad).all())
    assert float(bias.grad[1]) == 0.0


def test_a_target_of_probability_zero_is_minus_infinity_not_nan():
    bias = torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64)
    statistics = from_logits([0.0, 0.0, 0.0], 1, "chunked", bias=bias)
    assert values(statistics) == pytest.approx([-math.inf, math.log(2), 0.5, 1.5])


def test_a_nan_row_touches_no_other_row():
    hidden, weight, targets = problem(5, 3, 7)
    clean = token_statistics(hidden, weight, targets)
    hidden[2] = torch.nan
    dirty = token_statistics(hidden, weight, targets)
    assert dirty.log_probs.isnan().tolist() == [False, False, True, False, False]
    keep = torch.tensor([0, 1, 3, 4])
    assert torch.equal(dirty.entropy[keep], clean.entropy[keep])


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("bias", [None, [0.3, -0.2, 4.0]])
def test_a_cap_by_the_sums_written_out(backend, bias):
    outputs, cap, temperature, target = [2.0, -1.0, 9.0], 3.0, 0.5, 0
    shifted = outputs if bias is None else [x + b for x, b in zip(outputs, bias, strict=True)]
    capped = [cap * math.tanh(x / cap) for x in shifted]
    given = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    found = values(from_logits(outputs, target, backend, temperature=temperature, cap=cap, bias=given))
    log_prob, entropy, squares, _ = slow([z / temperature for z in capped], target)
    assert found[:3] == pytest.approx([log_prob, entropy, squares], rel=1e-12)
    total = math.fsum(math.exp(z / temperature) for z in capped)
    gradient = [(v == target) - math.exp(z / temperature) / total for v, z in enumerate(capped)]
    by_output = [g * (1 - (z / cap) ** 2) for g, z in zip(gradient, capped, strict=True)]
    assert found[3] == pytest.approx(math.fsum(g * g for g in by_output), rel=1e-12)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, math.inf])
def test_a_cap_that_is_no_positive_number_is_refused(cap):
    with pytest.raises(KernelInputError, match="cap must be positive"):
        from_logits([0.0, 1.0], 0, "chunked", cap=cap)


def gradients(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    uses: str,
    temperature: float,
    cap: float | None = None,
):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    statistics = token_statistics(hidden, weight, targets, temperature=temperature, backend=backend, cap=cap)
    scale = torch.linspace(-1, 2, hidden.shape[0], dtype=hidden.dtype)
    loss = hidden.sum() * 0.0
    if "l" in uses:
        loss = loss + (statistics.log_probs * scale).sum()
    if "e" in uses:
        loss = loss + (statistics.entropy.square() * scale).sum()
    return torch.autograd.grad(loss, (hidden, weight), allow_unused=True, materialize_grads=True)


def limit_memory(monkeypatch: pytest.MonkeyPatch, *, block: int, keep: int, piece: int) -> None:
    monkeypatch.setattr(chunked, "BLOCK_ELEMENTS", dict.fromkeys(("cpu", "cuda"), block))
    monkeypatch.setattr(chunked, "KEEP_ELEMENTS", keep)
    monkeypatch.setattr(chunked, "PIECE_ELEMENTS", dict.fromkeys(("cpu", "cuda"), piece))


@pytest.mark.parametrize("uses", ["l", "e", "le", ""])
@pytest.mark.parametrize("sizes", [(1, 0, 1), (33, 0, 22), (40, 0, 1000), (1000, 1000, 11)])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_values_and_gradients_agree_with_the_reference_for_every_block_size(monkeypatch, uses, sizes, cap):
    limit_memory(monkeypatch, block=sizes[0], keep=sizes[1], piece=sizes[2])
    hidden, weight, targets = problem(10, 4, 11)
    for left, right in zip(
        gradients("reference", hidden, weight, targets, uses, 0.7, cap),
        gradients("chunked", hidden, weight, targets, uses, 0.7, cap),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    expected = token_statistics(hidden, weight, targets, temperature=0.7, backend="reference", cap=cap)
    found = token_statistics(hidden, weight, targets, temperature=0.7, backend="chunked", cap=cap)
    for name in (*FIELDS, "hidden_norm_squared"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cap", [None, 1.5])
def test_a_weight_gradient_of_bfloat16_factors_keeps_bfloat16(monkeypatch, cap):
    # On GPUs the gradient of the logits is rounded to bfloat16 for the product with the hidden states; here told to.
    monkeypatch.setattr(head_gradients, "logit_gradient_dtype", lambda hidden, weight, dtype: torch.bfloat16)
    limit_memory(monkeypatch, block=33, keep=0, piece=22)
    hidden, weight, targets = problem(10, 4, 11, dtype=torch.bfloat16)
    _, found = gradients("chunked", hidden, weight, targets, "le", 0.7, cap)
    _, expected = gradients("reference", hidden.double(), weight.double(), targets, "le", 0.7, cap)
    error = torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected)
    assert error < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("keep", [0, 1000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_gradcheck_through_log_probs_and_entropy(monkeypatch, keep, scale):
    limit_memory(monkeypatch, block=14, keep=keep, piece=7)
    hidden, weight, targets = problem(5, 3, 7, scale=scale)
    bias = torch.linspace(-1, 1, 7, dtype=torch.float64)

    def outputs(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        statistics = token_statistics(h, w, targets, temperature=1.3, bias=b)
        return statistics.log_probs, statistics.entropy

    tensors = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(outputs, tensors)


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(0, 9),
    v=st.integers(1, 13),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 1.0, 50.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_backends_agree_on_any_shape(n, v, seed, scale, temperature):
    hidden, weight, targets = problem(n, 3, v, seed=seed, scale=scale)
    expected = token_statistics(hidden, weight, targets, temperature=temperature, backend="reference")
    found = token_statistics(hidden, weight, targets, temperature=temperature)
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-11, atol=1e-11)
        assert getattr(found, name).shape == (n,)
    assert bool((found.energy >= 0).all())
    assert bool((found.log_probs <= 0).all())


def test_no_token_gives_empty_results_and_zero_gradients():
    hidden, weight, targets = problem(0, 3, 7)
    left, right = gradients("chunked", hidden, weight, targets, "le", 1.0)
    assert left.shape == (0, 3)
    assert torch.equal(right, torch.zeros(7, 3, dtype=torch.float64))


def test_gradients_flow_through_log_probs_and_entropy_only():
    hidden, weight, targets = problem(4, 3, 7)
    statistics = token_statistics(hidden.requires_grad_(), weight, targets)
    flows = {name: getattr(statistics, name).requires_grad for name in (*FIELDS, "hidden_norm_squared")}
    assert flows == {
        "log_probs": True,
        "entropy": True,
        "sum_pi_squared": False,
        "energy": False,
        "hidden_norm_squared": False,
    }


def test_backward_twice_through_one_graph_gives_the_same_gradient():
    hidden, weight, targets = problem(4, 3, 7)
    loss = token_statistics(hidden.requires_grad_(), weight, targets).log_probs.sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden)[0])


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_accumulated_in_float32(half, backend):
    hidden, weight, targets = problem(6, 16, 40, dtype=half)
    exact = token_statistics(hidden.double(), weight.double(), targets, backend="reference")
    found = token_statistics(hidden, weight, targets, backend=backend)
    for name in FIELDS:
        result = getattr(found, name)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), getattr(exact, name), rtol=2e-5, atol=1e-6)


def test_half_precision_gradients_are_those_of_the_exact_function_rounded_once():
    hidden, weight, targets = problem(6, 16, 40, dtype=torch.bfloat16)
    exact = gradients("reference", hidden.double(), weight.double(), targets, "l", 1.0)
    for found, expected in zip(gradients("chunked", hidden, weight, targets, "l", 1.0), exact, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_autocast_does_not_lower_the_precision(device):
    hidden, weight, targets = problem(6, 16, 40, dtype=torch.float32)
    plain = token_statistics(hidden, weight, targets)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = token_statistics(hidden, weight, targets)
        reference = token_statistics(hidden, weight, targets, backend="reference")
    assert torch.equal(plain.log_probs, inside.log_probs)
    torch.testing.assert_close(plain.log_probs, reference.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, 2)}, "hidden must be"),
        ({"head_weight": torch.zeros(0, 3)}, "vocabulary is empty"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, r"targets must be \[N\] = \[4\]"),
        ({"targets": torch.tensor([0, 1, 2, 7])}, r"targets must lie in \[0, 7\); got 0 to 7"),
        ({"targets": torch.tensor([0, -100, 2, 3])}, "got -100 to 3"),
        ({"targets": torch.zeros(4)}, "targets must be int64"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": math.nan}, "temperature must be positive"),
        ({"bias": torch.zeros(3)}, r"bias must be \[V\]"),
        ({"hidden": torch.zeros(4, 3, dtype=torch.int64)}, "must be floating"),
        ({"backend": "magic"}, "unknown backend 'magic'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    arguments = {"hidden": torch.zeros(4, 3), "head_weight": torch.zeros(7, 3), "targets": torch.arange(4), **change}
    with pytest.raises(KernelInputError, match=message):
        token_statistics(**arguments)


def test_the_example_in_the_record_runs():
    assert doctest.testmod(records).failed == 0


SETS = [[0, 2, 4], [1, 3], [], [5], [0, 6]]


def restricted_problem(cap: float | None = None):
    """Five tokens over seven ids: each is restricted to a set with its target, except the third."""
    hidden, weight, _ = problem(5, 3, 7)
    targets = torch.tensor([2, 3, 1, 5, 6])
    support = Support(
        ids=torch.tensor([*chain(*SETS)], dtype=torch.int32), sizes=torch.tensor(list(map(len, SETS)), device="cpu")
    )
    inside = torch.ones(5, 7, dtype=torch.bool)
    for row, one in enumerate(SETS):
        if one:
            inside[row] = False
            inside[row, one] = True
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    return leaves, targets, support, inside


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("size", [7, 1 << 23])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_statistics_of_a_support_are_those_of_the_renormalized_distribution(backend, size, cap, monkeypatch):
    for name in ("BLOCK_ELEMENTS", "PIECE_ELEMENTS"):
        monkeypatch.setattr(chunked, name, dict.fromkeys(("cpu", "cuda"), size))
    monkeypatch.setattr(chunked, "KEEP_ELEMENTS", size)
    (hidden, weight), targets, support, inside = restricted_problem()
    found = token_statistics(hidden, weight, targets, temperature=0.7, backend=backend, cap=cap, support=support)
    output = (hidden @ weight.t()).detach().requires_grad_()
    logits = output if cap is None else cap * torch.tanh(output / cap)
    log_p = (logits / 0.7).masked_fill(~inside, -torch.inf).log_softmax(-1)
    p = log_p.exp()
    log_probs = log_p[range(5), targets]
    entropy = -(p * log_p.masked_fill(~inside, 0.0)).sum(-1)
    expected = {"log_probs": log_probs, "entropy": entropy, "sum_pi_squared": p.square().sum(-1)}
    rows = [torch.autograd.grad(log_probs[row], output, retain_graph=True)[0].square().sum() for row in range(5)]
    expected["energy"] = torch.stack(rows) * 0.7**2
    for name, values in expected.items():
        torch.testing.assert_close(getattr(found, name), values, rtol=1e-9, atol=1e-12, msg=name)
    mix = torch.linspace(-1, 1, 5, dtype=torch.float64)
    got = torch.autograd.grad((mix * found.log_probs + 0.3 * found.entropy).sum(), (hidden, weight))
    (slope,) = torch.autograd.grad((mix * log_probs + 0.3 * entropy).sum(), output)
    for one, other in zip(got, (slope @ weight, slope.t() @ hidden), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_selected_sets_are_in_the_order_of_the_tokens():
    _, _, support, _ = restricted_problem()
    chosen = support.select_tokens(torch.tensor([4, 2, 0]))
    assert (chosen.ids.tolist(), chosen.sizes.tolist()) == ([0, 6, 0, 2, 4], [2, 0, 3])


def test_the_triton_backend_takes_no_support():
    (hidden, weight), targets, support, _ = restricted_problem()
    with pytest.raises(KernelInputError, match="does not restrict distributions to a support: select the chunked"):
        token_statistics(hidden, weight, targets, backend="triton", support=support)
