"""The path of every gather: ids are resolved, a destination is found for the rows, whoever reaches both moves them, and the
call ends as ``check`` says.

Ids of torch give tensors and take the short way to addresses, without views: a step of a model gathers often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from . import _buffers, _dtypes
from ._errors import Timeout, Usage
from ._native import Array, View

if TYPE_CHECKING:
    from ._prefetch import Prefetch
    from ._table import Table

Check = Literal["now", "later"]
OnError = Literal["raise", "zero", "nan"]


def known_check(check: Any) -> None:
    """Raises :class:`Usage` for what is no ``check``."""
    if check not in (None, "now", "later"):
        raise Usage(f"check is {check!r}", "use 'now' or 'later'")


class ResolvedIds:
    """Ids of rows: where they lie, and the stream of a GPU in whose order they are read."""

    __slots__ = ("address", "count", "is_of_gpu", "is_tensor", "is_wide", "owner", "shape", "stream", "view")

    address: int
    count: int
    is_of_gpu: bool
    is_tensor: bool
    is_wide: bool
    owner: Any
    shape: tuple[int, ...]
    stream: int
    # None for a tensor on a GPU.
    view: View | None

    @staticmethod
    def of(table: Table, ids: Any, stream: Any) -> ResolvedIds:
        """Raises :class:`Usage` for what are no ids, and for memory that the store does not reach."""
        if _buffers.is_tensor(ids):
            return _of_tensor(table, ids, stream)
        found = ResolvedIds()
        view, found.shape, found.owner = table._ids(ids, stream)
        found.view, found.address, found.count = view, view.address, count_of(found.shape)
        found.is_wide, found.is_tensor = table._wide(view), False
        found.is_of_gpu, found.stream = view.device[0] not in _buffers.CPU, 0
        if found.is_of_gpu:
            found.stream = _buffers.stream_of(stream, table._store.gpu)
            same_gpu(table._store._native.gpu_index, view.device, "ids")
        return found


def _of_tensor(table: Table, ids: Any, stream: Any) -> ResolvedIds:
    torch = _buffers.torch()
    assert torch is not None
    kind = ids.dtype
    if kind is not torch.int64 and kind is not torch.int32:
        remedy = "use mask.nonzero()" if kind is torch.bool else "convert them: ids.long()"
        raise Usage(f"ids are {kind}: they must be int32 or int64", remedy)
    if not ids.is_contiguous():
        ids = ids.contiguous()
    found = ResolvedIds()
    found.owner, found.shape, found.count = ids, tuple(ids.shape), ids.numel()
    found.is_tensor, found.is_wide, found.is_of_gpu = True, kind is torch.int64, ids.is_cuda
    found.stream, found.view = 0, None
    if found.is_of_gpu:
        gpu = ids.device.index
        same_gpu(table._store._native.gpu_index, (_buffers.CUDA, gpu), "ids")
        found.address = ids.data_ptr()
        current = found.stream = torch._C._cuda_getCurrentRawStream(gpu)
        if stream is not None and (number := _buffers.stream_of(stream, gpu)) != current:
            # Another stream than the one in whose order torch gives out memory.
            table._store._native.order(current, number)
            found.stream = number
    else:
        found.view = _buffers.of_tensor(ids, "ids")
        found.address = found.view.address
    return found


class RowTarget:
    """Where the rows and their status go."""

    __slots__ = ("address", "held", "is_judged", "out", "place", "status", "status_address")

    address: int
    out: Any

    def __init__(self, table: Table, ids: ResolvedIds, out: Any, status: Any, check: Check | None) -> None:
        # With a status, and where a caller passes `out` and gets the error from this call, rows that did not fail may be read.
        self.is_judged = status is not None or (ids.is_of_gpu and out is not None and check == "now")
        self.place: View | None = None
        if ids.is_tensor:
            self._find_tensor(table, ids, out)
        else:
            self._find_place(table, ids, out)
        self.status = table._status(status, ids.stream)
        self.status_address, self.held = 0, None
        if not ids.is_of_gpu:
            return
        if self.status is not None:
            same_gpu(table._store._native.gpu_index, self.status.device, "status")
            status_fits(self.status, ids.count)
            self.status_address = self.status.address
        if not ids.is_tensor:
            for one in (out, status):
                after_current(table._store._native, one, ids.stream)
        # torch gives out memory in the order of its own current stream: there it keeps what it was given.
        if not ids.is_tensor or not _is_current(self.out, ids.stream) or not (status is None or _buffers.is_tensor(status)):
            self.held = (ids.owner, ids.view, self.out, self.place, status, self.status)

    def _find_tensor(self, table: Table, ids: ResolvedIds, out: Any) -> None:
        torch = _buffers.torch()
        assert torch is not None
        owner = ids.owner
        if out is None:
            if table._torch is None:
                table._torch = getattr(torch, table._dtype, None)
                if table._torch is None:
                    raise Usage(f"this torch has no {table._dtype}", "use another dtype for the table")
            out = torch.empty((*ids.shape, *table._row), dtype=table._torch, device=owner.device)
            if not ids.is_of_gpu:
                self.place = _buffers.of_tensor(out, "out")
        elif not _buffers.is_tensor(out):
            raise Usage("ids are a tensor, out is none", "use a tensor for both")
        else:
            self.place = _buffers.of_tensor(out, "out", writable=True)
            table._fits(self.place, "out", ids.shape)
            if out.device != owner.device:
                raise Usage(f"out is on {out.device}, ids are on {owner.device}", "use one device for both")
        self.out, self.address = out, out.data_ptr()

    def _find_place(self, table: Table, ids: ResolvedIds, out: Any) -> None:
        native = table._store._native
        if out is None and ids.is_of_gpu:
            self.out = Array((*ids.shape, *table._row), table._dtype, table._size, native)
            self.address = self.out.address
            return
        self.out = table._new(ids.shape) if out is None else out
        self.place = table._place(self.out, "out", ids.shape, True, ids.stream)
        if ids.is_of_gpu:
            same_gpu(native.gpu_index, self.place.device, "out")
        self.address = self.place.address


def gather(
    table: Table, ids: Any, out: Any, dtype: Any, stream: Any, check: Check | None, status: Any
) -> Any:
    """:meth:`Table.gather`."""
    wanted = ResolvedIds.of(table, ids, stream)
    target = RowTarget(table, wanted, out, status, check)
    native = table._native
    if wanted.is_of_gpu:
        place = (wanted.address, wanted.is_wide, wanted.count, target.address, target.status_address)
        operation = native.gather_on_gpu(*place, wanted.stream, target.held)
        _ended_on_gpu(operation, wanted, target, check)
    else:
        assert wanted.view is not None and target.place is not None
        _ended_on_cpu(table, native.gather(wanted.view, wanted.is_wide, target.place, target.status), target, check)
    return target.out if dtype is None else _converted(table, wanted, target.out, dtype)


def apart_on_gpu(table: Table, ids: Any, out: Any, status: Any) -> Any:
    """Starts a gather in the current stream. Its failure is raised by the operation that this returns, and no other call."""
    wanted = ResolvedIds.of(table, ids, None)
    target = RowTarget(table, wanted, out, status, "later")
    place = (wanted.address, wanted.is_wide, wanted.count, target.address, target.status_address)
    return table._native.gather_on_gpu(*place, wanted.stream, target.held, apart=True)


def finish(begun: Prefetch, out: Any, stream: Any, check: Check | None, status: Any) -> Any:
    """The second half of a gather that a GPU has begun."""
    wanted = begun._resolved
    wanted.stream = begun._stream if stream is None else _buffers.stream_of(stream, begun._table._store.gpu)
    target = RowTarget(begun._table, wanted, out, status, check)
    after_current(begun._table._store._native, target.out, wanted.stream)
    operation = begun._begun.finish(target.address, target.status_address, wanted.stream, target.held)
    _ended_on_gpu(operation, wanted, target, check)
    return target.out


def _ended_on_gpu(operation: Any, ids: ResolvedIds, target: RowTarget, check: Check | None) -> None:
    if isinstance(target.out, Array):
        target.out.is_filled_by(operation, ids.stream, target.is_judged)
    checked(operation, check)


def _ended_on_cpu(table: Table, operation: Any, target: RowTarget, check: Check | None) -> None:
    table._ended_on_cpu(operation, check)
    if isinstance(target.out, Array):
        target.out.is_filled_by(operation, 0, target.is_judged)


def checked(operation: Any, check: Check | None) -> None:
    """Waits for an operation on a GPU where ``check`` says so, and raises its error."""
    if check == "now" and not operation.is_captured:
        if not operation.wait():
            raise Timeout(
                "rows on the GPU have not come or gone in the time that its commands may take",
                "wait for what the stream does before, then call check(): they go on, and their buffers are kept",
                "unfinished",
            )
        operation.check()


def _converted(table: Table, ids: ResolvedIds, value: Any, dtype: Any) -> Any:
    name = _dtypes.name_of(dtype)
    if ids.is_tensor:
        return value.to(getattr(_buffers.torch(), name))
    if ids.is_of_gpu:
        if name == table._dtype:
            return value
        raise Usage("dtype= needs a library that converts", "gather with tensors of torch, or convert the result")
    if isinstance(value, Array):
        if name == value.dtype:
            return value
        raise Usage("dtype= needs a library that converts", "install numpy, or convert the result")
    return value.astype(name, copy=False)


def count_of(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape."""
    count = 1
    for one in shape:
        count *= one
    return count


