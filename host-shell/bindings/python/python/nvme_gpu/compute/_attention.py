"""Attention of many queries over keys and values in memory."""

from __future__ import annotations

import math
from typing import Any, Literal

from .. import _buffers, _native
from .._errors import Usage
from . import _tensors as t

Rung = Literal["auto", "naive", "tiled", "flash", "flash2", "multi_query"]
_HALVES = ("bfloat16", "float16")
_MOST = 128


def attention_naive(
    q: Any, k: Any, v: Any, out: Any = None, *, causal: bool = False, scale: float | None = None, counts: Any = None
) -> Any:
    """:func:`attention_flash2` with all scores in memory, and a thread for each."""
    return _attend("naive", q, k, v, out, causal, scale, counts)


def attention_tiled(
    q: Any, k: Any, v: Any, out: Any = None, *, causal: bool = False, scale: float | None = None, counts: Any = None
) -> Any:
    """:func:`attention_flash2` with all scores in memory, and products by tiles of shared memory."""
    return _attend("tiled", q, k, v, out, causal, scale, counts)


def attention_flash(
    q: Any, k: Any, v: Any, out: Any = None, *, causal: bool = False, scale: float | None = None, counts: Any = None
) -> Any:
    """:func:`attention_flash2` with a softmax that is summed up tile by tile, as FlashAttention's first version has it."""
    return _attend("flash", q, k, v, out, causal, scale, counts)


def attention_flash2(
    q: Any, k: Any, v: Any, out: Any = None, *, causal: bool = False, scale: float | None = None, counts: Any = None
) -> Any:
    """Attention without scores in memory, by tensor cores, as FlashAttention's second version shares it out.

    ``q``: of the shape ``(sequences, heads, tokens, head_dim)``. ``k``, ``v``: ``(sequences, kv_heads, keys, head_dim)``;
    ``heads`` is a multiple of ``kv_heads``; ``head_dim`` a multiple of 8 up to 128. ``causal``: the last query sees all
    keys, each before it one less. ``scale``: None is ``1 / sqrt(head_dim)``. ``counts``: int32 of the shape
    ``(sequences,)``: how many keys count; one that is negative or too large is refused, on a GPU by NaN for its sequence.
    ``out``: as ``q``, which is returned. A query without a key is zeros.

    On a GPU all are float16, or all bfloat16; the elements of a head lie side by side, other strides are multiples of 8:
    a transposed ``(sequences, tokens, heads, head_dim)`` is taken as it is. In memory of the host they are float32 and
    contiguous, and threads of the CPU compute, whichever of the functions is called.

    Raises :class:`Usage` for what does not fit.
    """
    return _attend("flash2", q, k, v, out, causal, scale, counts)


def multi_query_attention(
    q: Any, k: Any, v: Any, out: Any = None, *, causal: bool = False, scale: float | None = None, counts: Any = None
) -> Any:
    """:func:`attention_flash2` for few queries of many heads that share keys and values: decoding. Each key is loaded once
    for all of them, and the keys of a sequence are shared out among blocks."""
    return _attend("multi_query", q, k, v, out, causal, scale, counts)


def _attend(rung: Rung, q: Any, k: Any, v: Any, out: Any, causal: bool, scale: Any, counts: Any) -> Any:
    dtypes = (*_HALVES, "float32")
    queries, keys, values = (
        t.operand(one, what, dtypes, gaps=True) for one, what in ((q, "q"), (k, "k"), (v, "v"))
    )
    t.shaped(queries, "q", ("sequences", "heads", "tokens", "head_dim"))
    sequences, heads, tokens, elements = queries.shape
    t.shaped(keys, "k", (sequences, "kv_heads", "keys", elements))
    t.shaped(values, "v", keys.shape)
    kv_heads, length = keys.shape[1:3]
    if not kv_heads or heads % kv_heads:
        raise Usage(f"{heads} heads of queries over {kv_heads} of keys", "use a multiple")
    if elements % 8 or not 8 <= elements <= _MOST:
        raise Usage(f"heads of {elements} elements", f"use a multiple of 8 up to {_MOST}")
    for one, what in ((keys, "k"), (values, "v")):
        if one.dtype != queries.dtype:
            raise Usage(f"q is {queries.dtype}, {what} {one.dtype}", "use one dtype for all")
    number = None if counts is None else t.operand(counts, "counts", ("int32",))
    if number is not None:
        t.shaped(number, "counts", (sequences,))
    by = 1 / math.sqrt(elements) if scale is None else t.number("scale", scale, positive=True)
    gpu = t.together(q=queries, k=keys, v=values, counts=number)
    shape = (sequences, heads, kv_heads, tokens, length, elements)
    if gpu is None:
        return _on_cpu(shape, (queries, keys, values), out, t.flag("causal", causal), by, number)
    if queries.dtype == "float32":
        raise Usage("q is float32 on a GPU", "use bfloat16 or float16")
    if out is None:
        # With the strides of the queries, so that layers that transpose them need no copy.
        made = _buffers.torch().empty_like(queries.value)  # type: ignore[union-attr]
        y = t.operand(made, "out", (queries.dtype,), gaps=True)
    else:
        y = t.operand(out, "out", (queries.dtype,), writable=True, gaps=True)
        t.shaped(y, "out", queries.shape)
        t.together(q=queries, out=y)
    places = tuple(_place(one, what) for one, what in ((queries, "q"), (keys, "k"), (values, "v"), (y, "out")))
    kernels = t.kernels(_native.Attention, gpu)
    room = kernels.workspace_bytes(rung, shape)
    # Kept until the launch is in the stream: its memory is given to others in the stream's order only from then on.
    workspace = t.scratch(queries, room) if room else None
    more = (0 if number is None else number.address, 0 if workspace is None else workspace.address)
    kernels.attend(rung, shape, queries.dtype == "bfloat16", t.flag("causal", causal), by, places, more, t.stream(gpu))
    if number is not None:
        y.value.masked_fill_(t.outside(number, length).view(-1, 1, 1, 1), math.nan)
    return y.value


def _place(one: t.Operand, what: str) -> tuple[int, int, int, int]:
    strides = one.value.stride()
    if any(length > 1 and stride % 8 for length, stride in zip(one.shape[:3], strides[:3])):
        raise Usage(f"{what} has the strides {tuple(strides)}", "use multiples of 8: a copy by contiguous()")
    # The stride of one vector alone does not matter, and may be anything.
    sequence, head, token = (stride if length > 1 else 0 for length, stride in zip(one.shape[:3], strides[:3]))
    return one.address, sequence, head, token


def _on_cpu(
    shape: tuple[int, int, int, int, int, int],
    given: tuple[t.Operand, t.Operand, t.Operand],
    out: Any,
    causal: bool,
    scale: float,
    counts: t.Operand | None,
) -> Any:
    for one, what in zip(given, "qkv"):
        if one.dtype != "float32":
            raise Usage(f"{what} is {one.dtype} in memory of the host", "use float32, or a GPU")
        if not one.contiguous:
            raise Usage(f"{what} is not contiguous", f"pass {what}.contiguous()")
    y = t.place(out, "out", given[0], given[0].shape)
    views = (given[0].view, given[1].view, given[2].view)
    t.run(_native.flash_on_cpu(shape, causal, scale, views, y.view, None if counts is None else counts.view))
    return y.value
