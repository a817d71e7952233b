"""Pages between a cache and a table: started at once, waited for later, with what became of each."""

from __future__ import annotations

from array import array
from typing import Any

from . import _buffers
from ._errors import NvmeGpuError, Usage
from ._gathers import apart_on_gpu
from ._table import Table


# Of a row that nothing was done for.
_NOT_MOVED = -1


class Move:
    """Rows of a table that are under way. It keeps their memory."""

    __slots__ = ("rows", "_operation", "_status", "_kept")

    def __init__(self, rows: Any, operation: Any, status: Any, kept: Any) -> None:
        self.rows = rows
        self._operation, self._status, self._kept = operation, status, kept

    def wait(self) -> tuple[set[int], NvmeGpuError | None]:
        """Waits for its end: the places of rows that failed, and the first error."""
        try:
            if _buffers.is_tensor(self._status):
                # Of this move alone: the table's own check raises failures of others.
                self._operation.finish()
            else:
                self._operation.wait()
                self._operation.check()
        except NvmeGpuError as error:
            everything = set(range(len(self._status)))
            if error.code == "unfinished":
                # The move is under way: its status is not final, and reading it on a GPU would wait for the stream.
                return everything, error
            bad = {at for at, code in enumerate(self._status.tolist()) if code}
            return bad or everything, error
        return set(), None


def adopted(cache: Any, layer: str, page: tuple[int, ...], block_ids: list[int], writable: bool) -> Any:
    """The cache as a tensor of torch or an array of numpy, with all of ``block_ids``."""
    numpy = _buffers.numpy()
    if not _buffers.is_tensor(cache) and not (numpy is not None and isinstance(cache, numpy.ndarray)):
        if not hasattr(cache, "__dlpack__"):
            raise TypeError(f"the cache of the layer {layer!r} is of the type {type(cache).__name__}: pass a tensor")
        library = _buffers.torch() or numpy
        if library is None:
            raise Usage("caches need torch or numpy", "install one of them")
        cache = library.from_dlpack(cache)
    shape = tuple(cache.shape)
    if shape[1:] != page:
        raise Usage(f"the cache of the layer {layer!r} has the shape {shape}", f"use (num_blocks, *{page})")
    if block_ids and max(block_ids) >= shape[0]:
        raise Usage(f"block {max(block_ids)} of a cache of {shape[0]}", "pass the numbers of its blocks")
    if writable and not _buffers.is_tensor(cache) and not cache.flags.writeable:
        raise Usage(f"the cache of the layer {layer!r} is read-only", "use memory that may be written")
    return cache


def load(table: Table, slots: list[int], cache: Any) -> Move:
    """Starts to read the rows ``slots`` into new memory, of the library and the device of ``cache``."""
    shape = (len(slots), *cache.shape[1:])
    if not _buffers.is_tensor(cache):
        numpy: Any = _buffers.numpy()
        rows = numpy.empty(shape, dtype=cache.dtype)
    elif not cache.is_cuda:
        rows = cache.new_empty(shape)
    else:
        ids, status = _on_gpu(cache, slots)
        torch: Any = _buffers.torch()
        rows = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        return Move(rows, apart_on_gpu(table, ids, rows, status), status, ids)
    view, places, owner = table._ids(slots, None)
    status = array("i", [_NOT_MOVED]) * len(slots)
    place = table._place(rows, "a cache", places, True)
    operation = table._native.gather(view, table._wide(view), place, table._status(status))
    return Move(rows, operation, status, owner)


def save(table: Table, slots: list[int], cache: Any, block_ids: list[int]) -> Move:
    """Starts to write the blocks ``block_ids`` of ``cache`` to the rows ``slots``. They are copied."""
    if _buffers.is_tensor(cache) and cache.is_cuda:
        ids, status = _on_gpu(cache, slots)
        rows = cache.detach().index_select(0, _on_gpu(cache, block_ids)[0]).contiguous()
        operation = table._change(ids, rows, status, None, "later", False, False, apart=True)
        return Move(rows, operation, status, ids)
    rows = cache.detach()[block_ids] if _buffers.is_tensor(cache) else cache[block_ids]
    view, places, owner = table._ids(slots, None)
    status = array("i", [_NOT_MOVED]) * len(slots)
    place = table._place(rows, "a cache", places, False)
    operation = table._native.scatter(view, table._wide(view), place, table._status(status), False)
    return Move(rows, operation, status, owner)


def put(cache: Any, block_ids: list[int], rows: Any, good: list[int]) -> None:
    """Copies the rows ``good`` to the blocks ``block_ids`` of the cache."""
    if not block_ids:
        return
    if not _buffers.is_tensor(cache):
        cache[block_ids] = rows[good]
        return
    torch: Any = _buffers.torch()
    with torch.no_grad():
        if cache.is_cuda:
            chosen = rows.index_select(0, _on_gpu(cache, good)[0])
            cache.index_copy_(0, _on_gpu(cache, block_ids)[0], chosen)
        else:
            cache[block_ids] = rows[good]


def _on_gpu(cache: Any, numbers: list[int]) -> tuple[Any, Any]:
    """The numbers as ids on the GPU of ``cache``, and a status for each."""
    torch: Any = _buffers.torch()
    ids = torch.tensor(numbers, dtype=torch.int64).to(cache.device)
    return ids, torch.full((len(numbers),), _NOT_MOVED, dtype=torch.int32, device=cache.device)
