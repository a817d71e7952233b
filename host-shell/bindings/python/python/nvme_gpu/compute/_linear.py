"""Linear layers and their gradients."""

from __future__ import annotations

import math
from typing import Any, Literal

from .. import _buffers, _native
from .._errors import Usage
from . import _tensors as t

Activation = Literal["relu", "silu", "gelu"]
_F32 = ("float32",)
_HALVES = ("bfloat16", "float16")


def linear_forward_naive(
    x: Any, weights: Any, bias: Any = None, *, activation: Activation | None = None, out: Any = None, sums: Any = None
) -> Any:
    """:func:`linear_forward_fused` with a thread for each element, and the activation by a second kernel."""
    return _forward("naive", x, weights, bias, activation, out, sums)


def linear_forward_fused(
    x: Any, weights: Any, bias: Any = None, *, activation: Activation | None = None, out: Any = None, sums: Any = None
) -> Any:
    """``activation(x @ weights.T + bias)`` in one kernel, as ``torch.nn.functional.linear`` and an activation.

    ``x``: float32 of the shape ``(..., inputs)``. ``weights``: ``(outputs, inputs)``. ``bias``: ``(outputs,)``, or None.
    ``activation``: ``"relu"``, ``"silu"``, ``"gelu"`` (with tanh), or None. ``out``: ``(..., outputs)``, which is returned.
    ``sums``: as ``out``; gets what the activation is applied to, for :func:`linear_backward_atomic_free`.

    On a GPU tensor cores make each product of three of TF32, whose sum has about the accuracy of float32; in memory of the
    host threads of the CPU multiply, whichever of the functions is called. Raises :class:`Usage` for what does not fit.
    """
    return _forward("fused", x, weights, bias, activation, out, sums)


def linear_forward_persistent(
    x: Any, weights: Any, bias: Any = None, *, activation: Activation | None = None, out: Any = None, sums: Any = None
) -> Any:
    """:func:`linear_forward_fused` by blocks that stay and take one tile after another."""
    return _forward("persistent", x, weights, bias, activation, out, sums)


def linear_forward_mixed_precision(
    x: Any, weights: Any, bias: Any = None, *, activation: Activation | None = None, out: Any = None, sums: Any = None
) -> Any:
    """:func:`linear_forward_fused` of bfloat16 or float16 on a GPU, with sums in float32: ``sums`` is float32, all others
    are of one dtype. ``inputs`` is a multiple of 8."""
    return _forward("mixed", x, weights, bias, activation, out, sums)


def _layer(
    x: Any, weights: Any, dtypes: tuple[str, ...]
) -> tuple[t.Operand, t.Operand, tuple[int, int, int]]:
    v, w = t.operand(x, "x", dtypes), t.operand(weights, "weights", dtypes)
    t.shaped(w, "weights", ("outputs", "inputs"))
    outputs, inputs = w.shape
    if not v.shape or v.shape[-1] != inputs:
        raise Usage(f"x has the shape {v.shape}", f"use (..., {inputs})")
    return v, w, (math.prod(v.shape[:-1]), inputs, outputs)


def _forward(rung: str, x: Any, weights: Any, bias: Any, activation: Any, out: Any, sums: Any) -> Any:
    dtypes = _HALVES if rung == "mixed" else _F32
    v, w, shape = _layer(x, weights, dtypes)
    b = None if bias is None else t.operand(bias, "bias", (v.dtype,))
    if b is not None:
        t.shaped(b, "bias", (shape[2],))
    if w.dtype != v.dtype:
        raise Usage(f"x is {v.dtype}, weights {w.dtype}", "use one dtype for both")
    gpu = t.together(x=v, weights=w, bias=b)
    whole = (*v.shape[:-1], shape[2])
    y = t.place(out, "out", v, whole, v.dtype)
    before = None if sums is None else t.place(sums, "sums", v, whole)
    name = _name(activation)
    if gpu is None:
        if rung == "mixed":
            raise Usage(f"x is {v.dtype} in memory of the host", "use float32, or a GPU")
        views = (None if b is None else b.view, y.view, None if before is None else before.view)
        t.run(_native.linear_forward_on_cpu(shape, name, v.view, w.view, *views))
        return y.value
    addresses = (v.address, w.address, 0 if b is None else b.address, y.address, 0 if before is None else before.address)
    kind = v.dtype if rung == "mixed" else rung
    t.kernels(_native.Linear, gpu).forward(kind, shape, name, addresses, t.stream(gpu))
    return y.value


