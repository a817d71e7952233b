"""fastsafetensors: its loaders read safetensors files by this library, into memory of the CPU or of a GPU.

>>> import nvme_gpu.fastsafetensors
>>> nvme_gpu.fastsafetensors.register()

From then on ``SafeTensorsFileLoader``, ``fastsafe_open``, ``ParallelLoader`` and what uses them (vLLM and SGLang with
``--load-format fastsafetensors``) read by :class:`NvmeCopier` in place of the copiers ``gds``, ``nogds`` and
``unified``; :func:`unregister` takes that back. The package is ``fastsafetensors`` 0.5 of PyPI.
"""

from __future__ import annotations

import ctypes
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any, Callable

try:
    import fastsafetensors as _fst
    from fastsafetensors.copier import base as _base, gds as _gds, nogds as _nogds, registry as _registry
    from fastsafetensors.copier import unified as _unified
    from fastsafetensors.st_types import DeviceType as _DeviceType, DType as _DType
except ImportError as error:
    raise ImportError(
        f"nvme_gpu.fastsafetensors needs the package fastsafetensors 0.5: {error}: "
        "install it: pip install 'fastsafetensors>=0.5,<0.6'"
    ) from error

from . import _buffers
from ._catalog import catalog
from ._errors import NvmeGpuError, Usage
from ._files import LocalFile, Volume
from ._store import Pending

__all__ = ["NvmeCopier", "register", "unregister"]

_PIECE = 32 << 20
"""Bytes that one thread of the host reads at a time; several do."""
_MOST_HEADER = 100_000_000
"""The longest header of safetensors, in bytes; the format's own limit."""
_REPLACED = {
    "gds": (_gds.GdsFileCopier, _gds.new_gds_file_copier),
    "nogds": (_nogds.NoGdsFileCopier, _nogds.new_nogds_file_copier),
    "unified": (_unified.UnifiedMemCopier, _unified.new_unified_copier),
}
_FROM_FILE = _fst.SafeTensorsMetadata.__dict__["from_file"]
_LOCK = threading.Lock()


class _Settings:
    """What :func:`register` was called with."""

    def __init__(self, volumes: Mapping[str, Volume], options: Mapping[str, Any]) -> None:
        for prefix, volume in volumes.items():
            if not isinstance(volume, Volume):
                raise TypeError(f"volumes[{prefix!r}] is of the type {type(volume).__name__}: pass a nvme_gpu.Volume")
            if not prefix.startswith("/") or os.path.normpath(prefix) != prefix:
                raise Usage(f"{prefix!r} is no folder for a volume", "name one as '/drive': absolute, without . and ..")
        self.volumes = dict(volumes)
        self.options = dict(options)

    def of_volume(self, path: str) -> tuple[Volume, str] | None:
        """The volume in whose folder ``path`` lies, and the path there."""
        name = os.path.normpath(path)
        for prefix in sorted(self.volumes, key=len, reverse=True):
            folder = prefix.rstrip("/") + "/"
            if name.startswith(folder):
                return self.volumes[prefix], name[len(folder) - 1 :]
        return None

    def open(self, path: str, gpu: int | None) -> Any:
        """``path`` as a file with ``store``, ``nbytes``, ``pieces``, ``check_unchanged`` and ``close``."""
        found = self.of_volume(path)
        options = {**self.options, "gpu": gpu}
        return LocalFile(path, options) if found is None else found[0].open(found[1])


def register(volumes: Mapping[str, Volume] | None = None, **options: Any) -> None:
    """Makes fastsafetensors read by this library, until :func:`unregister`. A second call replaces the first.

    ``volumes``: folders that stand for a :class:`Volume`, such as ``{"/drive": volume}``: the path
    ``"/drive/models/a.safetensors"`` names the file ``/models/a.safetensors`` there. Such files are not seen by ``glob``
    and ``os``; pass their paths. For tensors on a GPU open the volume on a store with that GPU. It must stay open.

    Other paths are files of this machine; each is opened as ``file:PATH``, with the device's GPU and the ``options`` of
    :func:`nvme_gpu.open`, such as ``gds="auto"``.

    Also registered as the copier type ``"nvme_gpu"``, for ``BaseSafeTensorsFileLoader``.

    Raises :class:`Usage` for folders that cannot be. What reads end with is raised by the loader's call.
    """
    settings = _Settings(volumes or {}, options)

    def from_file(cls: Any, filename: str, framework: Any) -> Any:
        found = settings.of_volume(filename)
        if found is None:
            return _FROM_FILE.__get__(None, cls)(filename, framework)
        return _metadata(*found, filename, framework)

    def factory(device: Any, **_: Any) -> Callable[[Any, Any, Any], NvmeCopier]:
        return lambda metadata, device, framework: NvmeCopier(metadata, device, framework, settings)

    with _LOCK:
        for name in ("nvme_gpu", *_REPLACED):
            _registry.register_copier_constructor(name, NvmeCopier)(factory)
        _fst.SafeTensorsMetadata.from_file = classmethod(from_file)


