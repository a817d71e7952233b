"""Gradients by autograd. Loaded with the first function that has one: it imports torch."""

from __future__ import annotations

from typing import Any

import torch as _torch
from torch.autograd.function import once_differentiable

from ._linear import linear_backward_atomic_free, linear_forward_fused


class LinearFunction(_torch.autograd.Function):
    """A linear layer and its activation."""

    @staticmethod
    def forward(ctx: Any, x: Any, weights: Any, bias: Any, activation: Any) -> Any:
        sums = None
        if activation is not None:
            sums = _torch.empty((*x.shape[:-1], weights.shape[0]), dtype=_torch.float32, device=x.device)
        ctx.save_for_backward(x, weights, sums)
        ctx.activation, ctx.has_bias = activation, bias is not None
        return linear_forward_fused(x, weights, bias, activation=activation, sums=sums)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weights, sums = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2])
        # A gradient that autograd made may have gaps: of an expanded sum, for one.
        found = linear_backward_atomic_free(
            grads[0].contiguous(), x, weights, sums, activation=ctx.activation, needs=needs
        )
        return (*found, None)
