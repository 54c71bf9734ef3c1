"""The pass by slices of the vocabulary (backend triton) against the reference, with epilogues in Triton and torch."""

import importlib
import math
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import torch_epilogue
from kernels.cases import FIELDS, needs_triton, problem, seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.errors import SettingsError
from agentrl.kernels import (
    KernelInputError,
    TokenStatistics,
    arithmetic,
    sliced,
    statistics,
    token_statistics,
)
from agentrl.models.policy import PolicyModel

pytestmark = pytest.mark.on_device

EPILOGUES = ["torch", pytest.param("triton", marks=needs_triton)]


def statistics_of(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    epilogue: str,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> TokenStatistics:
    return sliced.sliced_statistics(
        hidden,
        weight,
        targets,
        temperature,
        bias,
        epilogue=torch_epilogue if epilogue == "torch" else importlib.import_module("agentrl.kernels.triton_epilogue"),
        cap=cap,
    )


def reference_of(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, bias=None, cap=None):
    """In float64."""
    bias = None if bias is None else bias.double()
    return token_statistics(
        hidden.double(), weight.double(), targets, temperature=temperature, bias=bias, cap=cap, backend="reference"
    )


def cut(monkeypatch: pytest.MonkeyPatch, *, width: int, elements: int) -> None:
    """Slices of `width` tokens, tiles of `elements` logits."""
    monkeypatch.setattr(sliced, "SLICE", width)
    monkeypatch.setattr(sliced, "TILE_ELEMENTS", {torch.get_default_device().type: elements})


def of_logits(rows: list[list[float]], targets: list[int], *, dtype: torch.dtype = torch.float32):
    """hidden, weight, targets whose logits are exactly these: hidden is the unit matrix."""
    logits = torch.tensor(rows, dtype=dtype)
    return torch.eye(len(rows), dtype=dtype), logits.t().contiguous(), torch.tensor(targets)


def gradients(statistics: TokenStatistics, inputs: tuple[Tensor, ...], uses: str = "le") -> tuple[Tensor, ...]:
    scale = torch.linspace(-1, 2, statistics.log_probs.shape[0], dtype=statistics.log_probs.dtype)
    loss = (statistics.log_probs * scale).sum() * float("l" in uses)
    if "e" in uses:
        loss = loss + (statistics.entropy.square() * scale).sum()
    if "l" not in uses:
        loss = loss - (statistics.log_probs * 0.0).sum()
    return torch.autograd.grad(loss, inputs)


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    """To `bound` of the largest element: gradients have elements that cancel."""
    assert float((found.double() - expected.double()).abs().max()) <= bound * float(expected.abs().max())


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("uses", ["l", "e", "le"])
@pytest.mark.parametrize(("width", "elements"), [(4, 12), (11, 22), (100, 1000), (3, 1)])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_values_and_gradients_agree_with_the_reference_for_every_tile(
    monkeypatch, epilogue, uses, width, elements, cap
):
    cut(monkeypatch, width=width, elements=elements)
    hidden, weight, targets = problem(7, 4, 11)
    inputs = (hidden, weight, torch.linspace(-1, 1, 11, dtype=torch.float64))
    for tensor in inputs:
        tensor.requires_grad_()
    found = statistics_of(*inputs[:2], targets, epilogue=epilogue, temperature=0.7, bias=inputs[2], cap=cap)
    expected = reference_of(*inputs[:2], targets, temperature=0.7, bias=inputs[2], cap=cap)
    for name in (*FIELDS, "hidden_norm_squared"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(found, inputs, uses), gradients(expected, inputs, uses), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_gradcheck(monkeypatch, scale):
    cut(monkeypatch, width=3, elements=6)
    hidden, weight, targets = problem(3, 2, 7, scale=scale)
    bias = torch.linspace(-1, 1, 7, dtype=torch.float64)

    def outputs(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        found = statistics_of(h, w, targets, epilogue="torch", temperature=1.3, bias=b)
        return found.log_probs, found.entropy

    assert torch.autograd.gradcheck(outputs, [tensor.requires_grad_() for tensor in (hidden, weight, bias)])


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", EPILOGUES)
@settings(max_examples=25)
@given(
    n=st.integers(0, 5),
    d=st.integers(1, 5),
    v=st.integers(1, 40),
    width=st.integers(1, 17),
    elements=st.integers(1, 60),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 1.0, 50.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_any_shape(epilogue, n, d, v, width, elements, seed, scale, temperature):
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, width=width, elements=elements)
        hidden, weight, targets = problem(n, d, v, seed=seed, scale=scale)
        inputs = (hidden.requires_grad_(), weight.requires_grad_())
        found = statistics_of(*inputs, targets, epilogue=epilogue, temperature=temperature)
        expected = reference_of(*inputs, targets, temperature=temperature)
        for name in FIELDS:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-10)
        assert bool((found.energy >= 0).all())
        for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_float32_agrees_to_1e_5_on_flat_and_peaked_distributions(monkeypatch, epilogue, scale, temperature):
    cut(monkeypatch, width=64, elements=256)
    generator = seeded(1)
    logits = torch.randn(9, 500, generator=generator) * scale
    logits[4:, 17] += 4 * scale
    hidden, weight, targets = of_logits(logits.tolist(), [17, 3, 400, 499, 17, 17, 5, 0, 499])
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    found = statistics_of(*inputs, targets, epilogue=epilogue, temperature=temperature)
    expected = reference_of(*inputs, targets, temperature=temperature)
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name), rtol=1e-5, atol=0)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert_near(one, other, 1e-5)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("miss", [1e-3, 1e-5, 1e-7, 1e-9, 1e-12])
def test_energy_stays_right_where_the_target_has_nearly_all_the_mass(epilogue, miss):
    # two other tokens of mass miss / 2 each: w = miss^2 + 2 (miss / 2)^2
    side = math.log(miss / 2 / (1 - miss))
    found = statistics_of(*of_logits([[side, 0.0, side]], [1]), epilogue=epilogue)
    assert float(found.energy) == pytest.approx(1.5 * miss**2, rel=1e-5)
    assert float(found.log_probs) == pytest.approx(math.log1p(-miss), rel=1e-5)
    entropy = -miss * math.log(miss / 2) - (1 - miss) * math.log1p(-miss)
    assert float(found.entropy) == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("miss", [1e-3, 1e-5, 1e-7, 1e-9])