def unregister() -> None:
    """Gives ``gds``, ``nogds`` and ``unified`` back to fastsafetensors, for loaders that are made from now on."""
    with _LOCK:
        for name, (kind, factory) in _REPLACED.items():
            _registry.register_copier_constructor(name, kind)(factory)
        _fst.SafeTensorsMetadata.from_file = _FROM_FILE


def _metadata(volume: Volume, path: str, shown: str, framework: Any) -> Any:
    """The header of a file of a volume."""
    with volume.open(path) as file:
        length = int.from_bytes(file.pread(8, 0), "little")
        if file.nbytes < 8 or length > min(_MOST_HEADER, file.nbytes - 8):
            raise Usage(f"{shown} has no header of safetensors in its {file.nbytes} bytes", "check that it is whole")
        try:
            text = file.pread(length, 8).decode()
        except UnicodeDecodeError as error:
            raise Usage(f"the header of {shown} is no text: {error}", "check that it is safetensors") from error
        # A header that does not cover its file is another file's.
        if catalog(file).format != "safetensors":
            raise Usage(f"{shown} is no file of safetensors", "name one")
        file.check_unchanged()
        return _fst.SafeTensorsMetadata(text, length + 8, file.nbytes, framework, shown)


class _GpuMemory:
    """Memory of a GPU, and the buffer of fastsafetensors that it is a part of."""

    def __init__(self, owner: Any, address: int, nbytes: int, gpu: int) -> None:
        self.owner, self.device = owner, SimpleNamespace(id=gpu)
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }


