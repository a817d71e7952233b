"""Stores, tables and what is under way."""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import sys
import weakref
from collections.abc import Generator
from typing import Any, Literal, NoReturn, Protocol

from . import _buffers, _dtypes, _gathers, _indices, _native, _prefetch, _scales
from ._errors import NvmeGpuError, Timeout, Usage, in_short
from ._gathers import Check, OnError
from ._held import Held, OneProcess
from ._native import Array, View
from ._prefetch import Prefetch

_LOG = logging.getLogger("nvme_gpu")
_OPEN: weakref.WeakSet[Store] = weakref.WeakSet()


class _Operation(Protocol):
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def check(self) -> None: ...


def _within(timeout: float | None) -> str:
    """A limit in words: None stands for that of the operation."""
    return f"within {timeout} s" if timeout is not None else "in the time that its commands may take"


class _Ended:
    """An operation that has ended well."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def check(self) -> None:
        return None


_ENDED = _Ended()


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is of the type {type(value).__name__}: pass a whole number")
    number = int(value.__index__())
    if not least <= number <= most:
        raise Usage(f"{name} is {in_short(number)}", f"use {least} to {most}")
    return number


def _flag(name: str, value: Any) -> bool:
    """A boolean: what else is true, such as the text "no", is refused."""
    kind = type(value)
    if not isinstance(value, bool) and (kind.__module__, kind.__name__) not in (("numpy", "bool"), ("numpy", "bool_")):
        raise TypeError(f"{name} is of the type {kind.__name__}: pass True or False")
    return bool(value)


class Pending(OneProcess):
    """A transfer under way. Its buffers are kept until it has ended, also when this object is dropped; those of a captured
    one have to stay for as long as its graph may run.

    It may be used from any thread. Nothing is cancelled: a transfer ends by itself, at the latest after the time-out
    of its commands and a reset of the controller.
    """

    __slots__ = ("_operation", "_result", "_seen", "__weakref__")

    def __init__(self, operation: _Operation, result: Any) -> None:
        self._operation = operation
        self._result = result
        self._seen = False

    def done(self) -> bool:
        """Whether it has ended, well or not. Returns at once."""
        return self._operation.done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits ``timeout`` seconds at most and returns the buffer.

        None is as long as the transfer may take. In memory of the host it ends by itself. In memory of a GPU it has ten
        times the store's ``timeout_ms``, 10 s and what its bytes take at 16 MiB/s, with what the stream does before it.
        ``float("inf")`` has no limit.

        The GIL is released and Ctrl-C ends the wait, not the transfer.

        A transfer that was captured ends each time its graph has run; before it first has, ``result`` waits only with a
        ``timeout``, and its buffers are yours to keep.

        Raises :class:`Timeout` when it has not ended in time: it goes on, and ``result`` may be called again.
        Otherwise what the transfer ended with, of a captured one the last time.
        """
        if getattr(self._operation, "is_captured", False):
            self._wait_for_graph(timeout)
        elif not self._operation.wait(timeout):
            raise Timeout(
                f"the transfer has not ended {_within(timeout)}",
                "wait again: it goes on, and its buffers are kept",
                "unfinished",
            )
        self._seen = True
        self._operation.check()
        return self._result

    def exception(self, timeout: float | None = None) -> NvmeGpuError | None:
        """Waits as :meth:`result` does, and returns what the transfer failed with; None where it is well.

        Raises :class:`Timeout` when it has not ended in time.
        """
        try:
            self.result(timeout)
        except NvmeGpuError as error:
            if error.code == "unfinished":
                raise
            return error
        return None

    def __await__(self) -> Generator[Any, None, Any]:
        """``await pending`` in a coroutine is :meth:`result`; a thread of the loop's executor waits."""
        import asyncio

        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()

    def _wait_for_graph(self, timeout: float | None) -> None:
        if not self._operation.wait(0.0 if timeout is None else timeout):
            raise Timeout(
                "the transfer is part of a captured graph that has not run to its end",
                "launch the graph, wait for its stream, and then ask for the result",
                "unfinished",
            )

    def __repr__(self) -> str:
        try:
            state = "done" if self.done() else "under way"
        except Usage:
            state = "of another process"
        return f"<nvme_gpu.Pending {state}>"

    def __del__(self) -> None:
        if getattr(self, "_seen", True):
            return
        try:
            if not self._operation.done():
                return
        except Usage:
            # In a child of a fork: it is the parent's.
            return
        try:
            self._operation.check()
        except Exception as error:
            _LOG.warning("a transfer whose result was not asked for: %s", error)


