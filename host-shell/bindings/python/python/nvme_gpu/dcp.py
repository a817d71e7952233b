"""Checkpoints of torch.distributed: what its FileSystemWriter wrote is read by this library.

>>> import torch.distributed.checkpoint as dcp
>>> from nvme_gpu.dcp import DcpReader
>>> dcp.load(state, storage_reader=DcpReader("checkpoint"))  # doctest: +SKIP

A folder of this machine, or of a :class:`nvme_gpu.Volume`. torch 2.3 or newer.

**Trust.** The file ``.metadata`` is a pickle, which torch's own reader loads: a checkpoint runs whatever its writer put
there. Load those alone that you trust, as with :class:`torch.distributed.checkpoint.FileSystemReader`. Tensors are
loaded with ``weights_only``.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

try:
    import torch as _torch
    from torch.distributed.checkpoint import filesystem as _filesystem

    _Base: Any = _filesystem.FileSystemReader
    _Files: Any = _filesystem.FileSystemBase
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"nvme_gpu.dcp needs torch.distributed.checkpoint of torch 2.3 or newer: {error}: install a newer torch"
    ) from error

from ._errors import NvmeGpuError, Usage
from ._files import LocalFile, Volume
from ._store import Pending, Store

__all__ = ["DcpReader"]

_AHEAD = 256 << 20
"""Bytes that are read before the first of them are made into tensors; one tensor may have more."""
_NEAR = 64
"""Ranges before a byte that are looked at for it."""


class _Pieces(Protocol):
    @property
    def store(self) -> Store: ...
    @property
    def nbytes(self) -> int: ...
    def pieces(self, offset: int, nbytes: int) -> list[tuple[int, int]]: ...
    def check_unchanged(self) -> None: ...
    def close(self) -> None: ...


class _Range:
    """Bytes of a file under way."""

    def __init__(self, file: _Pieces, name: str, offset: int, nbytes: int) -> None:
        if not 0 <= offset <= offset + nbytes <= file.nbytes:
            raise NvmeGpuError(
                f"{name} has {file.nbytes} bytes, and the checkpoint names {nbytes} bytes at {offset}",
                "the file was cut off, or belongs to another checkpoint: copy it again",
                "file",
            )
        self.offset, self.data = offset, bytearray(nbytes)
        self._reads: list[Pending] = []
        at = 0
        for place, size in file.pieces(offset, nbytes) if nbytes else ():
            self._reads.append(file.store.read_into(memoryview(self.data)[at : at + size], place))
            at += size

    def wait(self) -> bytearray:
        for pending in self._reads:
            pending.result()
        return self.data


class _Ranges:
    """Ranges of a file, of which many are found by where they begin."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, int], _Range] = {}
        self._longest: dict[int, _Range] = {}
        self._begins: list[int] | None = None

    def add(self, file: _Pieces, name: str, offset: int, nbytes: int) -> None:
        """Starts to read a range, unless it is there."""
        if (offset, nbytes) in self._by_place:
            return
        made = self._by_place[offset, nbytes] = _Range(file, name, offset, nbytes)
        other = self._longest.get(offset)
        if other is None or len(other.data) < nbytes:
            self._longest[offset] = made
        self._begins = None

    def wait(self) -> None:
        """Waits for all of them."""
        for one in self._by_place.values():
            one.wait()

    def at(self, byte: int) -> _Range | None:
        """A range that has this byte."""
        if self._begins is None:
            self._begins = sorted(self._longest)
        last = bisect_right(self._begins, byte)
        # Ranges of a checkpoint do not overlap: the nearest one has it, or none.
        for begin in reversed(self._begins[max(last - _NEAR, 0) : last]):
            one = self._longest[begin]
            if byte < begin + len(one.data):
                return one
        return None


class _Fetched(io.RawIOBase):
    """A file of which some ranges are read ahead, as torch's reader wants it: it seeks to their begins."""

    def __init__(self, name: str, ranges: _Ranges) -> None:
        super().__init__()
        self._name, self._at = name, 0
        self._ranges = ranges

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END:
            raise Usage(f"the end of {self._name} is not read", "count from its begin")
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        one = self._ranges.at(self._at)
        if one is None:
            return 0
        begin = self._at - one.offset
        part = memoryview(one.wait())[begin : begin + len(view)]
        view[: len(part)] = part
        self._at += len(part)
        return len(part)


