"""Search for nearest vectors in an index that lies on a store."""

from __future__ import annotations

import json
from typing import Any, Callable, Literal, NamedTuple

from . import _arguments, _buffers, _dtypes, _native
from ._errors import Timeout, Usage
from ._gathers import Check, known_check, same_gpu
from ._held import Launching
from ._native import Array, View
from ._store import Store

Metric = Literal["euclidean", "cosine", "inner_product"]

_MOST_RESULTS, _MOST_LIST, _MOST_BEAM = 32, 256, 32
_ELEMENTS = ("float32", "float16", "bfloat16", "int8", "uint8")
_DTYPES = (("int64", 8), ("float32", 4), ("int32", 4), ("int32", 4))


class Nearest(NamedTuple):
    """What :meth:`SearchIndex.search` found: ``ids, distances, *_ = index.search(queries)``."""

    ids: Any
    """int64 of the shape ``(queries, k)``: numbers of vectors, nearest first; -1 where there is none."""
    distances: Any
    """float32 of the same shape: squared distances; infinite where there is no id."""
    status: Any
    """int32 for each query: 0, an NVMe status (SCT << 8 | SC), or a number below 0. A query that failed found nothing."""
    reads: Any
    """int32 for each query: nodes that it read."""


class SearchIndex(Launching):
    """An index of vectors on a store, opened for searches.

    Its graph lies on the device, a node of 4 KiB or more for each vector; codes of the vectors lie in memory (:attr:`memory_bytes`
    of the host, and of the store's GPU, if it has one). Made by :func:`build_index` and by ``nvme-gpu search build``.

    ``offset``: where the index begins, in bytes. ``metric``: the one that the index has to have; None takes any. Closing the store closes it. Any number of threads may use it.

    Raises :class:`NvmeGpuError` for bytes that are no index, or a damaged one.
    """

    __slots__ = ("_store", "_native", "_info", "__weakref__")
    _LAUNCHED = "searches"

    def __init__(self, store: Store, offset: int = 0, *, metric: Metric | None = None) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store is of the type {type(store).__name__}: use nvme_gpu.open")
        self._store = store
        self._native = _native.SearchIndex(store._native, _arguments.whole("offset", offset, 0, (1 << 63) - 1))
        self._info: dict[str, Any] = json.loads(self._native.info())
        if metric is not None and metric != self.metric:
            self._native.close()
            raise Usage(f"the index has the metric {self.metric!r}, not {metric!r}", "open it as it was made")

    @property
    def store(self) -> Store:
        """The store on which it lies."""
        return self._store

    @property
    def dim(self) -> int:
        """Elements of a vector."""
        found: int = self._info["dim"]
        return found

    @property
    def metric(self) -> Metric:
        """By what vectors are compared."""
        found: Metric = self._info["metric"]
        return found

    @property
    def longest(self) -> float:
        """The length of the longest vector, for the metric ``"inner_product"``; 0 for others."""
        found: float = self._info["longest"]
        return found

    @property
    def degree(self) -> int:
        """Neighbours of a node at most."""
        found: int = self._info["degree"]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the index on the store."""
        found: int = self._info["bytes"]
        return found

    @property
    def memory_bytes(self) -> int:
        """Bytes of its codes in memory."""
        found: int = self._info["memory_bytes"]
        return found

    def __len__(self) -> int:
        found: int = self._info["count"]
        return found

    def search(
        self,
        queries: Any,
        k: int = 10,
        *,
        candidates: int = 64,
        beam: int = 4,
        threads: int = 8,
        stream: Any = None,
        check: Check | None = None,
    ) -> Nearest:
        """The ``k`` nearest vectors of each query, by squared Euclidean distance. An index of the metric ``"cosine"``
        divides queries by their lengths first, as it did its vectors: its distances are ``2 - 2 * cos``. One of
        ``"inner_product"`` finds the greatest inner products p: its distances are ``2 - 2 * p / (length * index.longest)``
        for a query of that length.

        ``queries``: float32, float16, bfloat16, int8 or uint8 of the shape ``(queries, dim)``, or ``(dim,)`` for one. Where they lie decides who searches:
        ``threads`` threads for memory of the host; for tensors of torch on the store's GPU a kernel that reads the nodes
        by itself. Both find the same. Answers are tensors for tensors, else arrays of numpy, or :class:`Array` without it.

        ``candidates``: how many are kept on the way, ``k`` to 256: more find more of the nearest, and read more.
        ``beam``: nodes of a query that are read at a time, 1 to 32. ``k``: 1 to 32.
        ``stream``: on a GPU, where the searches are put: None is the current stream of torch. It may be captured.
        ``check``: ``"now"`` waits and raises; ``"later"`` leaves errors to :meth:`check` and to the next search. None is
        ``"now"`` on the CPU and ``"later"`` on a GPU.

        Raises :class:`Usage` for queries that do not fit, or that are not finite; :class:`Status`, :class:`Timeout` or
        :class:`Gone` for a query whose reads failed, with its number as ``row``.
        """
        known_check(check)
        given = (
            _arguments.whole("k", k, 1, _MOST_RESULTS),
            _arguments.whole("candidates", candidates, 1, _MOST_LIST),
            _arguments.whole("beam", beam, 1, _MOST_BEAM),
        )
        if given[1] < given[0]:
            raise Usage(f"{candidates} candidates for {k} results", "keep at least as many candidates")
        threads = _arguments.whole("threads", threads, 1, 1024)
        view, element = _numbers(queries, "queries")
        shape = tuple(view.shape)
        if not 1 <= len(shape) <= 2 or shape[-1] != self.dim:
            raise Usage(f"queries have the shape {shape}", f"use (queries, {self.dim})")
        count = shape[0] if len(shape) == 2 else 1
        shapes = ((*shape[:-1], k), (*shape[:-1], k), shape[:-1], shape[:-1])
        if view.device[0] not in _buffers.CPU:
            return self._on_gpu(queries, view, count, shapes, given, stream, check)
        found = [_new(queries, one, dtype, size) for one, (dtype, size) in zip(shapes, _DTYPES)]
        views = [_buffers.view(one, "an answer", writable=True) for one in found]
        operation = self._native.search(view, (views[0], views[1], views[2], views[3]), given, threads, element)
        operation.wait()
        if check == "later":
            operation.check_whole()
        else:
            operation.check()
        return Nearest(*found)

    def _on_gpu(
        self, queries: Any, view: View, count: int, shapes: Any, given: tuple[int, int, int], stream: Any, check: Any
    ) -> Nearest:
        same_gpu(self._store._native.gpu_index, view.device, "queries")
        if not _buffers.is_tensor(queries):
            raise Usage("queries on a GPU that are no tensor of torch", "use torch, or memory of the host")
        torch: Any = _buffers.torch()
        number = _buffers.stream_of(stream, self._store.gpu)
        current = _buffers.stream_of(None, self._store.gpu)
        if self.metric == "euclidean":
            queries = queries.float()
        else:
            wide = queries.double()
            length = wide.norm(dim=-1, keepdim=True)
            if self.metric == "inner_product":
                # All vectors are equally near to a query of zeros; the last element is that which vectors got.
                wide = torch.nn.functional.pad(wide / torch.where(length == 0, torch.ones_like(length), length), (0, 1))
            else:
                wide = wide / length
            queries = wide.float()
        found = [
            torch.empty(one, dtype=getattr(torch, dtype), device=queries.device) for one, (dtype, _) in zip(shapes, _DTYPES)
        ]
        if number != current:
            # Another stream than the one in whose order torch gives out memory.
            self._store._native.order(current, number)
        places = tuple(one.data_ptr() for one in found)
        held = (queries, found)
        operation = self._native.search_on_gpu(
            (queries.data_ptr(), count), (places[0], places[1], places[2], places[3]), given, number, held
        )
        if check == "now" and not operation.is_captured:
            operation.finish()
        return Nearest(*found)

    def close(self) -> None:
        """Lets go of the store, and of the codes in memory of the host."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<nvme_gpu.SearchIndex of {len(self)} vectors of {self.dim}, {self.nbytes} bytes>"


