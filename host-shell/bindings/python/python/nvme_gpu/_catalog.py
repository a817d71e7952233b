"""Files of tensors on a store, or on a drive's ext4: safetensors, GGUF and .npy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from . import _arguments, _dtypes, _native
from ._errors import Usage
from ._scales import RowConversion
from ._held import Held, OneProcess
from ._files import DriveFile, Volume
from ._native import Import
from ._store import Store, open as _open
from ._table import Table


class Entry(OneProcess):
    """A tensor of a file that lies on a store, or in an ext4 there."""

    __slots__ = ("_store", "_file", "_name", "_dtype", "_shape", "_offset", "_nbytes")

    def __init__(self, store: Store, found: dict[str, Any], file: _native.DriveFile | None = None) -> None:
        self._store = store
        self._file = file
        self._name: str = found["name"]
        self._dtype: str = found["dtype"]
        self._shape: tuple[int, ...] = tuple(found["shape"])
        self._offset: int = found["offset"]
        self._nbytes: int = found["bytes"]

    @property
    def name(self) -> str:
        """Its name in the file; that of the file for ``.npy``."""
        return self._name

    @property
    def dtype(self) -> str:
        """The name of its dtype, as numpy, ml_dtypes and torch have it; GGUF's blocks have theirs, as ``"q8_0"``."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths; empty for a single number."""
        return self._shape

    @property
    def offset(self) -> int:
        """Its first byte in the store; of a file of a drive's ext4, in the file."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Its bytes, in the order of C."""
        return self._nbytes

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Where its bytes lie in the store: first byte, and bytes, of each piece; one piece, but for a file of a drive's
        ext4 that lies in several extents.

        Raises :class:`Usage` for bytes in a hole of such a file.
        """
        if self._file is None:
            return [(self._offset, self._nbytes)] if self._nbytes else []
        return self._file.pieces(self._offset, self._nbytes)

    def read(self) -> bytes:
        """Its bytes. Waits for them."""
        return b"".join(self._store.read(nbytes, place) for place, nbytes in self.pieces)

    def as_table(self) -> Table:
        """Its rows: ``(N, *row)`` is a table of N rows, read from where they lie.

        A tensor may lie in several :attr:`pieces`; its rows are not written then.

        Raises :class:`Usage` for a single number, for rows of no bytes, and for a dtype that tables do not have (most
        blocks of GGUF).
        """
        self._check_table()
        return table_of([self], self._shape, self._dtype)

    def _check_table(self) -> None:
        """What is no table is refused by name."""
        if not self._shape:
            raise Usage(f"{self._name!r} is a single number", "read its bytes: entry.read()")
        if self._dtype not in _dtypes.SIZES and self._dtype not in _dtypes.BLOCKS:
            raise Usage(
                f"{self._name!r} is of the dtype {self._dtype}, of which there are no tables",
                "read its bytes: entry.read(), or make a table of uint8 at its place",
            )

    def __repr__(self) -> str:
        return f"<nvme_gpu.Entry {self._name!r} {self._shape} {self._dtype} at byte {self._offset}>"


def table_of(
    tensors: list[Entry],
    shape: tuple[int, ...],
    dtype: Any,
    result: RowConversion = RowConversion(),
) -> Table:
    """The rows of tensors of one store, one tensor after the other."""
    pieces = [piece for tensor in tensors for piece in tensor.pieces]
    store = tensors[0]._store
    if len(pieces) <= 1:
        first = pieces[0][0] if pieces else tensors[0]._offset
        return Table(store, first, shape, dtype, result)
    return Table(store, 0, shape, dtype, result, pieces)


class Catalog(Held, Mapping[str, Entry]):
    """The tensors of a file by name, in the order of their data. Made by :func:`import_file` and :func:`catalog`."""

    __slots__ = ("_store", "_file", "_owned", "_entries", "_format", "_nbytes", "_metadata", "_files", "_begin")

    def __init__(
        self,
        store: Store,
        text: str,
        file: _native.DriveFile | None = None,
        owned: Store | Volume | None = None,
    ) -> None:
        found = json.loads(text)
        self._store = store
        self._file = file
        self._owned = owned
        self._entries = {one["name"]: Entry(store, one, file) for one in found["entries"]}
        self._format: str = found["format"]
        self._nbytes: int = found["bytes"]
        self._begin: int = found["begin"]
        self._metadata: dict[str, Any] = dict(found["metadata"])
        self._files: dict[str, int] = {one["name"]: one["offset"] for one in found["files"]}

    @property
    def store(self) -> Store:
        """The store in which the file lies."""
        return self._store

    def close(self) -> None:
        """Closes the store if :func:`catalog` opened it; its tables and loaders end then."""
        if self._owned is not None:
            self._owned.close()

    @property
    def format(self) -> str:
        """``"safetensors"``, ``"gguf"`` or ``"npy"``."""
        return self._format

    @property
    def nbytes(self) -> int:
        """Bytes of the file, its header with it: the next file may begin there."""
        return self._nbytes

    @property
    def metadata(self) -> dict[str, Any]:
        """What the header has beside the tensors: texts for safetensors; for GGUF texts, numbers, truth values, and lists
        of them. A number that is not finite is None, a text that is not UTF-8 a list of its bytes.
        """
        return dict(self._metadata)

    @property
    def files(self) -> dict[str, int]:
        """Where each file of an index begins in the store; empty for a single file."""
        return dict(self._files)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<nvme_gpu.Catalog {self._format}, {len(self)} tensors, {self._nbytes} bytes>"


def import_file(
    store: Store,
    path: str | os.PathLike[str],
    offset: int = 0,
    *,
    verify: bool = True,
    progress: Callable[[int, int], object] | None = None,
) -> Catalog:
    """Writes a file of tensors, safetensors, GGUF or ``.npy``, to ``store`` from byte ``offset`` on, and waits for it.

    A path that ends with ``.json`` names the index of a model in several safetensors files, and the first part of a split
    GGUF all of its parts. They are written one after another, each from a multiple of 4,096 after ``offset`` on; the
    catalog has the tensors that the index names, or those of all parts.

    The header is checked before anything is written. The data are flushed; with ``verify`` they are read back and
    compared with the file. ``progress(done, total)`` is called now and then and at the end, with bytes; a verified import
    counts each byte twice. What it raises, and Ctrl-C, end the import after at most 8 MiB more.

    Raises :class:`Usage` for a file that is of no such format, is not complete, is longer than its header says or does
    not fit, for an index whose files are missing or lack a tensor, for parts that are missing or do not go together, and
    for a store that is for reading only; :class:`NvmeGpuError` with the code ``file`` for one that cannot be read, with
    the code ``mismatch`` when bytes came back otherwise.
    """
    started = Import.of_file(_checked(store)._native, os.fspath(path), _place(offset), _arguments.flag("verify", verify))
    return Catalog(store, _awaited(started, progress))


def _awaited(started: Import, progress: Callable[[int, int], object] | None) -> str:
    """Waits for the work; what it found."""
    try:
        while not started.wait(None if progress is None else 0.1):
            done, total = started.progress()
            if progress is not None and total:
                progress(done, total)
        text = started.found()
        if progress is not None:
            progress(*started.progress())
    finally:
        started.cancel()
    return text


def write_manifest(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Writes the hashes (XXH3) of the chunks of a file of tensors to the file ``out``, by which
    :class:`LayerLoader` verifies layers. As ``nvme-gpu manifest PATH --out OUT``.

    ``progress(done, total)`` is called now and then and at the end, with bytes. What it raises, and Ctrl-C, end it.

    Raises :class:`Usage` for what is of no known format, and :class:`NvmeGpuError` with the code ``file``.
    """
    _awaited(Import.of_manifest(os.fspath(path), os.fspath(out)), progress)