def open(
    device: str | os.PathLike[str],
    gpu: int | None = None,
    *,
    queues: int = 8,
    depth: int = 64,
    timeout_ms: int = 5000,
    allow_write: bool = False,
    read_only: bool = False,
    nsid: int = 1,
    gpu_queues: int = 16,
    gpu_blocks: int = 32,
    gpu_tier: int | None = None,
    file_io: Literal["auto", "uring", "pread"] = "auto",
    gds: Literal["off", "auto", "require"] = "off",
) -> Store:
    """Opens a device.

    ``device``: ``sim:PATH?size=1GiB`` or ``sim:mem?size=1GiB`` (a simulated drive), ``file:PATH`` or a path that begins
    with ``/`` or ``./``, ``vfio:BDF``, ``vfio-user:SOCKET``, or ``stripe:DEVICE|DEVICE?stripe=128KiB``.

    ``gpu``: the number of the GPU that gathers by itself, as CUDA counts it; None: the CPU gathers.
    ``queues``, ``depth``: queue pairs for the CPU, and commands in flight of each, 1 to 4095. ``gpu_queues``: queue
    pairs for the GPU, ``gpu_blocks`` blocks of threads that read at a time: fewer leave more of the GPU to other
    kernels. ``gpu_tier``: 1 for data in host memory, 2 for data in memory of the GPU, 3 for the rings of its queues there,
    too, or the store is not opened; None: the highest up to 2 that works. ``timeout_ms``: how long a command may take, in milliseconds, before it is aborted.
    ``allow_write``: allows writes to real devices, which are opened for reading only without it; ``read_only`` allows
    none at all. ``nsid``: the namespace. ``file_io``: how files are read and written.

    ``gds``: whether NVIDIA's cuFile (GPUDirect Storage) reads a file into memory of the GPU for :meth:`Store.read_into`:
    ``"off"``; ``"auto"``, where it takes the file, else host threads; ``"require"``: it does, or the file is not opened.
    :attr:`Store.path` says which way it took, or why it was refused. Gathers and writes go by host threads.

    Raises :class:`Usage` for names and options that cannot be, and :class:`NvmeGpuError` when the device or the GPU
    cannot be opened.
    """
    return Store(
        device,
        gpu,
        queues=queues,
        depth=depth,
        timeout_ms=timeout_ms,
        allow_write=allow_write,
        read_only=read_only,
        nsid=nsid,
        gpu_queues=gpu_queues,
        gpu_blocks=gpu_blocks,
        gpu_tier=gpu_tier,
        file_io=file_io,
        gds=gds,
    )