def status_fits(places: View | None, count: int) -> None:
    """Raises :class:`Usage` unless there is an int32 for each of ``count`` ids."""
    if places is not None and places.nbytes != 4 * count:
        raise Usage(f"status has {places.nbytes // 4} places for {count} ids", "use an int32 for each id")


def same_gpu(gpu: int | None, device: tuple[int, int], what: str) -> None:
    """Raises :class:`Usage` unless memory of ``device`` is that of the store's GPU."""
    if gpu is None:
        raise Usage(
            f"{what} lies in memory of a GPU, and the store was opened without a GPU",
            "open it with gpu=0, or use memory of the host",
        )
    if device[0] in _buffers.CPU:
        raise Usage(f"{what} lies in memory of the host, the ids on GPU {gpu}", "use memory of the GPU for both")
    # Managed memory is of all GPUs.
    if device[0] == _buffers.CUDA and device[1] != gpu:
        raise Usage(f"{what} lies on GPU {device[1]}, the store uses GPU {gpu}", f"use GPU {gpu} for both")


def _is_current(tensor: Any, stream: int) -> bool:
    torch = _buffers.torch()
    assert torch is not None
    return bool(torch._C._cuda_getCurrentRawStream(tensor.device.index) == stream)


def after_current(store: Any, value: Any, stream: int) -> None:
    """``stream`` waits for torch's current one, in whose order torch gives out memory."""
    current = _buffers.current_stream(value) if _buffers.is_tensor(value) else None
    if current is not None and current != stream:
        store.order(current, stream)
