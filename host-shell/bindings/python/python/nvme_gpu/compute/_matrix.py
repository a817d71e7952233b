"""A matrix on a store, and its product with a vector."""

from __future__ import annotations

from typing import Any

from .. import _native
from .._errors import Timeout, Usage
from .._held import Launching
from .._store import Store
from . import _tensors as t

_MOST = (1 << 32) - 1


def store_of(store: Any) -> _native.Store:
    """The store of the extension module."""
    if not isinstance(store, Store):
        raise TypeError(f"store is of the type {type(store).__name__}: use nvme_gpu.open")
    return store._native


class Matrix(Launching):
    """A matrix on a store, row after row, as a file of tensors has it: its products are computed while it is read.

    ``offset``: its first byte in the store, an even number. ``format``: as for :func:`gemv`. ``shape``:
    ``(rows, columns)``; ``columns`` is a multiple of 32, of 64 for ``mxfp4``, of 256 for ``q4_k`` and ``q6_k``.

    On a GPU a kernel reads it and multiplies what has landed: the store is one drive, opened with that GPU. No copy of it
    is made in memory of the GPU. Closing the store closes it. Any number of threads may use it.

    Raises :class:`Usage` for a matrix that does not lie inside the store.
    """

    __slots__ = ("_store", "_native", "_format", "_shape", "__weakref__")
    _LAUNCHED = "products"

    def __init__(self, store: Store, offset: int, format: Any, shape: tuple[int, int]) -> None:
        native = store_of(store)
        self._format = t.format_of(format)
        lengths = tuple(shape)
        if len(lengths) != 2:
            raise Usage(f"the shape {lengths} of a matrix", "use (rows, columns)")
        rows, columns = (t.whole("a length of the shape", length, 0, _MOST) for length in lengths)
        place = t.whole("offset", offset, 0, (1 << 63) - 1)
        self._store, self._shape = store, (rows, columns)
        self._native = _native.Matrix(native, place, t.FORMATS[self._format][0], (rows, columns))

    @property
    def store(self) -> Store:
        """The store on which it lies."""
        return self._store

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, columns)``."""
        return self._shape

    @property
    def format(self) -> str:
        """The name of its format."""
        return self._format

    @property
    def nbytes(self) -> int:
        """Bytes of it on the store."""
        return self._native.nbytes

    def gemv(self, x: Any, out: Any = None, *, check: t.Check | None = None) -> Any:
        """``y = W x``, with a matrix that is read meanwhile.

        ``x``: float32 of the shape ``(columns,)``. On the store's GPU the product is put into the current stream of torch,
        which may be captured: a kernel reads each byte of the matrix once and needs no memory for it. In memory of the
        host threads read and multiply. ``out``: float32 of the shape ``(rows,)``, which is returned.

        Elements whose row was not read whole are NaN. ``check``: ``"now"`` waits and raises; ``"later"`` leaves errors to
        :meth:`check` and to the next product. None is ``"later"`` on a GPU; in memory of the host it is always ``"now"``.

        Raises :class:`Usage` for what does not fit; :class:`Status`, :class:`Timeout` or :class:`Gone` for a row that
        was not read, with its number as ``row``.
        """
        t.known(check)
        rows, columns = self._shape
        v = t.operand(x, "x", ("float32",))
        t.shaped(v, "x", (columns,))
        if v.gpu is not None:
            t.same_gpu(self._store._native.gpu_index, (2, v.gpu), "x")
        y = t.place(out, "out", v, (rows,))
        if v.gpu is None:
            t.run(self._native.gemv(v.view, y.view))
        else:
            t.checked(self._native.gemv_on_gpu(v.address, y.address, t.stream(v.gpu)), check)
        return y.value

    def gathered_gemv(self, ids: Any, x: Any, out: Any = None, *, check: t.Check | None = None) -> Any:
        """``y[i] = W[ids[i]] . x``: the products of some rows, of which only those are read.

        ``ids``: int32 or int64 of the shape ``(n,)``; int64 in memory of the host. ``x``, ``check``: as for :meth:`gemv`.
        ``out``: float32 of the shape ``(n,)``, which is returned. On the GPU the host does not learn the ids.

        An element whose row was not read, or that the matrix does not have, is NaN. Raises as :meth:`gemv`.
        """
        t.known(check)
        v = t.operand(x, "x", ("float32",))
        t.shaped(v, "x", (self._shape[1],))
        i = t.operand(ids, "ids", ("int64",) if v.gpu is None else ("int64", "int32"))
        t.shaped(i, "ids", ("n",))
        if t.together(x=v, ids=i) is not None:
            t.same_gpu(self._store._native.gpu_index, (2, v.gpu or 0), "x")
        y = t.place(out, "out", v, i.shape)
        if v.gpu is None:
            t.run(self._native.gathered(i.view, v.view, y.view))
        else:
            addresses = (i.address, i.dtype == "int64", i.shape[0], v.address, y.address)
            t.checked(self._native.gathered_on_gpu(*addresses, t.stream(v.gpu)), check)
        return y.value

    def gemm(self, x: Any, out: Any = None, *, check: t.Check | None = None) -> Any:
        """``X @ W.T``: the products of many vectors, with a matrix that is read meanwhile.

        ``x``: bfloat16 or float16 of the shape ``(vectors, columns)``; elements of the matrix are rounded to the same
        halves. A matrix of float32, or of the other halves, is refused. ``out``: float32 of the shape ``(vectors, rows)``,
        which is returned. ``check``: as for :meth:`gemv`. On a GPU tensor cores multiply, while other blocks of the kernel
        read the matrix.

        Results of rows that were not read are NaN. Raises as :meth:`gemv`.
        """
        t.known(check)
        rows, columns = self._shape
        v = t.operand(x, "x", ("bfloat16", "float16"))
        t.shaped(v, "x", ("vectors", columns))
        if v.gpu is not None:
            t.same_gpu(self._store._native.gpu_index, (2, v.gpu), "x")
        y = t.place(out, "out", v, (v.shape[0], rows))
        if v.gpu is None:
            t.run(self._native.gemm(v.view, v.dtype, y.view))
        else:
            room = t.scratch(v, self._native.workspace_bytes())
            addresses = (v.address, y.address, room.address)
            t.checked(self._native.gemm_on_gpu(addresses, v.shape[0], v.dtype, t.stream(v.gpu)), check)
        return y.value

    def __repr__(self) -> str:
        return f"<nvme_gpu.compute.Matrix {self._shape} {self._format} of {self._store!r}>"