def _name(activation: Any) -> str:
    if activation not in (None, "relu", "silu", "gelu"):
        raise Usage(f"activation is {activation!r}", "use 'relu', 'silu', 'gelu' or None")
    return activation or "none"


def linear_backward_naive(
    dy: Any, x: Any, weights: Any, sums: Any = None, *, activation: Activation | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Any, Any, Any]:  # fmt: skip
    """:func:`linear_backward_atomic_free` with gradients of weights and biases by atomic additions: other bits each time."""
    return _backward("naive", dy, x, weights, sums, activation, needs)


def linear_backward_atomic_free(
    dy: Any, x: Any, weights: Any, sums: Any = None, *, activation: Activation | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of a linear layer: of inputs, weights and biases, by ``dy``, that of its results. The same bits each
    time.

    ``dy``: float32 of the shape ``(..., outputs)``. ``x``, ``weights``: as for :func:`linear_forward_fused`. ``sums``: what
    that put there; it is needed with an ``activation``. ``needs``: which of the three are wanted; the others are None.

    In memory of the host threads of the CPU compute, whichever of the functions is called. Raises :class:`Usage` for what
    does not fit.
    """
    return _backward("atomic_free", dy, x, weights, sums, activation, needs)


def linear_backward_warp_reduce(
    dy: Any, x: Any, weights: Any, sums: Any = None, *, activation: Activation | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Any, Any, Any]:  # fmt: skip
    """:func:`linear_backward_atomic_free` with sums over the lanes of a warp."""
    return _backward("warp_reduce", dy, x, weights, sums, activation, needs)


def _backward(
    rung: str, dy: Any, x: Any, weights: Any, sums: Any, activation: Any, needs: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    v, w, shape = _layer(x, weights, _F32)
    needs = (t.flag("needs[0]", needs[0]), t.flag("needs[1]", needs[1]), t.flag("needs[2]", needs[2]))
    name = _name(activation)
    whole = (*v.shape[:-1], shape[2])
    g = t.operand(dy, "dy", _F32)
    t.shaped(g, "dy", whole)
    if sums is None and name != "none":
        raise Usage(f"the gradient of {name} without sums", "pass what linear_forward_fused put into sums")
    before = None if sums is None else t.operand(sums, "sums", _F32)
    if before is not None:
        t.shaped(before, "sums", whole)
    gpu = t.together(dy=g, x=v, weights=w, sums=before)
    dx = t.place(None, "dx", v, v.shape) if needs[0] else None
    dweights = t.place(None, "dweights", v, w.shape) if needs[1] else None
    dbias = t.place(None, "dbias", v, (shape[2],)) if needs[2] else None
    wanted = (dx, dweights, dbias)
    if gpu is None:
        # Without an activation sums have no part in it.
        last = g if before is None else before
        views = [None if one is None else one.view for one in wanted]
        given = (v.view, w.view, last.view, g.view)
        t.run(_native.linear_backward_on_cpu(shape, name, given, (views[0], views[1], views[2])))
    else:
        room = None if name == "none" else t.place(None, "dsums", v, whole)
        places = [0 if one is None else one.address for one in wanted]
        at = [0 if one is None else one.address for one in (before, room)]
        inputs = (v.address, w.address, at[0], g.address, at[1])
        t.kernels(_native.Linear, gpu).backward(rung, shape, name, inputs, (places[0], places[1], places[2]), t.stream(gpu))
    found = [None if one is None else one.value for one in wanted]
    return found[0], found[1], found[2]


def linear(x: Any, weights: Any, bias: Any = None, *, activation: Activation | None = None) -> Any:
    """``activation(x @ weights.T + bias)`` over float32 tensors of torch, with gradients.

    As :func:`linear_forward_fused` forward and :func:`linear_backward_atomic_free` backward, by autograd: gradients of
    ``x``, ``weights`` and ``bias`` are computed where they are wanted. A gradient of a gradient is not offered.

    Raises :class:`Usage` for what does not fit.
    """
    torch = _buffers.torch()
    if torch is None or not all(one is None or _buffers.is_tensor(one) for one in (x, weights, bias)):
        raise Usage("arguments that are no tensors of torch", "use linear_forward_fused, or tensors")
    from ._autograd import LinearFunction

    return LinearFunction.apply(x, weights, bias, activation)