def build_index(
    store: Store,
    vectors: Any,
    offset: int = 0,
    *,
    degree: int = 64,
    candidates: int = 100,
    sub_dim: int | None = None,
    metric: Metric = "euclidean",
    progress: Callable[[int, int], object] | None = None,
) -> SearchIndex:
    """Makes an index of ``vectors``, writes it to ``store`` from byte ``offset`` on, a multiple of 4,096, and opens it.

    ``vectors``: float32, float16, bfloat16, int8 or uint8 of the shape ``(N, dim)``, in memory of the host, ``dim`` up to
    16,288 (one less for ``"inner_product"``); they are copied, as float32. The index takes a little more than 4 KiB for each
    vector of up to 928 elements, 4 KiB more for each 1,024 elements more. It is valid when this returns, and not before.

    ``degree``: neighbours of a node at most, 1 to 64. ``candidates``: of each search while the graph is made, 1 to 1000:
    more make a better graph, more slowly. ``sub_dim``: elements that a byte of code stands for, 1 to ``dim``;
    None: 4, or ``dim`` where that is less.

    ``metric``: by what vectors are compared: ``"euclidean"``, the squared distance; ``"cosine"``, for which they are
    divided by their lengths; or ``"inner_product"``, of which the greatest is the nearest.

    ``progress(done, total)`` is called now and then and at the end. What it raises, and Ctrl-C, end the work soon.

    Raises :class:`Usage` for vectors that are not finite, do not fit or with ``"cosine"`` have only zeros, and for a store that is for reading only.
    """
    if not isinstance(store, Store):
        raise TypeError(f"store is of the type {type(store).__name__}: use nvme_gpu.open")
    view, element = _numbers(vectors, "vectors")
    if len(view.shape) != 2:
        raise Usage(f"vectors have the shape {tuple(view.shape)}", "use (N, dim)")
    place = _arguments.whole("offset", offset, 0, (1 << 63) - 1)
    most = (1 << 32) - 1
    if sub_dim is None:
        sub_dim = min(4, max(1, view.shape[1]))
    shape = (
        _arguments.whole("degree", degree, 0, most),
        _arguments.whole("candidates", candidates, 0, most),
        _arguments.whole("sub_dim", sub_dim, 0, most),
    )
    started = _native.build_index(store._native, place, view, min(view.shape[1], most), shape, (metric, element))
    try:
        while not started.wait(None if progress is None else 0.1):
            done, total = started.progress()
            if progress is not None and total:
                progress(done, total)
        started.found()
        if progress is not None:
            progress(*started.progress())
    finally:
        started.cancel()
    return SearchIndex(store, offset)


def _numbers(value: Any, what: str) -> tuple[View, str]:
    """A view of numbers, and the name of their type."""
    view = _buffers.view(value, what, writable=False)
    dtype = _dtypes.of_format(view.dtype)
    if dtype not in _ELEMENTS:
        raise Usage(f"{what} are {dtype}", f"use one of {', '.join(_ELEMENTS)}")
    return view, dtype


def _new(like: Any, shape: tuple[int, ...], dtype: str, size: int) -> Any:
    """Memory of the host for answers, of the library of the queries."""
    if _buffers.is_tensor(like):
        torch: Any = _buffers.torch()
        return torch.empty(shape, dtype=getattr(torch, dtype))
    numpy = _buffers.numpy()
    return Array(shape, dtype, size) if numpy is None else numpy.empty(shape, dtype=dtype)
