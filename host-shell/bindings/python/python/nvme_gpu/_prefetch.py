"""Gathers in halves: ``table.prefetch(ids)`` submits the reads, ``result()`` waits for the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _buffers
from ._errors import Usage
from ._held import OneProcess
from ._native import Array

if TYPE_CHECKING:
    from ._store import Check, Table


class Prefetch(OneProcess):
    """Rows that were asked for by :meth:`Table.prefetch`. On a GPU work that is put into the stream before :meth:`result`
    has the GPU to itself while the drive works. Dropped before that, it gives back what it holds, and nothing waits.
    """

    __slots__ = ("_begun", "_ids", "_is_finished", "_shape", "_stream", "_table", "__weakref__")

    def __init__(self, table: Table, ids: Any, shape: tuple[int, ...], begun: Any, stream: int) -> None:
        self._table = table
        self._ids = ids
        self._shape = shape
        self._begun = begun
        self._stream = stream
        self._is_finished = False

    def result(
        self, out: Any = None, *, stream: Any = None, check: Check | None = None, status: Any = None
    ) -> Any:
        """The rows, as :meth:`Table.gather` returns them: ``out[i] = table[ids[i]]``.

        ``out``, ``check`` and ``status`` are those of :meth:`Table.gather`. ``stream``: where the rows are put, after the
        reads, also where that is another stream than the one of ``prefetch``; None is that one. Both may be captured in
        one graph.

        A read has its deadline from ``prefetch`` on. A reset of the controller in between fails the rows: they are zero,
        with the status of rows that are gone.

        Raises :class:`Usage` when it is called again after it returned rows, and where one of the two is captured in a
        graph and the other is not in the same capture.
        """
        if self._is_finished:
            raise Usage("the rows were finished before", "call prefetch again for each result")
        if self._begun is None:
            rows = self._table.gather(self._ids, out, None, stream, check, status)
        else:
            rows = self._table._finish(self, out, stream, check, status)
        self._is_finished = True
        return rows

    def __repr__(self) -> str:
        state = "finished" if self._is_finished else "begun"
        return f"<nvme_gpu.Prefetch of {self._shape} rows, {state}>"


def of_ids(table: Table, ids: Any, stream: Any) -> Prefetch:
    """Begins a gather. Ids in memory of the host are gathered by ``result``."""
    if _buffers.is_tensor(ids):
        if not ids.is_cuda:
            return Prefetch(table, ids, tuple(ids.shape), None, 0)
        return table._begin_tensor(ids, stream)
    view, shape, owner = table._ids(ids, stream)
    if view.device[0] in _buffers.CPU:
        return Prefetch(table, ids, shape, None, 0)
    number = _buffers.stream_of(stream)
    return table._begin(view, shape, owner, number)


def count_of(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    count = 1
    for one in shape:
        count *= one
    return count


def new_array(table: Table, shape: tuple[int, ...]) -> Array:
    """Memory of the GPU for rows of ``shape``."""
    return Array((*shape, *table._row), table._dtype, table._size, table._store._native)
