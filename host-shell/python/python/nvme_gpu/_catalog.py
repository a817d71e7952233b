"""Files of tensors on a store: safetensors, GGUF and .npy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Callable, NoReturn

from ._errors import Usage
from ._native import Import
from ._store import Store, Table, _refuse_pickling, _whole


class Entry:
    """A tensor of a file that lies on a store."""

    __slots__ = ("_store", "_name", "_dtype", "_shape", "_offset", "_nbytes")

    def __init__(self, store: Store, found: dict[str, Any]) -> None:
        self._store = store
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
        """Its first byte in the store."""
        return self._offset

    @property
    def nbytes(self) -> int:
        """Its bytes, in the order of C."""
        return self._nbytes

    def as_table(self) -> Table:
        """Its rows: ``(N, *row)`` is a table of N rows.

        Raises :class:`Usage` for a single number, for rows of no bytes, and for a dtype that tables do not have.
        """
        if not self._shape:
            raise Usage(f"{self._name!r} is a single number", "read its bytes: store.read(entry.nbytes, entry.offset)")
        return self._store.table(self._offset, shape=self._shape, dtype=self._dtype)

    def __reduce__(self) -> NoReturn:
        _refuse_pickling(self)

    def __repr__(self) -> str:
        return f"<nvme_gpu.Entry {self._name!r} {self._shape} {self._dtype} at byte {self._offset}>"


class Catalog(Mapping[str, Entry]):
    """The tensors of a file by name, in the order of their data. Made by :func:`import_file` and :func:`catalog`."""

    __slots__ = ("_store", "_entries", "_format", "_nbytes", "_metadata", "_files")

    def __init__(self, store: Store, text: str) -> None:
        found = json.loads(text)
        self._store = store
        self._entries = {one["name"]: Entry(store, one) for one in found["entries"]}
        self._format: str = found["format"]
        self._nbytes: int = found["bytes"]
        self._metadata: dict[str, Any] = dict(found["metadata"])
        self._files: dict[str, int] = {one["name"]: one["offset"] for one in found["files"]}

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

    def __reduce__(self) -> NoReturn:
        _refuse_pickling(self)

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

    A path that ends with ``.json`` names the index of a model in several safetensors files. They are written one after
    another, each from a multiple of 4,096 after ``offset`` on; the catalog has the tensors that the index names.

    The header is checked before anything is written. The data are flushed; with ``verify`` they are read back and
    compared with the file. ``progress(done, total)`` is called now and then and at the end, with bytes; a verified import
    counts each byte twice. What it raises, and Ctrl-C, end the import after at most 8 MiB more.

    Raises :class:`Usage` for a file that is of no such format, is not complete or does not fit, for an index whose files
    are missing or lack a tensor, and for a store that is for reading only; :class:`NvmeGpuError` with the code ``file`` for one that cannot be read, with the code ``mismatch``
    when bytes came back otherwise.
    """
    started = Import.of_file(_checked(store)._native, os.fspath(path), _place(offset), bool(verify))
    try:
        while not started.wait(None if progress is None else 0.1):
            done, total = started.progress()
            if progress is not None and total:
                progress(done, total)
        text = started.catalog()
        if progress is not None:
            progress(*started.progress())
    finally:
        started.cancel()
    return Catalog(store, text)


def catalog(store: Store, offset: int = 0) -> Catalog:
    """What a file of tensors holds that lies in ``store`` from byte ``offset`` on: one that was imported, or the file
    itself, opened as ``file:PATH``. Reads its header alone.

    Raises :class:`Usage` for what is of no known format, and what the device says.
    """
    started = Import.of_store(_checked(store)._native, _place(offset))
    started.wait()
    return Catalog(store, started.catalog())


def _checked(store: Any) -> Store:
    if not isinstance(store, Store):
        raise TypeError(f"store is of the type {type(store).__name__}: pass a nvme_gpu.Store")
    return store


def _place(offset: Any) -> int:
    return _whole("offset", offset, 0, (1 << 64) - 1)
