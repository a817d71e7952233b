"""Stores and what is under way."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import weakref
from collections.abc import Generator
from typing import Any, Literal, Protocol

from . import _arguments, _buffers, _gathers, _log, _native, _scales
from ._errors import NvmeGpuError, Timeout, Usage
from ._gathers import OnError
from ._held import Held, OneProcess
from ._native import Array, View
from ._table import Table

_OPEN: weakref.WeakSet[Store] = weakref.WeakSet()


class _Operation(Protocol):
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def check(self) -> None: ...


class _Ended:
    """An operation that has ended well."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def check(self) -> None:
        return None


_ENDED = _Ended()


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
                f"the transfer has not ended {_arguments.within(timeout)}",
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
            _log.logger().warning("a transfer whose result was not asked for: %s", error)


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

    ``device``: ``sim:PATH?size=1GiB`` or ``sim:mem?size=1GiB`` (a simulated drive), ``file:PATH``, a path with a slash, the
    name of a file that is there, or a :class:`pathlib.Path`, ``vfio:BDF``, ``vfio-user:SOCKET``, or
    ``stripe:DEVICE|DEVICE?stripe=128KiB``.

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
        if not isinstance(device, str):
            name = f"file:{name}"
        if "\0" in name:
            raise Usage("the name of the device has a zero byte", "check the name")
        if not name.isprintable():
            raise Usage(f"the name of the device has a character that cannot be printed: {name!r}", "check the name")
        self._device = name
        self._timeout = _arguments.whole("timeout_ms", timeout_ms, 1, 86_400_000) / 1000
        self._native = _native.Store(
            name,
            gpu=None if gpu is None else _arguments.whole("gpu", gpu, 0, 4095),
            queues=_arguments.whole("queues", queues, 1, 4095),
            depth=_arguments.whole("depth", depth, 1, 4095),
            timeout_ms=int(timeout_ms),
            allow_write=_arguments.flag("allow_write", allow_write),
            read_only=_arguments.flag("read_only", read_only),
            nsid=_arguments.whole("nsid", nsid, 1, 0xFFFF_FFFE),
            gpu_queues=_arguments.whole("gpu_queues", gpu_queues, 1, 4095),
            gpu_blocks=_arguments.whole("gpu_blocks", gpu_blocks, 1, 4095),
            gpu_tier=None if gpu_tier is None else _arguments.whole("gpu_tier", gpu_tier, 1, 3),
            file_io=file_io,
            gds=gds,
        )
        self._gds = gds != "off"
        _OPEN.add(self)
        _log.logger().info("opened %s: %s", name, self.path)

    def close(self) -> None:
        """Closes it: waits for gathers on the GPU, as long as their commands may take, then lets go of the device.

        What still is under way keeps its buffers, and the device, until it has ended. Ctrl-C ends the wait and not the
        closing; a second call continues that wait, and does nothing else.
        Graphs that captured a gather may be launched afterwards: each row is zero then.
        """
        if self._native.is_open:
            _log.logger().info("closing %s", self._device)
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

    def stats(self) -> dict[str, Any]:
        """Counts since it was opened. C, Rust and ``nvme-gpu top`` call them by the same names.

        Of the CPU's queues: ``commands`` sent, ``bytes`` moved, ``retries``, ``commands_under_way``, ``latency_us`` (a list:
        element 0 counts commands below 1 us, element n those from 2^(n-1) to 2^n us) and ``latency_ns``, the sum.
        ``rows_read``, ``rows_written``, ``failed_rows``, ``bytes_read``, ``bytes_written``: of gathers, scatters, reads and
        writes that have ended, each launch of a graph included; failed rows are zero or NaN, and of bytes that a GPU moves
        they are parts of 64 KiB. ``duplicates_saved``: rows that a gather of the CPU read once for several ids.
        ``recoveries``: aborted commands and controller resets. ``waited_ns``: what threads waited. ``calls`` from Python
        that use the device.

        Of a GPU: ``owned_gathers`` and ``shared_gathers``: gathers whose blocks own their queues, and whose blocks share
        them; ``owned_scatters`` and ``shared_scatters``: the same of launches that write rows; ``begun_gathers``: gathers
        whose reads :meth:`Table.prefetch` submitted, and ``late_rows`` of them that ``result`` had to read, since others
        held the queues; a launch of a graph is none of them, its capture is one.
        ``launches_under_way``; ``launch_blocks`` and ``launch_registers``: what the last launch holds on the GPU.
        ``unique_asked`` and ``unique_read``: rows of gathers that read each distinct row once (4,096 rows and more of a
        drive or of stripes, without a cache), and those of them that were read. ``cache_asked`` and ``cache_hits``: rows of
        gathers through :meth:`Table.cached`, and those of them that were in the cache."""
        found: dict[str, Any] = json.loads(self._native.stats())
        found["calls"] = self._native.calls
        return found

    def explain(self) -> list[dict[str, str | None]]:
        """For each member of a stripe, or for the store, what moves the bytes ``now``, the next ``better`` way, and what
        stands ``between``; both are None where there is no better way. ``nvme-gpu why`` says the same."""
        found: list[dict[str, str | None]] = json.loads(self._native.explain())
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
        return self._move(buf, offset, stream, False, _arguments.flag("durable", durable))

    def read(self, nbytes: int, offset: int = 0) -> bytes:
        """``nbytes`` bytes from byte ``offset`` on. Waits for them."""
        offset = _arguments.whole("offset", offset, 0, (1 << 64) - 1)
        nbytes = _arguments.whole("nbytes", nbytes, 0, sys.maxsize)
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
        at = _arguments.whole("offset", offset, 0, (1 << 64) - 1)
        is_of_gpu = _buffers.is_of_gpu(buf, "buf")
        number = _buffers.stream_of(stream, self.gpu) if is_of_gpu or stream is not None else 0
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
            _log.logger().warning("closing %r at exit: %s", store, error)


atexit.register(_close_all)


def stats() -> list[dict[str, Any]]:
    """Path and counts of each store that this process has open: :attr:`Store.path` and :meth:`Store.stats` in one dict, in
    the order of their devices."""
    found = [{**store.path, **store.stats()} for store in list(_OPEN) if not store.closed]
    return sorted(found, key=lambda one: str(one["device"]))