def test_entropy_stays_right_where_another_token_has_nearly_all_the_mass(monkeypatch, epilogue, miss):
    cut(monkeypatch, width=2, elements=2)
    side = math.log(miss / 2 / (1 - miss))
    hidden, weight, targets = of_logits([[side, side, 0.0]], [0])
    weight.requires_grad_()
    found = statistics_of(hidden, weight, targets, epilogue=epilogue)
    entropy = -miss * math.log(miss / 2) - (1 - miss) * math.log1p(-miss)
    assert float(found.entropy.detach()) == pytest.approx(entropy, rel=1e-5)
    (slope,) = torch.autograd.grad(found.entropy.sum(), weight)
    # -p (ln p + H), with ln p = -miss for the dominant token
    assert float(slope[2]) == pytest.approx(-(1 - miss) * (math.log1p(-miss) + entropy), rel=1e-4)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(
    ("logits", "target"),
    [
        ([1e4, 1e4 - 1, -1e4, 0.0, 1e4 - 2], 1),
        ([-1e4, -1e4 + 1, -1e4 - 3, -1e4, -1e4], 0),
        ([1e4, -1e4, 0.0, -5.0, 3.0], 0),
        ([1e4, -1e4, 0.0, -5.0, 3.0], 1),
        ([2.0, 2.0, 2.0, 2.0, 2.0], 3),
        ([5.0, 5.0, 1.0, 5.0, 0.0], 2),
    ],
)
def test_extreme_and_equal_logits(monkeypatch, epilogue, logits, target):
    cut(monkeypatch, width=2, elements=2)
    hidden, weight, targets = of_logits([logits], [target])
    weight.requires_grad_()
    found = statistics_of(hidden, weight, targets, epilogue=epilogue, temperature=0.5)
    expected = reference_of(hidden, weight, targets, temperature=0.5)
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name), rtol=1e-5, atol=1e-30)
    (slope,) = gradients(found, (weight,))
    (wanted,) = gradients(expected, (weight,))
    assert bool(slope.isfinite().all())
    torch.testing.assert_close(slope, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("impossible", [[0], [4], [0, 1, 3], [0, 1, 3, 4]])
def test_impossible_tokens_add_nothing(monkeypatch, epilogue, width, impossible):
    cut(monkeypatch, width=width, elements=2)
    hidden, weight, targets = of_logits([[0.5, -1.0, 0.25, 2.0, 1.0]], [2], dtype=torch.float64)
    bias = torch.zeros(5, dtype=torch.float64)
    bias[impossible] = -torch.inf
    inputs = (weight.requires_grad_(), bias.requires_grad_())
    found = statistics_of(hidden, weight, targets, epilogue=epilogue, bias=bias)
    possible = [v for v in range(5) if v not in impossible]
    expected = reference_of(hidden, weight[possible], torch.tensor([possible.index(2)]))
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-15)
    slope, shift = gradients(found, inputs)
    assert bool(slope.isfinite().all())
    assert float(slope[impossible].abs().max()) == float(shift[impossible].abs().max()) == 0.0


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_target_of_probability_zero_is_minus_infinity_not_nan(epilogue):
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    found = statistics_of(*of_logits([[0.0, 0.0, 0.0]], [1]), epilogue=epilogue, bias=bias)
    assert [float(getattr(found, name)) for name in FIELDS] == pytest.approx([-math.inf, math.log(2), 0.5, 1.5])


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("place", [0, 1, 4])
def test_one_nan_reaches_all_statistics_of_its_row(monkeypatch, epilogue, place):
    cut(monkeypatch, width=2, elements=2)
    logits = [0.3, -1.0, 2.0, 0.0, 1.0]
    logits[place] = math.nan
    found = statistics_of(*of_logits([logits], [1]), epilogue=epilogue)
    assert all(bool(getattr(found, name).isnan()) for name in FIELDS)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_nan_row_touches_no_other_row(epilogue):
    hidden, weight, targets = problem(4, 3, 7)
    hidden[2, 0] = torch.nan
    found = statistics_of(hidden, weight, targets, epilogue=epilogue)
    for name in FIELDS:
        assert getattr(found, name).isnan().tolist() == [False, False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_vocabulary_of_152_thousand(epilogue):
    hidden, weight, targets = problem(2, 4, 151_937, dtype=torch.float32, scale=2.0)
    targets[1] = 151_936
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    found = statistics_of(*inputs, targets, epilogue=epilogue)
    expected = reference_of(*inputs, targets)
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name), rtol=1e-5, atol=0)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert_near(one, other, 1e-5)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_those_of_the_exact_function_rounded_once(monkeypatch, epilogue, half):
    cut(monkeypatch, width=16, elements=64)
    hidden, weight, targets = problem(6, 16, 40, dtype=half)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    found = gradients(statistics_of(*inputs, targets, epilogue=epilogue, temperature=0.7), inputs)
    exact = gradients(reference_of(*inputs, targets, temperature=0.7), inputs)
    step = torch.finfo(half).eps
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == half
        torch.testing.assert_close(one.double(), other.double(), rtol=step, atol=2e-6)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e7])
