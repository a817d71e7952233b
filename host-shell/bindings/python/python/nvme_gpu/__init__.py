"""Rows of a table on NVMe by ids: ``out = table[ids]``, on the CPU or by a GPU.

>>> import nvme_gpu
>>> store = nvme_gpu.open("sim:mem?size=16MiB")
>>> table = store.table(0, shape=(1000, 4), dtype="int32")
>>> table.scatter([7, 3], [[7, 7, 7, 7], [3, 3, 3, 3]])
>>> table[[3, 7, 3]].tolist()
[[3, 3, 3, 3], [7, 7, 7, 7], [3, 3, 3, 3]]
>>> store.close()

Offsets and lengths are in bytes. Buffers are those of numpy, torch, cupy, and of any object with the buffer protocol,
DLPack or ``__cuda_array_interface__``; numpy is not needed. Errors are :class:`NvmeGpuError`, with ``cause``,
``remedy`` and ``code``. Waits release the GIL, and Ctrl-C ends them. The logger is ``nvme_gpu``.
"""

from __future__ import annotations

from ._batches import DataLoader
from ._catalog import Catalog, Entry, catalog, import_file, write_manifest
from ._errors import Changed, Gone, KvLoadError, NotFound, NvmeGpuError, OutOfRange, PageMiss, Status, Timeout, Usage
from ._files import DirEntry, DriveFile, Extent, FileStat, MountedFile, Volume
from ._kv import KvStore
from ._loaders import Layer, LayerLoader
from ._log import log_events
from ._lookup_table import lookup_table
from ._native import Array, __version__
from ._pages import PageBlocks, PagePins, PageStore, PendingPages
from ._prefetch import Prefetch
from ._search import Nearest, SearchIndex, build_index
from ._store import Pending, Store, open, stats
from ._table import Table

__all__ = [
    "Array",
    "Catalog",
    "Changed",
    "DataLoader",
    "DirEntry",
    "DriveFile",
    "Entry",
    "Extent",
    "FileStat",
    "Gone",
    "KvLoadError",
    "KvStore",
    "Layer",
    "LayerLoader",
    "MountedFile",
    "Nearest",
    "NotFound",
    "NvmeGpuError",
    "OutOfRange",
    "PageMiss",
    "PageBlocks",
    "PagePins",
    "PageStore",
    "Pending",
    "PendingPages",
    "Prefetch",
    "SearchIndex",
    "Status",
    "Store",
    "Table",
    "Timeout",
    "Usage",
    "Volume",
    "__version__",
    "build_index",
    "catalog",
    "import_file",
    "log_events",
    "lookup_table",
    "open",
    "stats",
    "write_manifest",
]