class NvmeCopier(_base.CopierInterface):
    """Reads one safetensors file by a store into the buffer of its framework. Made by loaders after :func:`register`.

    It reads parts of files (``set_tensor_filter``, ``max_batch_bytes``), and lets tensors be used while others are still
    read (``allow_inflight``). ``device_memory_budget`` is refused: what CUDA takes for a store is not counted here.

    Its memory is given back only when each read has ended, also after an error and after Ctrl-C. The first error of a
    read is raised by every wait from then on: no tensor comes from a buffer that was not filled.
    """

    def __init__(self, metadata: Any, device: Any, framework: Any, settings: _Settings) -> None:
        self.metadata, self.device, self.framework = metadata, device, framework
        self._settings = settings
        self._ranges: list[tuple[int, int]] | None = None
        self._names: set[str] | None = None
        self._allocated: int | None = None
        self._origin = metadata.header_length
        self._file: Any = None
        self._reads: list[tuple[int, int, Pending]] = []
        self._ends: list[int] = []
        self._failed: Exception | None = None

    def enable_tensor_readiness(self) -> bool:
        """True: tensors may be made before the reads have ended."""
        return True

    def set_byte_ranges(self, byte_ranges: list[tuple[int, int]] | None) -> None:
        """Reads these bytes of the file alone."""
        self._ranges = _base.validated_byte_ranges(self.metadata, byte_ranges)

    def set_chunk(self, byte_ranges: list[tuple[int, int]], names: set[str], allocation_size: int | None = None) -> None:
        """Reads these bytes alone, into a buffer of as many bytes as lie between the first and the last."""
        self._ranges = _base.validated_byte_ranges(self.metadata, byte_ranges)
        self._allocated = _base.validated_chunk_allocation_size(self._ranges, allocation_size)
        self._names = names

    @classmethod
    def chunk_transient_multiplier(cls, paths: list[str]) -> int:
        """1: reads go into the buffer itself."""
        return 1

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        """Starts to read the file.

        Raises what opening the file raises; :class:`NvmeGpuError` with the code ``mismatch`` for one that is shorter than
        its header was read with.
        """
        if max_copy_block_size <= 0:
            raise Usage(f"max_copy_block_size is {max_copy_block_size}", "use 1 or more bytes")
        begin, end = self.metadata.header_length, self.metadata.size_bytes
        runs = [(begin, end)] if self._ranges is None else self._ranges
        if self._names is not None:
            begin = min((first for first, _ in runs), default=begin)
            end = max((last for _, last in runs), default=begin)
        self._origin = begin
        gpu = self._gpu()
        self._file = self._settings.open(self.metadata.src, gpu)
        try:
            self._same_size()
            buffer = self.framework.alloc_tensor_memory(self._allocated or end - begin, self.device)
        except BaseException:
            self._close()
            raise
        try:
            for first, last in sorted(runs):
                self._start(buffer, first, last, gpu, max_copy_block_size)
        except BaseException:
            try:
                self.finish_io()
            finally:
                self.framework.free_tensor_memory(buffer, self.device)
            raise
        return buffer

    def prepare_tensors(self, gbuf: Any, owner: Any = None) -> Any:
        """The tensors, of which each is whole after :meth:`wait_tensor`."""
        return self._tensors(gbuf, _DType.AUTO, owner)

    def wait_tensor(self, name: str) -> None:
        """Waits for the bytes of one tensor. Raises what a read of it ended with."""
        if self._failed is not None:
            raise self._failed
        first, last = (self.metadata.header_length + at for at in self.metadata.tensors[name].data_offsets)
        # They are in the order of the file, and do not overlap.
        # Reads are in the order of the file, and do not overlap.
        for begin, _, pending in islice(self._reads, bisect_right(self._ends, first), None):
            if begin >= last:
                return
            try:
                pending.result()
            except Exception as error:
                self._failed = error
                raise

    def wait_io(self, gbuf: Any, dtype: Any = _DType.AUTO, noalign: bool = False, owner: Any = None) -> Any:
        """Waits for all reads, and makes the tensors. Raises what the first read that failed ended with."""
        self.finish_io()
        return self._tensors(gbuf, dtype, owner)

    def finish_io(self) -> None:
        """Waits until nothing is read any more. Raises what the first read that failed ended with."""
        interrupt: BaseException | None = None
        for _, _, pending in self._reads:
            is_under_way = True
            while is_under_way:
                try:
                    pending.result()
                except Exception as error:
                    self._failed = self._failed or error
                except BaseException as error:
                    # The memory may not go while a read fills it; it ends by itself.
                    interrupt = error
                    continue
                is_under_way = False
        self._reads.clear()
        self._ends.clear()
        try:
            if self._file is not None and self._failed is None and interrupt is None:
                self._file.check_unchanged()
                self._same_size()
        except Exception as error:
            self._failed = error
        finally:
            self._close()
        if interrupt is not None:
            raise interrupt
        if self._failed is not None:
            raise self._failed

    def _start(self, buffer: Any, first: int, last: int, gpu: int | None, most: int) -> None:
        at, address = first, buffer.get_base_address() - self._origin
        for place, nbytes in self._file.pieces(first, last - first):
            step = min(most, nbytes if gpu is not None else _PIECE)
            for done in range(0, nbytes, step):
                size = min(step, nbytes - done)
                memory = _memory(buffer, address + at, size, gpu)
                self._reads.append((at, at + size, self._file.store.read_into(memory, place + done)))
                at += size
                self._ends.append(at)

    def _tensors(self, buffer: Any, dtype: Any, owner: Any) -> Any:
        of_file = self.metadata
        if self._names is None:
            return of_file.get_tensors(buffer, self.device, self._origin, dtype, owner=owner)
        return of_file._get_tensors(buffer, self.device, self._origin, dtype, names=self._names, owner=owner)

    def _gpu(self) -> int | None:
        if self.device.type == _DeviceType.CPU:
            return None
        if self.device.index is not None:
            return int(self.device.index)
        torch = _buffers.torch()
        return torch.cuda.current_device() if torch is not None and self.framework.get_name() == "pytorch" else 0

    def _same_size(self) -> None:
        found, wanted = self._file.nbytes, self.metadata.size_bytes
        if found != wanted:
            cause = f"{self.metadata.src} has {found} bytes, and had {wanted} when its header was read"
            raise NvmeGpuError(cause, "load it again once nothing writes to it", "mismatch")

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _memory(buffer: Any, address: int, nbytes: int, gpu: int | None) -> Any:
    """Bytes of a buffer of fastsafetensors, to read into."""
    if gpu is not None:
        return _GpuMemory(buffer, address, nbytes, gpu)
    memory = (ctypes.c_char * nbytes).from_address(address)
    memory._owner = buffer  # type: ignore[attr-defined]
    return memory
