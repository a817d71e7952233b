"""Gathers in halves: ``table.prefetch(ids)`` submits the reads, ``result()`` waits for the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _gathers
from ._errors import Usage
from ._held import OneProcess

if TYPE_CHECKING:
    from ._gathers import Check
    from ._table import Table


class Prefetch(OneProcess):
    """Rows that were asked for by :meth:`Table.prefetch`. On a GPU work that is put into the stream before :meth:`result`
    has the GPU to itself while the drive works. Dropped before that, it gives back what it holds, and nothing waits.
    """

    __slots__ = ("_begun", "_ids", "_is_finished", "_resolved", "_stream", "_table", "__weakref__")

    def __init__(self, table: Table, ids: Any, resolved: _gathers.ResolvedIds, begun: Any) -> None:
        self._table = table
        self._ids = ids
        self._resolved = resolved
        self._begun = begun
        self._stream = resolved.stream
        self._is_finished = False

    def result(
        self, out: Any = None, *, stream: Any = None, check: Check | None = None, status: Any = None
    ) -> Any:
        """The rows, as :meth:`Table.gather` returns them: ``out[i] = table[ids[i]]``.

        ``out``, ``check`` and ``status`` are those of :meth:`Table.gather`. ``stream``: where the rows are put, after the
        reads, also where that is another stream than the one of ``prefetch``; None is that one. Both may be captured in
        one graph.

        A read has its deadline from ``prefetch`` on. A reset of the controller in between fails the rows: they are
        zero, or NaN with ``on_error="nan"``, with the status of rows that are gone.

        Raises :class:`Usage` when it is called again after it returned rows, and where one of the two is captured in a
        graph and the other is not in the same capture.
        """
        if self._is_finished:
            raise Usage("the rows were finished before", "call prefetch again for each result")
        _gathers.known_check(check)
        if self._begun is None:
            rows = self._table.gather(self._ids, out, None, stream, check, status)
        else:
            rows = _gathers.finish(self, out, stream, check, status)
        self._is_finished = True
        return rows

    def __repr__(self) -> str:
        state = "finished" if self._is_finished else "begun"
        return f"<nvme_gpu.Prefetch of {self._resolved.shape} rows, {state}>"


def of_ids(table: Table, ids: Any, stream: Any) -> Prefetch:
    """Begins a gather. Ids in memory of the host are gathered by ``result``."""
    wanted = _gathers.ResolvedIds.of(table, ids, stream)
    if not wanted.is_of_gpu:
        return Prefetch(table, ids, wanted, None)
    held = (wanted.owner, wanted.view)
    begun = table._native.begin_on_gpu(wanted.address, wanted.is_wide, wanted.count, wanted.stream, held)
    return Prefetch(table, ids, wanted, begun)