class _Folder(_Files):
    """What torch's reader sees of the files: those that were fetched, and `.metadata`."""

    def __init__(self, volume: Volume | None, options: dict[str, Any]) -> None:
        self._volume, self._options = volume, options
        self.fetched: dict[str, _Ranges] = {}

    def open(self, path: str) -> _Pieces:
        found: _Pieces = LocalFile(path, self._options) if self._volume is None else self._volume.open(path)
        return found

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = os.fspath(path)
        if mode != "rb":
            raise Usage(f"{name} is opened with the mode {mode!r}", "write with torch's FileSystemWriter")
        if name in self.fetched:
            yield _Fetched(name, self.fetched[name])
            return
        file = self.open(name)
        try:
            whole = _Range(file, name, 0, file.nbytes).wait()
            file.check_unchanged()
        finally:
            file.close()
        yield io.BytesIO(whole)

    def concat_path(self, path: Any, suffix: str) -> str:
        return os.path.join(str(path), suffix)

    def init_path(self, path: Any) -> str:
        return str(path)

    def exists(self, path: Any) -> bool:
        return os.path.exists(path) if self._volume is None else self._volume.exists(path)

    def ls(self, path: Any) -> list[str]:
        names = os.listdir(path) if self._volume is None else self._volume.listdir(path)
        return [self.concat_path(path, name) for name in names]

    def _refuse(self, *_: Any) -> Any:
        raise Usage("a checkpoint that is read is not changed", "write with torch's FileSystemWriter")

    rename = mkdir = rm_file = _refuse

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return "://" not in os.fspath(checkpoint_id)


class DcpReader(_Base):
    """A StorageReader for checkpoints that :class:`torch.distributed.checkpoint.FileSystemWriter` wrote.

    ``folder``: a path of this machine, or with ``volume`` of its ext4. ``options``: those of :func:`nvme_gpu.open` for
    the files of this machine.

    Only the bytes of the items that the plan asks for are read, and ``.metadata``; up to 256 MiB at a time. Tensors are
    made in memory of the host, and copied to where the planner wants them.

    Its calls raise :class:`NotFound` for a missing file, :class:`NvmeGpuError` with the code ``file`` for one that was
    cut off and ``mismatch`` for one of a drive that changed meanwhile, and what the device says. ``dcp.load`` wraps them
    in a ``CheckpointException``, whose ``failures`` has them by rank.
    """

    def __init__(self, folder: str | os.PathLike[str], volume: Volume | None = None, **options: Any) -> None:
        if volume is not None and options:
            raise TypeError(f"options of a store that is open already: {', '.join(options)}")
        super().__init__(os.fspath(folder))
        self.fs = _Folder(volume, options)
        self.path = self.fs.init_path(folder)

    def read_metadata(self, *words: Any, **more: Any) -> Any:
        """What `.metadata` says. It is unpickled: see this module's text on trust."""
        try:
            return super().read_metadata(*words, **more)
        except (EOFError, pickle.UnpicklingError) as error:
            name = self.fs.concat_path(self.path, ".metadata")
            remedy = "the file was cut off or changed: copy the checkpoint again"
            raise NvmeGpuError(f"{name} is no checkpoint's metadata: {error}", remedy, "file") from error

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Reads the items of ``plan``, and gives them to ``planner``. Waits for them."""
        ended: Any = _torch.futures.Future()
        ended.set_result(None)
        for part in self._parts(plan.items):
            ended = self._read(dataclasses.replace(plan, items=part), planner)
        return ended

    def _parts(self, items: Any) -> Iterator[list[Any]]:
        """Items in the order of their files, as many at a time as are read ahead."""
        part: list[Any] = []
        nbytes = 0
        for item in sorted(items, key=lambda one: (self._place(one).relative_path, self._place(one).offset)):
            length = self._place(item).length
            if part and nbytes + length > _AHEAD:
                yield part
                part, nbytes = [], 0
            part.append(item)
            nbytes += length
        if part:
            yield part

    def _place(self, item: Any) -> Any:
        return self.storage_data[item.storage_index]

    def _read(self, plan: Any, planner: Any) -> Any:
        files: dict[str, _Pieces] = {}
        try:
            for item in plan.items:
                place = self._place(item)
                name = self.fs.concat_path(self.path, place.relative_path)
                if name not in files:
                    files[name] = self.fs.open(name)
                ranges = self.fs.fetched.setdefault(name, _Ranges())
                ranges.add(files[name], name, place.offset, place.length)
            for ranges in self.fs.fetched.values():
                ranges.wait()
            for file in files.values():
                file.check_unchanged()
            return super().read_data(plan, planner)
        finally:
            self.fs.fetched.clear()
            for file in files.values():
                file.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is a path."""
        return _Folder.validate_checkpoint_id(checkpoint_id)