def test_gradients_rounded_for_the_products_keep_half_precision_at_any_size(monkeypatch, epilogue, half, size):
    # On GPUs the gradient of the logits is rounded to the inputs' half precision; here told to.
    monkeypatch.setattr(sliced, "logit_gradient_dtype", lambda hidden, weight, dtype: half)
    cut(monkeypatch, width=16, elements=64)
    hidden, weight, targets = problem(6, 16, 40, dtype=torch.float32)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    found = gradients_of(statistics_of(*inputs, targets, epilogue=epilogue, temperature=0.7), inputs, size)
    exact = gradients_of(reference_of(*inputs, targets, temperature=0.7), inputs, size)
    for one, other in zip(found, exact, strict=True):
        assert_near(one, other, 2 * torch.finfo(half).eps)


def gradients_of(statistics: TokenStatistics, inputs: tuple[Tensor, ...], size: float) -> tuple[Tensor, ...]:
    return torch.autograd.grad(((statistics.log_probs - 0.5 * statistics.entropy) * size).sum(), inputs)


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("factor", [torch.float64, torch.float16])
def test_no_token_gives_empty_results_and_zero_gradients(monkeypatch, epilogue, factor):
    monkeypatch.setattr(sliced, "logit_gradient_dtype", lambda hidden, weight, dtype: factor)
    hidden, weight, targets = problem(0, 3, 7)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    left, right = gradients(statistics_of(*inputs, targets, epilogue=epilogue), inputs)
    assert left.shape == (0, 3)
    assert torch.equal(right, torch.zeros(7, 3, dtype=torch.float64))


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_layout_and_index_dtype_do_not_matter(monkeypatch, epilogue):
    cut(monkeypatch, width=4, elements=8)
    hidden, weight, targets = problem(5, 3, 10)
    plain = statistics_of(hidden, weight, targets, epilogue=epilogue)
    odd = statistics_of(
        hidden.t().contiguous().t().requires_grad_(),
        weight.repeat_interleave(2, dim=0)[::2].requires_grad_(),
        targets.repeat_interleave(2).int()[::2],
        epilogue=epilogue,
    )
    for name in FIELDS:
        torch.testing.assert_close(getattr(odd, name), getattr(plain, name), rtol=1e-14, atol=1e-14)
    odd.log_probs.sum().backward()


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_gradients_flow_through_log_probs_and_entropy_only(epilogue):
    hidden, weight, targets = problem(4, 3, 7)
    found = statistics_of(hidden.requires_grad_(), weight, targets, epilogue=epilogue)
    flows = {name: getattr(found, name).requires_grad for name in (*FIELDS, "hidden_norm_squared")}
    assert {name for name, flowing in flows.items() if flowing} == {"log_probs", "entropy"}
    first = torch.autograd.grad(found.log_probs.sum(), hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(found.log_probs.sum(), hidden)[0])


