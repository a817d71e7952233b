"""What a token of a transformer takes, each step by itself."""

from __future__ import annotations

import math
from typing import Any

from .. import _buffers, _native
from .._errors import Usage
from . import _tensors as t

_F32 = ("float32",)
_WEIGHTS = ("float32", "float16", "bfloat16", "uint8")
_MOST_HEAD = 256


def gemv(weights: Any, x: Any, out: Any = None, *, format: Any = None, accumulate: bool = False) -> Any:
    """The product of a matrix, as it is stored, and one vector or several: ``y = W x``.

    ``weights``: ``(rows, columns)`` of float32, float16 or bfloat16, or uint8 of the shape ``(rows, bytes of a row)`` with
    ``format``, one of ``"q4_0"``, ``"q4_1"``, ``"q8_0"``, ``"q4_k"``, ``"q6_k"``, ``"mxfp4"``, ``"float32"``,
    ``"float16"`` and ``"bfloat16"``: blocks as GGUF has them. ``columns`` is a multiple of 32, of 64 for ``mxfp4``, of 256
    for ``q4_k`` and ``q6_k``.
    ``x``: float32 of the shape ``(columns,)`` or ``(vectors, columns)``.
    ``out``: float32 of the shape ``(rows,)`` or ``(vectors, rows)``; with ``accumulate`` the product is added to it.

    Sums are made in float32. Returns ``out``. Raises :class:`Usage` for what does not fit.
    """
    w = t.operand(weights, "weights", _WEIGHTS)
    number, columns = t.formatted(w, "weights", format)
    v = t.operand(x, "x", _F32)
    if len(v.shape) not in (1, 2) or v.shape[-1] != columns:
        raise Usage(f"x has the shape {v.shape}", f"use ({columns},) or (vectors, {columns})")
    if accumulate and out is None:
        raise Usage("accumulate without out", "pass the sums so far as out")
    gpu = t.together(weights=w, x=v)
    rows = w.shape[0]
    y = t.place(out, "out", v, (*v.shape[:-1], rows))
    tokens = v.shape[0] if len(v.shape) == 2 else 1
    if gpu is None:
        t.run(_native.gemv_on_cpu(number, w.view, v.view, columns, y.view, t.flag("accumulate", accumulate)))
    else:
        addresses = (w.address, v.address, y.address)
        t.kernels(_native.Steps, gpu).gemv(number, (rows, columns, tokens), addresses, t.flag("accumulate", accumulate), t.stream(gpu))
    return y.value


def unpack(rows: Any, out: Any = None, *, format: Any = None) -> Any:
    """The numbers of rows as they are stored, as float32: bit by bit what GGUF's blocks say.

    ``rows``, ``format``: as the weights of :func:`gemv`. ``out``: float32 of the shape ``(rows, columns)``, which is
    returned. Raises :class:`Usage` for what does not fit.
    """
    r = t.operand(rows, "rows", _WEIGHTS)
    number, columns = t.formatted(r, "rows", format)
    y = t.place(out, "out", r, (r.shape[0], columns))
    if r.gpu is None:
        t.run(_native.unpack_on_cpu(number, r.view, columns, y.view))
    else:
        stride = r.shape[1] * {"uint8": 1, "float32": 4}.get(r.dtype, 2)
        shape = (r.shape[0], columns, stride)
        t.kernels(_native.Steps, r.gpu).unpack(number, shape, (r.address, y.address), t.stream(r.gpu))
    return y.value