class Store(Held):
    """A drive, a file, or several of them as one range of bytes. Made by :func:`open`.

    Any number of threads may use it. It belongs to the process that opened it: after a fork the child's calls raise
    :class:`Usage`. As a context manager it closes itself.
    """

    __slots__ = ("_native", "_device", "_timeout", "_gds", "__weakref__")

    def __init__(
        self,
        device: str | os.PathLike[str],
        gpu: int | None = None,
        *,
        queues: int = 8,
        depth: int = 64,
        timeout_ms: int = 5000,
        allow_write: bool = False,
        read_only: bool = False,
        nsid: int = 1,
        gpu_queues: int = 16,
        gpu_blocks: int = 32,
        gpu_tier: int | None = None,
        file_io: Literal["auto", "uring", "pread"] = "auto",
        gds: Literal["off", "auto", "require"] = "off",
    ) -> None:
        name = os.fspath(device)
        if not isinstance(name, str):
            raise TypeError(f"device is of the type {type(device).__name__}: pass text, such as 'sim:mem?size=1GiB'")
        if "\0" in name:
            raise Usage("the name of the device has a zero byte", "check the name")
        if not name.isprintable():
            raise Usage(f"the name of the device has a character that cannot be printed: {name!r}", "check the name")
        self._device = name
        self._timeout = _whole("timeout_ms", timeout_ms, 1, 86_400_000) / 1000
        self._native = _native.Store(
            name,
            gpu=None if gpu is None else _whole("gpu", gpu, 0, 4095),
            queues=_whole("queues", queues, 1, 4095),
            depth=_whole("depth", depth, 1, 4095),
            timeout_ms=int(timeout_ms),
            allow_write=_flag("allow_write", allow_write),
            read_only=_flag("read_only", read_only),
            nsid=_whole("nsid", nsid, 1, 0xFFFF_FFFE),
            gpu_queues=_whole("gpu_queues", gpu_queues, 1, 4095),
            gpu_blocks=_whole("gpu_blocks", gpu_blocks, 1, 4095),
            gpu_tier=None if gpu_tier is None else _whole("gpu_tier", gpu_tier, 1, 3),
            file_io=file_io,
            gds=gds,
        )
        self._gds = gds != "off"
        _OPEN.add(self)
        _LOG.info("opened %s: %s", name, self.path)

    def close(self) -> None:
        """Closes it: waits for gathers on the GPU, as long as their commands may take, then lets go of the device.

        What still is under way keeps its buffers, and the device, until it has ended. A second call does nothing.
        Graphs that captured a gather may be launched afterwards: each row is zero then.
        """
        if self._native.is_open:
            _LOG.info("closing %s", self._device)
        self._native.close(timeout=3 * self._timeout + 2)
        _OPEN.discard(self)

    @property
    def closed(self) -> bool:
        """Whether it is closed, or belongs to another process."""
        return not self._native.is_open

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._native.nbytes

    @property
    def block_bytes(self) -> int:
        """The unit that the device writes, in bytes. Writes of whole units need no read before them."""
        return self._native.block_bytes

    @property
    def gpu(self) -> int | None:
        """The GPU that gathers; None without one."""
        return self._native.gpu_index

    @property
    def path(self) -> dict[str, Any]:
        """What carries the data, and why: ``device``, ``data`` (``host`` or ``gpu``), ``tier``, ``path``, ``why``."""
        found: dict[str, Any] = json.loads(self._native.path())
        return found

    def stats(self) -> dict[str, int]:
        """Counts since it was opened: ``commands`` sent, ``bytes`` moved, ``retries``, all of the CPU's queues; ``calls``
        from Python that use the device; ``owned_gathers`` and ``shared_gathers``: gathers by a GPU whose blocks own their
        queues, and whose blocks share them; ``begun_gathers``: those whose reads :meth:`Table.prefetch` submitted, and
        ``late_rows`` of them that ``result`` had to read, since others held the queues; a launch of a graph is none of
        them, its capture is one. ``failed_rows``: rows that gathers left zero or NaN and scatters did not write, each launch
        of a graph included; of bytes that a GPU moves, they are parts of 64 KiB."""
        found: dict[str, int] = json.loads(self._native.stats())
        found["calls"] = self._native.calls
        return found

    def read_into(self, buf: Any, offset: int = 0, *, stream: Any = None) -> Pending:
        """Starts to fill ``buf`` from byte ``offset`` on; any alignment.

        ``buf``: contiguous and writable memory of the host, or of the store's GPU, of any shape and dtype; its bytes
        are filled. The range must lie inside the store. ``stream``: for memory of a GPU, as in :meth:`Table.gather`;
        the read comes after what the stream does before it. With ``gds`` cuFile reads into memory of a GPU: it waits for
        the stream, and has ended when this returns; it raises :class:`Usage` while a graph is captured where ``gds`` is
        ``"require"``.

        Raises :class:`Usage` for a buffer or a range that cannot be. What the device says comes with
        :meth:`Pending.result`.
        """
        return self._move(buf, offset, stream, True, False)

    def write_from(self, buf: Any, offset: int = 0, *, stream: Any = None, durable: bool = False) -> Pending:
        """Starts to write the bytes of ``buf`` from byte ``offset`` on; any alignment.

        ``buf``: contiguous memory of the host, or of the store's GPU. It must not change before the write has ended.
        With ``durable`` the data are on the medium when it has (force unit access; memory of the host alone); else
        after :meth:`flush`. ``stream``: as in :meth:`read_into`.

        Raises :class:`Usage` for a buffer or a range that cannot be, and for a store that is for reading only.
        """
        return self._move(buf, offset, stream, False, _flag("durable", durable))

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """``nbytes`` bytes from byte ``offset`` on. Waits for them."""
        offset = _whole("offset", offset, 0, (1 << 64) - 1)
        nbytes = _whole("nbytes", nbytes, 0, sys.maxsize)
        if offset + nbytes > self.nbytes:
            raise Usage(
                f"{nbytes} bytes at {offset} do not lie inside the store's {self.nbytes} bytes",
                "check offset and length, which are in bytes",
            )
        view, data = View.of_new_bytes(nbytes)
        Pending(self._native.read(view, offset), data).result()
        return data

    def write(self, data: Any, offset: int = 0, *, durable: bool = False) -> None:
        """Writes ``data``, bytes or any buffer of the host, from byte ``offset`` on. Waits for it."""
        self.write_from(data, offset, durable=durable).result()

    def flush(self) -> None:
        """Makes durable what was written before. Waits for it."""
        Pending(self._native.flush(), None).result()

    def table(
        self,
        offset: int = 0,
        *,
        shape: Any,
        dtype: Any,
        to: Any = None,
        scales: Any = None,
        factor: float = 1.0,
        over: float = 1.0,
        on_error: OnError = "raise",
    ) -> Table:
        """Rows from byte ``offset`` on, of any alignment.

        ``shape``: ``(N, *row)``, rows one after the other in the order of C. ``dtype``: a name such as ``"float16"`` or
        ``"bfloat16"``, or a dtype of numpy or torch; little-endian. ``"q8_0"``, ``"q4_0"``, ``"q4_1"``,
        ``"q2_k"`` to ``"q6_k"``, ``"iq4_nl"``, ``"iq4_xs"`` and ``"mxfp4"`` are the blocks of GGUF; the elements of a row are
        whole blocks, of 256 for K-quants and ``"iq4_xs"``, else of 32.

        ``to``: ``"float16"``, ``"bfloat16"`` or ``"float32"``, what gathers make of stored float16, bfloat16, float8 or blocks on the
        way; only the stored bytes are read. Blocks come out as float16 without it. Such a table is not written to.

        ``scales``: with ``to``, what the elements are multiplied by: a number for all, or an array of ``(rows, groups)``, each
        for as many columns, of float32, bfloat16, float8_e4m3fn or float8_e8m0fnu (or its bytes, uint8). It lies in memory of
        the GPU where that gathers; memory of the host, for the CPU, is copied. ``factor`` multiplies all scales, ``over``
        divides them: NVFP4 has files of either kind. ``"float4_e2m1fn_x2"`` is two elements in a byte, the first one in its
        lower half; ``"float8_scaled"`` is 256 of E4M3 with eight E8M0 scales behind them, as in rows of ds4.

        ``on_error``: what becomes of rows that a gather cannot read. Their status says so, and ``failed_rows`` of
        :meth:`stats` counts them, whatever this is. ``"raise"``: zeros, and an error (see :meth:`Table.gather`). ``"zero"``:
        zeros, and no error. ``"nan"``: NaN, and no error; for rows that come out as floating-point elements.

        Raises :class:`Usage` for a table that does not lie inside the store, rows of no bytes, scales that are not as many as
        the rows need, and ``"nan"`` for integers.
        """
        return Table(self, offset, shape, dtype, _scales.RowConversion(to, scales, factor, over, on_error))

    def _move(self, buf: Any, offset: Any, stream: Any, is_read: bool, durable: bool) -> Pending:
        at = _whole("offset", offset, 0, (1 << 64) - 1)
        is_of_gpu = _is_of_gpu(buf)
        number = _buffers.stream_of(stream) if is_of_gpu or stream is not None else 0
        view = _buffers.view(buf, "buf", writable=is_read, store=self._native, stream=number)
        if view.device[0] in _buffers.CPU:
            native = self._native
            return Pending(native.read(view, at) if is_read else native.write(view, at, durable), buf)
        _gathers.same_gpu(self._native.gpu_index, view.device, "buf")
        if durable:
            raise Usage("a durable write from memory of a GPU", "write, wait for the result, and flush")
        _gathers.after_current(self._native, buf, number)
        if is_read and self._gds and self._native.read_by_cufile(at, view.nbytes, view.address, number):
            return Pending(_ENDED, buf)
        held = (view, buf)
        operation = self._native.move_on_gpu(not is_read, at, view.nbytes, view.address, number, held)
        if is_read and isinstance(buf, Array):
            buf.is_filled_by(operation, number, False)
        return Pending(operation, buf)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.nbytes} bytes"
        return f"<nvme_gpu.Store {self._device!r}, {state}>"


