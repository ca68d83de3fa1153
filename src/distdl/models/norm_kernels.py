# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""BatchNorm, the addition of a residual and ReLU in one pass over NHWC memory, in Triton.

Training a convolutional net is bound by memory. What torch does one after the other (normalise,
add, ReLU, each reading and writing the whole tensor) is one kernel here, after one that takes the
moments. The backward tells by the output where the ReLU was open: its input is never kept.

Formulas: Ioffe and Szegedy 2015 (https://arxiv.org/abs/1502.03167), section 3; moments are merged
block by block (Chan, Golub and LeVeque 1979), not as a difference of large sums.

Tensors are seen as a matrix, rows = B x H x W, columns = C, which is what channels_last is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PROGRAMS = 1024  # of a sum over the rows: some for each of a GPU's 100 to 150 multiprocessors
BLOCK = 4096  # values at a time


@triton.jit
def _block(row, column, ROWS, C, BM: tl.constexpr, BC: tl.constexpr):
    """Places and mask of a block [BM, BC]; places beyond 2^31 are common at large batches."""
    rows = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BC)
    places = rows.to(tl.int64)[:, None] * C + columns[None, :]
    return places, (rows < ROWS)[:, None] & (columns < C)[None, :]


@triton.jit
def _moments(x, means, squares, ROWS, C, STEP, BM: tl.constexpr, BC: tl.constexpr, F: tl.constexpr):
    """Mean and sum of squared differences of `STEP` rows, per column: [splits, C]."""
    column = tl.program_id(0) * BC
    first = tl.program_id(1) * STEP
    mean = tl.zeros((BC,), F)
    square = tl.zeros((BC,), F)
    seen = 0
    for start in range(0, STEP, BM):
        places, inside = _block(first + start, column, ROWS, C, BM, BC)
        values = tl.load(x + places, mask=inside, other=0.0).to(F)
        count = tl.maximum(tl.minimum(ROWS - first - start, BM), 0)
        here = tl.sum(values, 0) / tl.maximum(count, 1).to(F)
        off = tl.where(inside, values - here[None, :], 0.0)
        apart = here - mean
        share = count.to(F) / tl.maximum(seen + count, 1).to(F)
        square += tl.sum(off * off, 0) + apart * apart * (share * seen)
        mean += apart * share
        seen += count
    columns = column + tl.arange(0, BC)
    to = tl.program_id(1) * C + columns
    tl.store(means + to, mean, mask=columns < C)
    tl.store(squares + to, square, mask=columns < C)