@pytest.mark.slow
@needs_triton
@settings(max_examples=40)
@given(
    width=st.integers(1, 20),
    start=st.integers(0, 50),
    seed=st.integers(0, 1000),
    with_bias=st.booleans(),
    scale=st.sampled_from([1.0, 30.0]),
)
def test_the_epilogues_agree_on_a_slice_wherever_the_target_is(width, start, seed, with_bias, scale):
    triton_epilogue = importlib.import_module("agentrl.kernels.triton_epilogue")
    generator = seeded(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, bias = normal(4, width) * scale, normal(width) if with_bias else None
    targets = torch.randint(0, 75, (4,), generator=generator)
    before = torch.rand(4, 6, generator=generator, dtype=torch.float64)
    before[:, 0] = torch.tensor([-torch.inf, -100.0, 0.0, 100.0])
    before[0] = torch.tensor([-torch.inf, 0, 0, 0, 0, 0])
    heat = torch.tensor(0.7, dtype=torch.float64)
    one, other = before.clone(), before.clone()
    torch_epilogue.accumulate_sums(logits.clone(), bias, targets, one, heat, start=start)
    triton_epilogue.accumulate_sums(logits.clone(), bias, targets, other, heat, start=start)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    rest = (bias, targets, normal(4, 2) + 3, normal(4, 3), heat)
    left, right = torch.empty_like(logits), torch.empty_like(logits)
    torch_epilogue.write_logit_gradient(logits.clone(), *rest, left, start=start)
    triton_epilogue.write_logit_gradient(logits.clone(), *rest, right, start=start)
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside it, all but `given` and their views, held at once."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class NoEpilogue:
    """Computes nothing."""

    def accumulate_sums(self, *arguments: Any, **options: Any) -> None:
        pass

    def write_logit_gradient(self, *arguments: Any, **options: Any) -> None:
        pass


def test_extra_memory_on_a_gpu_is_under_300_mb_by_the_shapes_of_all_tensors(monkeypatch):
    # Tensors without data, told to be treated as a GPU's.
    monkeypatch.setitem(sliced.TILE_ELEMENTS, "cpu", sliced.TILE_ELEMENTS["cuda"])
    for module in (sliced, arithmetic):
        monkeypatch.setattr(module, "logit_gradient_dtype", lambda hidden, weight, dtype: torch.bfloat16)
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: nullcontext())
    # torch has no shape function for addmm with another output dtype; it makes no tensor.
    monkeypatch.setattr(sliced, "matmul_into", lambda left, right, out, *, accumulate: None)
    hidden = torch.empty(8192, 3584, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(151_936, 3584, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.zeros(8192, dtype=torch.int64, device="meta")
    with LiveBytes(hidden, weight, targets) as forward:
        found = sliced.sliced_statistics(hidden, weight, targets, 0.7, None, epilogue=NoEpilogue())
    with LiveBytes(hidden, weight, targets) as backward:
        (found.log_probs.sum() - found.entropy.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert 67e6 < forward.peak < 70e6
    assert 240e6 < backward.peak - weight.grad.nbytes < 300e6


@pytest.mark.slow
@needs_triton
def test_the_compiler_takes_the_kernels_for_gpus():
    """The interpreter allows more than the compiler; no GPU is needed to compile for one."""
    script = Path(__file__).with_name("compile_for_gpus.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sm_80", "sm_90"]


def test_auto_is_triton_on_a_gpu_where_it_is_installed(monkeypatch):
    devices = [torch.device(name) for name in ("cuda", "cpu")]
    monkeypatch.setattr(statistics, "triton_installed", lambda: True)
    assert [statistics.default_backend(device) for device in devices] == ["triton", "chunked"]
    monkeypatch.setattr(statistics, "triton_installed", lambda: False)
    assert [statistics.default_backend(device) for device in devices] == ["chunked", "chunked"]


def test_a_machine_without_triton_is_told_so(monkeypatch):
    monkeypatch.setattr(statistics, "triton_installed", lambda: False)
    with pytest.raises(KernelInputError, match=r"requires the package triton, .* select the chunked backend"):
        token_statistics(*problem(2, 3, 4), backend="triton")
    with pytest.raises(SettingsError, match=r"training\.head_backend=triton requires the package triton"):
        PolicyModel(torch.nn.Module(), backend="triton")


@needs_triton
def test_cpu_tensors_need_the_interpreter(monkeypatch):
    monkeypatch.setattr("agentrl.kernels.triton_epilogue.INTERPRETED", False)
    with torch.device("cpu"), pytest.raises(KernelInputError, match="requires tensors on a GPU, not on cpu"):
        token_statistics(*problem(2, 3, 4), backend="triton")