def catalog(
    source: Store | DriveFile | str | os.PathLike[str],
    offset: int = 0,
    *,
    nbytes: int | None = None,
    **options: Any,
) -> Catalog:
    """What a file of tensors holds. Reads its header alone.

    ``source``: a :class:`Store` in which the file lies from byte ``offset`` on: one that was imported, or the file
    itself, opened as ``file:PATH``; a file of a :class:`Volume`; or a path: ``DEVICE:/path`` of a file in an ext4 on a
    drive, where ``part=N`` among the device's options names a partition, else that of a file of this machine. A path is
    opened for reading only, with the ``options`` of :func:`open`, and :meth:`Catalog.close` closes it.

    ``nbytes``: the size of a file in a store. Without it a file in a store that is a file of this machine ends where the
    store does, and a file on a drive where its header says. The parts of a split GGUF are found in a store as
    :func:`import_file` writes them; a path is of one file.

    Raises :class:`Usage` for what is of no known format, for a file that is shorter or longer than its header says,
    :class:`NotFound`, what :class:`Volume` raises, and what the device says.
    """
    place = _place(offset)
    size = None if nbytes is None else _arguments.whole("nbytes", nbytes, 0, (1 << 64) - 1)
    if isinstance(source, (Store, DriveFile)) and options:
        raise TypeError(f"options of a store that is open already: {', '.join(options)}")
    if isinstance(source, Store):
        return _of_store(source, place, size)
    if isinstance(source, DriveFile):
        _no_place(place, size)
        return _of_drive(source, None)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source is of the type {type(source).__name__}: pass a nvme_gpu.Store, a file of a Volume or a path")
    name = os.fspath(source)
    found = _native.location(name)
    if found is None:
        store = _open(f"file:{name}", **{"read_only": True, **options})
        try:
            return _of_store(store, place, size, owned=True)
        except BaseException:
            store.close()
            raise
    _no_place(place, size)
    device, part, path = found
    volume = Volume(f"{device}", part, **options)
    try:
        return _of_drive(volume.open(path), volume)
    except BaseException:
        volume.close()
        raise


def _of_store(store: Store, offset: int, nbytes: int | None, owned: bool = False) -> Catalog:
    started = Import.of_store(store._native, offset, nbytes)
    started.wait()
    return Catalog(store, started.found(), None, store if owned else None)


def _of_drive(file: DriveFile, owned: Volume | None) -> Catalog:
    file._check_open()
    return Catalog(file.store, file._native.catalog(), file._native, owned)


def _no_place(offset: int, nbytes: int | None) -> None:
    if offset:
        raise Usage(f"byte {offset} of a file of a drive", "leave offset out: the file begins with its header")
    if nbytes is not None:
        raise Usage(f"{nbytes} bytes of a file of a drive", "leave nbytes out: the file system says its size")


def _checked(store: Any) -> Store:
    if not isinstance(store, Store):
        raise TypeError(f"store is of the type {type(store).__name__}: pass a nvme_gpu.Store")
    return store


def _place(offset: Any) -> int:
    return _arguments.whole("offset", offset, 0, (1 << 64) - 1)
