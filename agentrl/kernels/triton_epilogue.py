"""Operations after the matrix product of a tile, in Triton. Each logit is read once.

A program loads one row of the tile into registers. In the forward pass it adds the row to the state of `sliced`
by the online recurrence. In the backward pass it overwrites the logits with their gradient. Sums are in the logits'
dtype. With TRITON_INTERPRET=1 in the environment before triton is imported, the kernels run on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if the kernels of this process run in Triton's interpreter, on CPU tensors."""


@triton.jit(do_not_specialize=["start"])
def accumulate_sums_kernel(  # type: ignore[no-untyped-def]  # Triton allows no Any in a kernel
    logits,
    bias,
    targets,
    sums,
    temperature,
    width,
    start,
    HAS_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one row of logits [R, width] to sums [R, 6], or [R, 7] with a cap, with the columns of `sliced`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    nothing = float("-inf")
    z = tl.load(logits + row * width + columns, mask=inside, other=nothing)
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0)
    t = tl.load(temperature)
    # A column beyond the slice may have the index of a target in another slice, so compare only columns inside.
    is_target = inside & (columns == tl.load(targets + row) - start)
    own = tl.sum(tl.where(is_target, z, 0.0), axis=0)
    z = tl.where(is_target, nothing, z)

    state = sums + row * (6 if CAP is None else 7)
    old = tl.load(state)
    ties, lower, squares = tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
    moment, target = tl.load(state + 4), tl.load(state + 5)

    top = tl.maximum(old, tl.max(z, axis=0))
    # Test z != -inf, so that NaN counts as a logit: z > -inf is false for NaN.
    possible = z != nothing
    anchor = tl.where(top == nothing, 0.0, top)
    shifts = tl.where(possible, (z - anchor) / t, 0.0)
    masses = tl.where(possible, tl.exp(shifts), 0.0)
    at_top = possible & (z == top)

    # A logit at the top has mass 1, which `ties` counts, so `lower` excludes it. For a top of inf, the mass is NaN, and
    # masses - 1 keeps the NaN.
    rises = top > old
    shift = tl.where(old == nothing, 0.0, (old - anchor) / t)
    factor = tl.exp(shift)
    before = ties + lower
    tl.store(state, top)
    tl.store(state + 1, tl.where(rises, 0.0, ties) + tl.sum(tl.where(at_top, 1.0, 0.0), axis=0))
    tl.store(
        state + 2,
        tl.where(rises, factor * before, lower) + tl.sum(tl.where(at_top, masses - 1.0, masses), axis=0),
    )
    tl.store(state + 3, factor * factor * squares + tl.sum(masses * masses, axis=0))
    tl.store(state + 4, factor * (moment + shift * before) + tl.sum(masses * shifts, axis=0))
    tl.store(state + 5, target + own)
    if CAP is not None:
        inner = tl.where(possible, z / CAP, 1.0)
        steep = masses * (1.0 - inner * inner)
        tl.store(state + 6, factor * factor * tl.load(state + 6) + tl.sum(steep * steep, axis=0))


@triton.jit(do_not_specialize=["start"])
def logit_gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    bias,
    targets,
    normalisers,
    coefficients,
    out,
    temperature,
    width,
    start,
    HAS_BIAS: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one row of the gradient to out [R, width]: at_target at the target, p (offset + slope ln p) elsewhere.

    out may be the same tensor as logits.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    z = tl.load(logits + row * width + columns, mask=inside, other=float("-inf"))
    if HAS_BIAS:
        z += tl.load(bias + columns, mask=inside, other=0.0)
    best, log_total = tl.load(normalisers + row * 2), tl.load(normalisers + row * 2 + 1)
    offset, slope = tl.load(coefficients + row * 3), tl.load(coefficients + row * 3 + 1)
    log_p = (z - best) / tl.load(temperature) - log_total
    log_p = tl.where(z == float("-inf"), -1e4, log_p)  # finite, so that 0 ln 0 is 0
    gradient = tl.exp(log_p) * (offset + slope * log_p)
    is_target = columns == tl.load(targets + row) - start
    gradient = tl.where(is_target, tl.load(coefficients + row * 3 + 2), gradient)
    if CAP is not None:
        inner = tl.where(inside, z / CAP, 1.0)
        gradient *= 1.0 - inner * inner
    tl.store(out + row * width + columns, gradient.to(out.dtype.element_ty), mask=inside)


def accumulate_sums(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    sums: Tensor,
    temperature: Tensor,
    *,
    start: int,
    cap: float | None = None,
) -> None:
    """Add the raw logits [R, W] of the tokens start..start+W to the state [R, 6] of their rows, in place.

    With a cap, the logits are already capped and the state is [R, 7]. bias [W] belongs to the same tokens. targets [R]
    index the complete vocabulary and may be outside this slice. All tensors are contiguous.
    """
    rows, width = logits.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(logits):
        accumulate_sums_kernel[(rows,)](
            *(logits, logits if bias is None else bias, targets, sums, temperature, width, start),
            HAS_BIAS=bias is not None,
            CAP=cap,
            BLOCK=block,
            num_warps=_warps(block),
        )


def write_logit_gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normalisers: Tensor,
    coefficients: Tensor,
    temperature: Tensor,
    out: Tensor,
    *,
    start: int,
    cap: float | None = None,
) -> None:
    """Write the gradient of a tile to out [R, W]: at_target at the target, p (offset + slope ln p) elsewhere.

    The tile contains the raw logits of the tokens from start on. With a cap, the logits are already capped, and the
    gradient is with respect to the logits before the cap. normalisers [R, 2] come from `statistics_from_sums`,
    coefficients [R, 3] are offset, slope and at_target. All tensors are contiguous. out may be the same tensor as the
    logits.
    """
    rows, width = logits.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(logits):
        logit_gradient_kernel[(rows,)](
            *(logits, logits if bias is None else bias, targets, normalisers, coefficients, out),
            *(temperature, width, start),
            HAS_BIAS=bias is not None,
            CAP=cap,
            BLOCK=block,
            num_warps=_warps(block),
        )


def _warps(block: int) -> int:
    return 4 if block <= 1024 else 8