def rms_norm(x: Any, weight: Any, out: Any = None, *, epsilon: float = 1e-6) -> Any:
    """``x / sqrt(mean(x * x) + epsilon) * weight`` over the last length.

    ``x``: float32 of the shape ``(..., n)``. ``weight``: float32 of the shape ``(n,)``. ``out``: as ``x``; it may be ``x``.
    Returns ``out``. Raises :class:`Usage` for what does not fit.
    """
    v = t.operand(x, "x", _F32)
    if not v.shape:
        raise Usage("x is one number", "use (..., n)")
    w = t.operand(weight, "weight", _F32)
    t.shaped(w, "weight", (v.shape[-1],))
    eps = t.epsilon_of(epsilon)
    gpu = t.together(x=v, weight=w)
    y = t.place(out, "out", v, v.shape)
    if gpu is None:
        t.run(_native.rms_norm_on_cpu(v.view, w.view, eps, y.view))
    elif v.count:
        shape = (v.count // v.shape[-1], v.shape[-1])
        t.kernels(_native.Steps, gpu).rms_norm(shape, eps, (v.address, w.address, y.address), t.stream(gpu))
    return y.value


def silu_mul(x: Any, factor: Any, out: Any = None) -> Any:
    """``x / (1 + exp(-x)) * factor``, element by element.

    ``x``, ``factor``: float32 of the same shape. ``out``: as ``x``; it may be ``x``. Returns ``out``.
    Raises :class:`Usage` for what does not fit.
    """
    v, f = t.operand(x, "x", _F32), t.operand(factor, "factor", _F32)
    t.shaped(f, "factor", v.shape)
    gpu = t.together(x=v, factor=f)
    y = t.place(out, "out", v, v.shape)
    if gpu is None:
        t.run(_native.silu_mul_on_cpu(v.view, f.view, y.view))
    else:
        t.kernels(_native.Steps, gpu).silu_mul(v.count, (v.address, f.address, y.address), t.stream(gpu))
    return y.value


def argmax(x: Any, out: Any = None) -> Any:
    """The place of the largest number over the last length, of equal ones the first; NaN is below every number.

    ``x``: float32 of the shape ``(..., n)``, ``n`` at least 1. ``out``: int64 of the shape ``(...)``, which is returned.
    On a GPU it takes two launches a vector. Raises :class:`Usage` for what does not fit.
    """
    v = t.operand(x, "x", _F32)
    if not v.shape or not v.shape[-1]:
        raise Usage(f"x has the shape {v.shape}", "use (..., n) with a number at least")
    y = t.place(out, "out", v, v.shape[:-1], "int64")
    if v.gpu is None:
        t.run(_native.argmax_on_cpu(v.view, v.shape[-1], y.view))
    else:
        torch: Any = _buffers.torch()
        best = torch.zeros(1, dtype=torch.int64, device=v.value.device)
        shape = (v.count // v.shape[-1], v.shape[-1])
        t.kernels(_native.Steps, v.gpu).argmax(shape, (v.address, best.data_ptr(), y.address), t.stream(v.gpu))
    return y.value


def rope_angles(positions: int, head_dim: int, base: float = 10_000.0, *, device: Any = None) -> Any:
    """Cosine and sine of each pair of each position, for :func:`rope`: float32 of the shape ``(positions, head_dim)``.

    Pair ``i`` of position ``p`` is turned by ``p * base ** (-2 * i / head_dim)``; computed in float64. ``head_dim``: an even
    number. ``device``: a device of torch, whose tensor is returned; None gives an array of numpy, or :class:`Array`
    without it.
    """
    count = t.whole("positions", positions, 0, (1 << 32) - 1)
    elements = t.whole("head_dim", head_dim, 2, _MOST_HEAD)
    if elements % 2:
        raise Usage(f"head_dim is {elements}", "use an even number: two make a pair that is turned")
    power = t.number("base", base, positive=True)
    torch: Any = _buffers.torch()
    if device is not None and torch is None:
        raise Usage("device= without torch", "import torch first")
    like = None if device is None else torch.empty(0)
    made = t.place(None, "angles", t.Operand(like, 0, (0,), "float32", None, None), (count, elements))
    t.run(_native.angles(count, elements, power, made.view))
    return made.value if device is None else made.value.to(torch.device(device))


def rope(queries: Any, keys: Any, values: Any, key_cache: Any, value_cache: Any, position: int, angles: Any) -> Any:
    """Turns queries and keys by their positions (RoPE; neighbouring elements are pairs), and puts keys and values into
    caches by position.

    ``queries``: float32 of the shape ``(tokens, heads, head_dim)``, which are turned in place. ``keys``, ``values``:
    ``(tokens, kv_heads, head_dim)``. ``key_cache``, ``value_cache``: ``(positions, kv_heads, head_dim)``, of which places
    ``position`` to ``position + tokens`` are written. ``angles``: :func:`rope_angles`, for as many positions at least.

    Returns ``queries``. Raises :class:`Usage` for what does not fit.
    """
    q = t.operand(queries, "queries", _F32, writable=True)
    t.shaped(q, "queries", ("tokens", "heads", "head_dim"))
    tokens, heads, elements = q.shape
    k, v = t.operand(keys, "keys", _F32), t.operand(values, "values", _F32)
    t.shaped(k, "keys", (tokens, "kv_heads", elements))
    t.shaped(v, "values", k.shape)
    kv_heads = k.shape[1]
    first, caches = _caches(key_cache, value_cache, position, tokens, (kv_heads, elements), True)
    a = t.operand(angles, "angles", _F32)
    t.shaped(a, "angles", ("positions", elements))
    if a.shape[0] < first + tokens:
        raise Usage(f"angles of {a.shape[0]} positions", f"use {first + tokens} or more")
    if elements % 2:
        raise Usage(f"heads of {elements} elements", "use an even number: two make a pair that is turned")
    gpu = t.together(queries=q, keys=k, values=v, key_cache=caches[0], value_cache=caches[1], angles=a)
    if not q.count and not k.count:
        return queries
    shape = (first, tokens, heads, kv_heads, elements)
    if gpu is None:
        t.run(_native.rope_on_cpu(shape, a.view, q.view, (k.view, v.view), (caches[0].view, caches[1].view)))
    else:
        addresses = (a.address, q.address, k.address, v.address, caches[0].address, caches[1].address)
        t.kernels(_native.Steps, gpu).rope(shape, addresses, t.stream(gpu))
    return queries


def attention(
    queries: Any, key_cache: Any, value_cache: Any, position: int, out: Any = None, *, scale: float | None = None
) -> Any:
    """Attention of the queries of a few tokens over a cache: each sees the places up to its own.

    ``queries``: float32 of the shape ``(tokens, heads, head_dim)``, ``head_dim`` up to 256; token ``i`` has the place
    ``position + i``. ``key_cache``, ``value_cache``: ``(positions, kv_heads, head_dim)``; ``heads`` is a multiple of
    ``kv_heads``. ``scale``: what products are multiplied by; None is ``1 / sqrt(head_dim)``.
    ``out``: as the queries, which is returned. Raises :class:`Usage` for what does not fit.
    """
    q = t.operand(queries, "queries", _F32)
    t.shaped(q, "queries", ("tokens", "heads", "head_dim"))
    tokens, heads, elements = q.shape
    if not 1 <= elements <= _MOST_HEAD:
        raise Usage(f"heads of {elements} elements", f"use 1 to {_MOST_HEAD}")
    first, (k, v) = _caches(key_cache, value_cache, position, tokens, ("kv_heads", elements), False)
    kv_heads = k.shape[1]
    if not kv_heads or heads % kv_heads:
        raise Usage(f"{heads} heads of queries over {kv_heads} of keys", "use a multiple")
    by = 1 / math.sqrt(elements) if scale is None else t.number("scale", scale)
    gpu = t.together(queries=q, key_cache=k, value_cache=v)
    y = t.place(out, "out", q, q.shape)
    shape = (first, tokens, heads, kv_heads, elements)
    if gpu is None:
        t.run(_native.attention_on_cpu(shape, q.view, (k.view, v.view), by, y.view))
    else:
        addresses = (q.address, k.address, v.address, y.address)
        t.kernels(_native.Steps, gpu).attention(shape, by, addresses, t.stream(gpu))
    return y.value


def _caches(
    key_cache: Any, value_cache: Any, position: Any, tokens: int, row: tuple[int | str, int], writable: bool
) -> tuple[int, tuple[t.Operand, t.Operand]]:
    keys = t.operand(key_cache, "key_cache", _F32, writable=writable)
    values = t.operand(value_cache, "value_cache", _F32, writable=writable)
    t.shaped(keys, "key_cache", ("positions", *row))
    t.shaped(values, "value_cache", keys.shape)
    first = t.whole("position", position, 0, (1 << 32) - 1)
    if first + tokens > keys.shape[0]:
        raise Usage(f"places {first} to {first + tokens} of a cache of {keys.shape[0]}", "use a larger cache")
    return first, (keys, values)