@triton.jit
def _forward(
    x, z, y, mean, scale, shift, ROWS, C,
    ADD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BC
    places, inside = _block(tl.program_id(0) * BM, column, ROWS, C, BM, BC)
    columns = column + tl.arange(0, BC)
    of_c = columns < C
    m = tl.load(mean + columns, mask=of_c, other=0.0)
    a = tl.load(scale + columns, mask=of_c, other=0.0)
    b = tl.load(shift + columns, mask=of_c, other=0.0)
    values = tl.load(x + places, mask=inside, other=0.0).to(F)
    out = (values - m[None, :]) * a[None, :] + b[None, :]
    if ADD:
        out += tl.load(z + places, mask=inside, other=0.0).to(F)
    # NaN stays NaN, as in torch's ReLU.
    out = tl.where(out < 0, 0.0, out)
    tl.store(y + places, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sums(
    dy, y, x, mean, sums, products, ROWS, C, STEP,
    BM: tl.constexpr, BC: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Of the gradient behind the ReLU, and of it times (x - mean): [splits, C]."""
    column = tl.program_id(0) * BC
    first = tl.program_id(1) * STEP
    columns = column + tl.arange(0, BC)
    m = tl.load(mean + columns, mask=columns < C, other=0.0)
    total = tl.zeros((BC,), F)
    product = tl.zeros((BC,), F)
    for start in range(0, STEP, BM):
        places, inside = _block(first + start, column, ROWS, C, BM, BC)
        gradient = tl.load(dy + places, mask=inside, other=0.0).to(F)
        out = tl.load(y + places, mask=inside, other=0.0)
        gradient = tl.where(out > 0, gradient, 0.0)
        values = tl.load(x + places, mask=inside, other=0.0).to(F)
        total += tl.sum(gradient, 0)
        product += tl.sum(gradient * (values - m[None, :]), 0)
    to = tl.program_id(1) * C + columns
    tl.store(sums + to, total, mask=columns < C)
    tl.store(products + to, product, mask=columns < C)


@triton.jit
def _backward(
    dy, y, x, dx, dz, mean, scale, offset, slope, ROWS, C,
    ADD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * BC
    places, inside = _block(tl.program_id(0) * BM, column, ROWS, C, BM, BC)
    columns = column + tl.arange(0, BC)
    of_c = columns < C
    m = tl.load(mean + columns, mask=of_c, other=0.0)
    a = tl.load(scale + columns, mask=of_c, other=0.0)
    b = tl.load(offset + columns, mask=of_c, other=0.0)
    s = tl.load(slope + columns, mask=of_c, other=0.0)
    gradient = tl.load(dy + places, mask=inside, other=0.0).to(F)
    out = tl.load(y + places, mask=inside, other=0.0)
    gradient = tl.where(out > 0, gradient, 0.0)
    values = tl.load(x + places, mask=inside, other=0.0).to(F)
    found = a[None, :] * (gradient - b[None, :] - (values - m[None, :]) * s[None, :])
    tl.store(dx + places, found.to(dx.dtype.element_ty), mask=inside)
    if ADD:
        tl.store(dz + places, gradient.to(dz.dtype.element_ty), mask=inside)


class _Plan:
    """How a matrix [rows, C] is cut, and in what its sums are kept."""

    def __init__(self, x: torch.Tensor) -> None:
        self.columns = x.shape[1]
        self.rows = x.numel() // self.columns
        double = x.dtype == torch.float64
        self.sums = torch.float64 if double else torch.float32
        width = min(128, triton.next_power_of_2(self.columns))
        height = min(BLOCK // width, triton.next_power_of_2(self.rows))
        self.blocks = {"BM": height, "BC": width, "F": tl.float64 if double else tl.float32}
        across, down = triton.cdiv(self.columns, width), triton.cdiv(self.rows, height)
        self.each = down, across
        per_program = triton.cdiv(down, max(1, min(down, PROGRAMS // across)))
        self.step = per_program * height
        self.splits = triton.cdiv(down, per_program)
        self.reduced = across, self.splits

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.splits, self.columns, dtype=self.sums, device=x.device)


class NormAddReLU(torch.autograd.Function):
    """relu(batch_norm(x) + z) with the batch's own moments; z may be None.

    `apply(x, z, weight, bias, eps)` gives y, and the mean and the biased variance [C] of the batch
    for the running statistics, which carry no gradient.

    Args:
        x: [B, C, H, W], channels_last; float64 is summed in float64, everything else in float32.
        z: Like x, or None.
        weight, bias: [C].
        eps: Added to the variance.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, z: Any, weight: Any, bias: Any, eps: float) -> Any:
        plan = _Plan(x)
        rows, columns = plan.rows, plan.columns
        means, squares = plan.partial(x), plan.partial(x)
        _moments[plan.reduced](x, means, squares, rows, columns, plan.step, **plan.blocks)
        starts = torch.arange(plan.splits, device=x.device) * plan.step
        counts = (rows - starts).clamp(max=plan.step).to(plan.sums)[:, None]
        mean = (means * counts).sum(0) / rows
        variance = (squares.sum(0) + ((means - mean).square() * counts).sum(0)) / rows
        inverse = (variance + eps).rsqrt()
        scale = weight.to(plan.sums) * inverse
        y = torch.empty_like(x)
        _forward[plan.each](
            *(x, x if z is None else z, y, mean, scale, bias.to(plan.sums), rows, columns),
            ADD=z is not None,
            **plan.blocks,
        )
        ctx.save_for_backward(x, y, mean, inverse, weight)
        ctx.adds = z is not None
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, y, mean, inverse, weight = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        plan = _Plan(x)
        rows, columns = plan.rows, plan.columns
        sums, products = plan.partial(x), plan.partial(x)
        _sums[plan.reduced](dy, y, x, mean, sums, products, rows, columns, plan.step, **plan.blocks)
        total, product = sums.sum(0), products.sum(0)
        dx = torch.empty_like(x)
        dz = torch.empty_like(x) if ctx.adds else None
        scale = weight.to(plan.sums) * inverse
        _backward[plan.each](
            *(dy, y, x, dx, dx if dz is None else dz, mean, scale),
            *(total / rows, product * inverse.square() / rows, rows, columns),
            ADD=ctx.adds,
            **plan.blocks,
        )
        dweight, dbias = (product * inverse).to(weight.dtype), total.to(weight.dtype)
        return dx, dz, dweight, dbias, None