class Table(OneProcess):
    """Rows of one size and dtype in a store. Made by :meth:`Store.table`. Any number of threads may use it.

    ``table[ids]`` is ``table.gather(ids)``, and takes indices as numpy has them: a number from the end (``table[-1]``), a
    mask with one truth for each row, ids of any whole dtype, and arrays with gaps. In arrays a negative id stays an error,
    since it is padding in most of them.
    """

    __slots__ = (
        "_native",
        "_store",
        "_shape",
        "_row",
        "_stored",
        "_stored_bytes",
        "_dtype",
        "_size",
        "_row_bytes",
        "_on_error",
        "_others",
        "_torch",
        "__weakref__",
    )

    def __init__(
        self,
        store: Store,
        offset: int,
        shape: Any,
        dtype: Any,
        result: _scales.RowConversion = _scales.RowConversion(),
        ranges: list[tuple[int, int]] | None = None,
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError("store is not a nvme_gpu.Store: use store.table(...)")
        offset = _whole("offset", offset, 0, (1 << 64) - 1)
        if isinstance(shape, (str, bytes)) or not hasattr(shape, "__iter__"):
            raise TypeError("shape is not a tuple: pass (rows, *row)")
        lengths = tuple(_whole("a length of the shape", one, 0, (1 << 63) - 1) for one in shape)
        if not lengths:
            raise Usage("the shape has no length", "pass (rows, *row)")
        self._store = store
        self._shape, self._row = lengths, lengths[1:]
        elements = 1
        for one in self._row:
            elements *= one
        is_blocks = isinstance(dtype, str) and dtype in _dtypes.BLOCKS
        if is_blocks:
            self._stored = str(dtype)
            block, block_bytes = _dtypes.BLOCKS[dtype]
            if elements % block:
                raise Usage(f"rows of {elements} elements of {dtype}", f"use a multiple of {block}")
            self._stored_bytes = elements // block * block_bytes
        else:
            self._stored = _dtypes.name_of(dtype)
            self._stored_bytes = elements * _dtypes.SIZES[self._stored][0]
        if max(self._stored_bytes, 4 * elements) >= 1 << 63:
            raise Usage(f"rows of {self._stored_bytes} bytes", "use a smaller shape")
        self._native = _native.Table(store._native, offset, lengths[0], self._stored_bytes, ranges)
        self._dtype = "float16" if is_blocks else self._stored
        if result.to is not None:
            self._dtype = _dtypes.name_of(result.to)
        if is_blocks or self._dtype != self._stored:
            self._native = self._native.widened(self._stored, self._dtype)
        if result.has_scales:
            self._native = _scales.scaled(store, self._native, (lengths[0], elements), result)
        self._size = _dtypes.SIZES[self._dtype][0]
        self._row_bytes = elements * self._size
        self._others: dict[str, Table] = {}
        self._torch: Any = None
        self._on_error: OnError = "raise"
        if result.on_error != "raise":
            self._native = self._counting(result.on_error)
            self._on_error = result.on_error

    @property
    def store(self) -> Store:
        """The store in which it lies."""
        return self._store

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, *row)``."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The name of the dtype of gathered rows."""
        return self._dtype

    @property
    def stored_dtype(self) -> str:
        """The name of the dtype of rows in the store."""
        return self._stored

    @property
    def on_error(self) -> OnError:
        """What becomes of rows that a gather cannot read: ``"raise"``, ``"zero"`` or ``"nan"``."""
        return self._on_error

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the store."""
        return self._stored_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in the store."""
        return self._stored_bytes * self._shape[0]

    @property
    def ndim(self) -> int:
        """Number of lengths of the shape."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements of all rows."""
        return self._shape[0] * (self._row_bytes // self._size)

    def __len__(self) -> int:
        return self._shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """All rows, read to an array of numpy."""
        if copy is False:
            raise ValueError("rows on a drive are copied to memory: pass copy=None")
        rows = self.gather(slice(None))
        numpy = _buffers.numpy()
        return rows if numpy is None else numpy.asarray(rows, dtype=dtype)

    def __getitem__(self, ids: Any) -> Any:
        return self.gather(_indices.ids_of(ids, self._shape[0]))

    def __setitem__(self, ids: Any, rows: Any) -> None:
        self.scatter(_indices.ids_of(ids, self._shape[0]), rows)

    def __iter__(self) -> NoReturn:
        raise TypeError("a table is not iterated over row by row: gather many rows at a time")

    def __repr__(self) -> str:
        return f"<nvme_gpu.Table {self._shape} {self._dtype} of {self._store!r}>"

    def gather(
        self,
        ids: Any,
        out: Any = None,
        dtype: Any = None,
        stream: Any = None,
        check: Check | None = None,
        status: Any = None,
    ) -> Any:
        """Rows by ids: ``out[i] = table[ids[i]]``, of the shape ``(*ids.shape, *row)``.

        ``ids``: int32 or int64, of any shape: a number, a slice, lists, or an array. Where they lie decides who
        gathers: the CPU for memory of the host, the GPU of the store for its memory. The result comes from the
        library of the ids: a tensor of torch for tensors; for others an array of numpy, or :class:`Array` (with
        ``__dlpack__``) on a GPU and without numpy.

        An id that is negative or too large gives a row of zeros and an error, which is an :class:`IndexError`, too. So does a row that could not be read. A table
        with ``on_error="zero"`` or ``"nan"`` raises none of these: ``status`` and ``failed_rows`` of :meth:`Store.stats` tell
        of them. Other errors, such as a closed store, it does raise.

        ``out``: contiguous memory of the table's dtype on the same device, which is filled and returned.
        ``dtype``: what the rows are converted to: float16, bfloat16 and float8 to float16 or float32 on the way, as
        ``to`` of :meth:`Store.table` does; else by the library of the result.
        ``stream``: on a GPU, where the gather is put: None is the current stream of torch where torch uses the GPU,
        else the default one; a number, or a stream of torch, cupy, pycuda, numba or cuda.core. It may be captured.
        ``check``: ``"now"`` waits and raises; ``"later"`` leaves errors to :meth:`check` and to the next gather.
        None is ``"now"`` on the CPU and ``"later"`` on a GPU; a captured gather is always ``"later"``.
        ``status``: int32 for each id on the same device: 0, an NVMe status (SCT << 8 | SC), or a number below 0.

        Raises :class:`Usage`, :class:`Status`, :class:`Timeout` or :class:`Gone`, with ``row`` and ``id``. With
        ``out`` the other rows are right then.
        """
        _gathers.known_check(check)
        if dtype is not None and out is None and (wide := self._widened(dtype)) is not None:
            return wide.gather(ids, None, None, stream, check, status)
        return _gathers.gather(self, ids, out, dtype, stream, check, status)

    def prefetch(self, ids: Any, stream: Any = None) -> Prefetch:
        """Begins ``table[ids]``: submits the reads of the rows, and returns at once. :meth:`Prefetch.result` gives the rows.

        ``ids`` and ``stream`` are those of :meth:`gather`. In memory of a GPU a launch in the stream submits the reads and
        leaves the GPU: what the program puts into the stream next runs while the drive works. That is for few rows (768
        rows of 256 bytes, or 192 KiB) of one drive, of multiples of 4 bytes; ``result`` reads others itself, and those
        that are begun while others hold the queues (``late_rows`` of :meth:`Store.stats`). The ids stay as they are until
        then. Ids in memory of the host are gathered by ``result``.
        """
        return _prefetch.of_ids(self, ids, stream)

    def scatter(
        self,
        ids: Any,
        rows: Any,
        *,
        unique: bool = False,
        stream: Any = None,
        check: Check | None = None,
        status: Any = None,
    ) -> None:
        """Writes rows by ids: ``table[ids[i]] = rows[i]``.

        ``ids``: as in :meth:`gather`. ``rows``: memory of the table's dtype and the shape ``(*ids.shape, *row)`` on the
        same device; with ids in memory of the host also lists of numbers, where numpy is installed. With memory of the
        host this waits. With memory of the GPU it is put into ``stream``: gathers that come after it in the stream see
        the rows. The GPU writes them itself where offset and length of the table's rows are multiples of a block of one
        drive; a host thread sends the commands for all others.

        The GPU takes no lock: two writers of one row are ordered by a stream or by waiting. A call on memory of the host
        that writes a part of such a row at the same time, or adds to it, may put the rest of the row back to what it
        was.

        Of several rows with the same id the last is written; with ``unique`` that is an error, and nothing is written.
        Bytes beside the rows do not change. ``check``, ``status``: as in :meth:`gather`.

        Raises as :meth:`gather`, and :class:`Usage` for a store that is for reading only.
        """
        self._change(ids, rows, status, stream, check, _flag("unique", unique), False)

    def scatter_add(
        self, ids: Any, rows: Any, *, stream: Any = None, check: Check | None = None, status: Any = None
    ) -> None:
        """Adds rows by ids: ``table[ids[i]] += rows[i]``; otherwise as :meth:`scatter`.

        Sums are made in 32 bits and rounded once; rows of the same id are summed. The dtype is float32, float16,
        bfloat16 or int32. Additions of several threads through one store are all counted.

        Raises as :meth:`scatter`.
        """
        self._change(ids, rows, status, stream, check, False, True)

    def check(self, timeout: float | None = None) -> None:
        """Waits for the gathers on the GPU that came before, and raises the first failure that was not raised yet.

        Of captured gathers it looks at their last run that has ended. ``timeout``: seconds for all of them; None is, for
        each, what :meth:`Pending.result` says.

        Raises :class:`Timeout` when they have not ended in time, else what :meth:`gather` raises.
        """
        if not self._native.check(timeout):
            raise Timeout(
                f"gathers of this table have not ended {_within(timeout)}",
                "wait for what their streams do before them, or longer",
                "unfinished",
            )

    def _widened(self, dtype: Any) -> Table | None:
        """This table with elements that come out as ``dtype``, where a gather makes that on the way."""
        name = _dtypes.name_of(dtype)
        if name == self._dtype or self._stored != self._dtype:
            return None
        if self._stored not in _dtypes.WIDENED or name not in _dtypes.WIDE:
            return None
        wide = self._others.get(name)
        if wide is None:
            wide = self._others[name] = self._with(self._native.widened(self._stored, name), name, self._on_error)
        return wide

    def with_on_error(self, on_error: OnError) -> Table:
        """These rows with another ``on_error``, as :meth:`Store.table` has it. :meth:`check` of either table raises for both.

        Raises :class:`Usage` for ``"nan"`` and rows that come out as integers.
        """
        if on_error == self._on_error:
            return self
        return self._with(self._counting(on_error), self._dtype, on_error)

    def _counting(self, on_error: OnError) -> _native.Table:
        """The native table for a known ``on_error``."""
        if on_error not in ("raise", "zero", "nan"):
            raise Usage(f"on_error is {on_error!r}", "use 'raise', 'zero' or 'nan'")
        is_error, nan_of = on_error == "raise", self._stored if on_error == "nan" else None
        try:
            return self._native.with_failed_rows(is_error, nan_of)
        except Usage as error:
            raise Usage(f"on_error is 'nan': {error.cause}", "use 'zero' or 'raise'") from None

    def _with(self, native: _native.Table, dtype: str, on_error: OnError) -> Table:
        """These rows by another native table, which makes ``dtype`` of them."""
        made = object.__new__(Table)
        made._native, made._on_error = native, on_error
        made._store, made._shape, made._row = self._store, self._shape, self._row
        made._stored, made._stored_bytes, made._dtype = self._stored, self._stored_bytes, dtype
        made._size = _dtypes.SIZES[dtype][0]
        made._row_bytes = self._row_bytes // self._size * made._size
        made._others, made._torch = {}, None
        return made

    # ---- ids and places

    def _ids(self, ids: Any, stream: Any) -> tuple[View, tuple[int, ...], Any]:
        if isinstance(ids, slice):
            ids = range(*ids.indices(self._shape[0]))
        plain = isinstance(ids, (list, tuple, range)) or hasattr(ids, "__index__") and not hasattr(ids, "__len__")
        if plain and not hasattr(ids, "dtype"):
            flat, shape = _buffers.flattened(ids)
            return View.from_buffer(flat, False), shape, flat
        number = _buffers.stream_of(stream) if hasattr(ids, "__cuda_array_interface__") or stream is not None else 0
        view = _buffers.view(ids, "ids", writable=False, store=self._store._native, stream=number)
        self._wide(view)
        return view, view.shape, ids

    @staticmethod
    def _wide(view: View) -> bool:
        name = _dtypes.of_format(view.dtype)
        if name not in ("int32", "int64"):
            remedy = "use ids[mask.nonzero()], or numbers" if name == "bool" else "convert them"
            raise Usage(f"ids are {name}: they must be int32 or int64", remedy)
        return name == "int64"

    def _place(self, value: Any, what: str, shape: tuple[int, ...], writable: bool, stream: int = 0) -> View:
        """Memory for rows of ``shape``."""
        view = _buffers.view(value, what, writable=writable, store=self._store._native, stream=stream)
        self._fits(view, what, shape)
        return view

    def _fits(self, view: View, what: str, shape: tuple[int, ...]) -> None:
        wanted = (*shape, *self._row)
        name = _dtypes.of_format(view.dtype)
        # Where numpy lacks the dtype, its bits come as bytes or as integers of its size; another dtype of that size has
        # other numbers.
        raw = self._dtype in _dtypes.FOREIGN and name in ("int8", "int16", "uint16") and (
            _dtypes.SIZES[name][0] == self._size
        )
        if name not in (self._dtype, "uint8") and not raw:
            raise Usage(f"{what} is {name}, the table {self._dtype}", f"use {self._dtype}")
        nbytes = self._row_bytes
        for one in shape:
            nbytes *= one
        if view.nbytes != nbytes or (name == self._dtype and tuple(view.shape) != wanted):
            raise Usage(f"{what} has the shape {tuple(view.shape)} in place of {wanted}", "use one row for each id")

    def _status(self, status: Any, stream: int = 0) -> View | None:
        if status is None:
            return None
        view = _buffers.view(status, "status", writable=True, store=self._store._native, stream=stream)
        if _dtypes.of_format(view.dtype) != "int32":
            raise Usage(f"status is {_dtypes.of_format(view.dtype)}", "use int32")
        return view

    # ---- the CPU

    def _new(self, shape: tuple[int, ...]) -> Any:
        """Memory of the host for rows of ``shape``."""
        shape = (*shape, *self._row)
        numpy = _buffers.numpy()
        if numpy is not None and hasattr(numpy, self._dtype if self._dtype != "bool" else "bool_"):
            try:
                return numpy.empty(shape, dtype=self._dtype)
            except (ValueError, OverflowError) as error:
                raise MemoryError(str(error)) from error
        return Array(shape, self._dtype, self._size)

    def _ended_on_cpu(self, operation: _native.Operation, check: Check | None) -> None:
        operation.wait()
        if check == "later":
            # What went wrong with all of it is raised: nothing came, and no status was written.
            self._native.keep_failure(operation)
        else:
            operation.check()

    def _change(
        self, ids: Any, rows: Any, status: Any, stream: Any, check: Check | None, unique: bool, add: bool
    ) -> None:
        _gathers.known_check(check)
        if _buffers.is_tensor(ids):
            view, shape = _buffers.of_tensor(ids.contiguous(), "ids"), tuple(ids.shape)
        else:
            view, shape, _ = self._ids(ids, stream)
        if isinstance(rows, (list, tuple)):
            numpy = _buffers.numpy()
            if numpy is None:
                raise Usage("lists of numbers need numpy", "install it, or pass an array")
            try:
                rows = numpy.asarray(rows, dtype=self._dtype)
            except (ValueError, TypeError, OverflowError) as error:
                raise Usage(f"rows: {error}", "give lists of numbers, one row for each id") from error
        if _buffers.is_tensor(rows):
            rows = rows.detach().contiguous()
        if view.device[0] not in _buffers.CPU:
            self._change_on_gpu(view, shape, ids, rows, status, stream, check, unique, add)
            return
        source = self._place(rows, "rows", shape, False)
        wide, places = self._wide(view), self._status(status)
        if add:
            operation = self._native.scatter_add(view, wide, source, places, self._dtype)
        else:
            operation = self._native.scatter(view, wide, source, places, unique)
        self._ended_on_cpu(operation, check)

    # ---- the GPU

    def _change_on_gpu(
        self,
        ids: View,
        shape: tuple[int, ...],
        owner: Any,
        rows: Any,
        status: Any,
        stream: Any,
        check: Check | None,
        unique: bool,
        add: bool,
    ) -> None:
        if unique:
            raise Usage("unique= with ids in memory of a GPU", "leave it out: the last row of equal ids is written")
        number = _buffers.stream_of(stream)
        source = self._place(rows, "rows", shape, False, number)
        places = self._status(status, number)
        for one, what in ((ids, "ids"), (source, "rows"), (places, "status")):
            if one is not None:
                _gathers.same_gpu(self._store._native.gpu_index, one.device, what)
        count = _gathers.count_of(shape)
        _gathers.status_fits(places, count)
        _gathers.after_current(self._store._native, owner, number)
        where = places.address if places is not None else 0
        held = (ids, owner, source, rows, places)
        operation = self._native.change_on_gpu(
            ids.address, self._wide(ids), count, source.address, where, number, held, self._dtype if add else None
        )
        _gathers.checked(operation, check)


def _device(device: Any) -> tuple[bool, int | None]:
    """Whether ``device``, a name or a torch.device, is a GPU, and the number that it gives."""
    kind, colon, number = str(device).partition(":")
    if kind == "cpu" and number in ("", "0") and bool(colon) == bool(number):
        return False, None
    if kind != "cuda" or bool(colon) != (number.isascii() and number.isdecimal()):
        raise Usage(f"device is {str(device)!r}", "use 'cpu' or 'cuda'")
    return True, int(number) if number else None


def _is_of_gpu(value: Any) -> bool:
    """Whether a stream matters for this buffer."""
    if _buffers.is_tensor(value):
        return bool(value.is_cuda)
    if isinstance(value, Array):
        return value.device != "cpu"
    if hasattr(value, "__cuda_array_interface__"):
        return True
    return hasattr(value, "__dlpack_device__") and _buffers.dlpack_kind(value, "buf") in _buffers.GPU


def _host_bytes(value: Array) -> Any:
    """The bytes of an array of the host, to read into; they keep the array."""
    memory = (ctypes.c_char * value.nbytes).from_address(value.address)
    memory._array = value  # type: ignore[attr-defined]
    return memory


def _close_all() -> None:
    """At exit: the stores that are open, so that drives are shut down and files are complete."""
    for store in list(_OPEN):
        try:
            store.close()
        except Exception as error:
            _LOG.warning("closing %r at exit: %s", store, error)


atexit.register(_close_all)
