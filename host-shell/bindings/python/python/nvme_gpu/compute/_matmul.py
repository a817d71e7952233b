"""Products of two matrices in memory, by the rungs of the ladder."""

from __future__ import annotations

from typing import Any, Literal

from .. import _native
from .._errors import Usage
from . import _tensors as t

Rung = Literal["auto", "naive", "tiled", "vectorized", "coarsened", "mma", "wgmma"]
_OF_FLOATS = ("naive", "tiled", "vectorized", "coarsened")
_OF_HALVES = ("mma", "wgmma")
_DTYPES = ("float32", "float16", "bfloat16")


def matmul(a: Any, b: Any, out: Any = None, *, rung: Rung = "auto") -> Any:
    """``a @ b``.

    ``a``: of the shape ``(m, k)``, ``b``: ``(k, n)``, of one dtype. On a GPU their rows may have gaps: slices of columns are
    taken as they are. ``out``: ``(m, n)`` of the same dtype, or float32; it is returned. Sums are made in float32.

    ``rung``: which kernel multiplies, on a GPU: of float32 ``"naive"``, ``"tiled"``, ``"vectorized"`` or ``"coarsened"``; of
    float16 and bfloat16 ``"mma"``, or ``"wgmma"`` on a GPU of compute capability 9.0. ``"auto"`` is the fastest of them.
    In memory of the host threads multiply float32, and ``rung`` has to be ``"auto"``.

    Raises :class:`Usage` for what does not fit.
    """
    x, y = t.operand(a, "a", _DTYPES, gaps=True), t.operand(b, "b", _DTYPES, gaps=True)
    m, n, k = _shape(x, y)
    if x.dtype != y.dtype:
        raise Usage(f"a is {x.dtype}, b {y.dtype}", "use one dtype for both")
    gpu = t.together(a=x, b=y)
    if gpu is None:
        if rung != "auto":
            raise Usage(f"the rung {rung!r} in memory of the host", "use 'auto', matmul_cpu or matmul_cpu_blocked")
        return _on_cpu(x, y, out, (m, n, k), True)
    if out is None:
        z = t.place(None, "out", x, (m, n), x.dtype)
    else:
        z = t.operand(out, "out", tuple({x.dtype, "float32"}), writable=True, gaps=True)
        t.shaped(z, "out", (m, n))
        t.together(a=x, out=z)
    ladder = t.kernels(_native.Ladder, gpu)
    known = _OF_FLOATS if x.dtype == "float32" else _OF_HALVES
    name = rung
    if rung == "auto":
        name = "coarsened" if x.dtype == "float32" else "wgmma" if ladder.has("wgmma") else "mma"
    if name not in known:
        raise Usage(f"the rung {rung!r} for {x.dtype}", "use one of auto, " + ", ".join(known))
    places = tuple((one.address, one.stride) for one in (x, y, z))
    ladder.matmul(name, (m, n, k), (x.dtype, z.dtype), places, t.stream(gpu))
    return z.value


def matmul_cpu(a: Any, b: Any, out: Any = None) -> Any:
    """``a @ b`` of float32 in memory of the host, element by element on one thread: what the others are compared with."""
    return _of_host(a, b, out, False)


def matmul_cpu_blocked(a: Any, b: Any, out: Any = None) -> Any:
    """``a @ b`` of float32 in memory of the host, by all threads, in blocks that fit into their caches."""
    return _of_host(a, b, out, True)


def matmul_naive(a: Any, b: Any, out: Any = None) -> Any:
    """:func:`matmul` of float32 on a GPU with a thread for each element."""
    return _by(a, b, out, "naive")


def matmul_tiled(a: Any, b: Any, out: Any = None) -> Any:
    """:func:`matmul` of float32 on a GPU by tiles in shared memory."""
    return _by(a, b, out, "tiled")


def matmul_vectorized(a: Any, b: Any, out: Any = None) -> Any:
    """:func:`matmul` of float32 on a GPU with loads and stores of 16 bytes."""
    return _by(a, b, out, "vectorized")


def matmul_coarsened(a: Any, b: Any, out: Any = None) -> Any:
    """:func:`matmul` of float32 on a GPU with 8 x 8 elements for each thread."""
    return _by(a, b, out, "coarsened")


def matmul_mma(a: Any, b: Any, out: Any = None) -> Any:
    """:func:`matmul` of float16 or bfloat16 on a GPU by tensor cores (``mma.sync``)."""
    return _by(a, b, out, "mma")


def matmul_wmma(a: Any, b: Any, out: Any = None) -> Any:
    """:func:`matmul_mma`, by the name of CUDA's interface to tensor cores."""
    return _by(a, b, out, "mma")


def matmul_wgmma(a: Any, b: Any, out: Any = None) -> Any:
    """:func:`matmul` of float16 or bfloat16 by tensor cores of compute capability 9.0 (``wgmma``, fed by TMA)."""
    return _by(a, b, out, "wgmma")


def _by(a: Any, b: Any, out: Any, rung: Rung) -> Any:
    return matmul(a, b, out, rung=rung)


def _shape(a: t.Operand, b: t.Operand) -> tuple[int, int, int]:
    t.shaped(a, "a", ("m", "k"))
    t.shaped(b, "b", (a.shape[1], "n"))
    return a.shape[0], b.shape[1], a.shape[1]


def _of_host(a: Any, b: Any, out: Any, is_blocked: bool) -> Any:
    x, y = t.operand(a, "a", ("float32",)), t.operand(b, "b", ("float32",))
    shape = _shape(x, y)
    if t.together(a=x, b=y) is not None:
        raise Usage("matrices in memory of a GPU", "use matmul, or matrices in memory of the host")
    return _on_cpu(x, y, out, shape, is_blocked)


def _on_cpu(a: t.Operand, b: t.Operand, out: Any, shape: tuple[int, int, int], is_blocked: bool) -> Any:
    for one, what in ((a, "a"), (b, "b")):
        if one.dtype != "float32":
            raise Usage(f"{what} is {one.dtype} in memory of the host", "use float32, or a GPU")
        if one.count and one.stride != one.shape[1]:
            raise Usage(f"{what} is not contiguous", f"pass {what}.contiguous()")
    c = t.place(out, "out", a, shape[:2])
    t.run(_native.matmul_on_cpu(a.view, b.view, c.view, shape, is_blocked))
    return c.value
