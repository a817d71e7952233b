"""LMCache's chunks on NVMe: a storage plugin, chosen by its configuration alone.

    local_cpu: true
    storage_plugins: ["nvme"]
    extra_config:
      storage_plugin.nvme.module_path: nvme_gpu.kv.lmcache
      storage_plugin.nvme.class_name: NvmeBackend
      nvme_gpu.device: file:/nvme/pages

The options behind ``nvme_gpu.`` are :class:`AreaOptions`: ``device``, ``offset``, ``nbytes``, ``revision``, ``create``,
``allow_write``, ``queues``, ``depth``, ``timeout_ms``. Each worker has an area of its own. Written for LMCache 0.5.6.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from .._errors import NvmeGpuError, PageMiss, Usage, listed
from .._pages import PagePins, PageStore, PendingPages
from ._areas import AreaOptions, close, digest

_LOG = logging.getLogger("nvme_gpu")
_PREFIX = "nvme_gpu."


class NvmeBackend(StoragePluginInterface):
    """Chunks of LMCache on a drive. Any thread of LMCache may call.

    Raises :class:`Usage` for options that are not known, and for layerwise caches, whose chunks have other shapes.
    """

    def __init__(
        self,
        dst_device: str = "cpu",
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        if config is None or metadata is None or local_cpu_backend is None or loop is None:
            raise Usage("LMCache gives no configuration, model, memory or loop", "name this class in storage_plugins")
        if config.use_layerwise:
            raise Usage("LMCache caches layer by layer", "set use_layerwise: false")
        options = {
            name[len(_PREFIX) :]: value for name, value in (config.extra_config or {}).items() if name.startswith(_PREFIX)
        }
        self._options = AreaOptions.of(options, "extra_config of LMCache")
        self._lock = threading.Lock()
        self._opened: PageStore | None = None
        self._is_closed = False
        self._putting: set[Any] = set()
        self._pins: dict[Any, list[PagePins]] = {}

    def __str__(self) -> str:
        return "NvmeBackend"

    def _pages(self) -> PageStore:
        # LMCache learns the shapes of a chunk from its engine after it has made this object.
        with self._lock:
            if self._is_closed:
                raise Usage("the storage plugin is closed", "do not use it after close()")
            if self._opened is None:
                of = self.metadata
                shapes, dtypes = of.get_shapes(), of.get_dtypes()
                layout = {
                    "shapes": [list(shape) for shape in of.get_shapes(1)],
                    "dtypes": [str(dtype) for dtype in dtypes],
                    "mla": of.use_mla,
                }
                self._opened = self._options.open(
                    of.worker_id,
                    of.world_size,
                    _nbytes(shapes, dtypes),
                    model=of.model_name,
                    dtype=str(of.kv_dtype),
                    layout=digest(layout),
                    block_tokens=of.chunk_size,
                    parallel_rank=f"{of.worker_id} of {of.world_size}",
                    hash_algorithm=str(getattr(self.config, "pre_caching_hash_algorithm", "")),
                )
                _LOG.info("LMCache: %s", self._opened.stats())
            return self._opened

    def _keys(self, keys: Sequence[Any]) -> list[bytes]:
        return self._pages().keys([key.to_string().encode() for key in keys])

    # ---- what is there

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether the chunk is found; with ``pin`` it stays until ``unpin``."""
        return self.pin(key) if pin else self._pages().contains(self._keys([key]))[0]

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many of the first chunks are found."""
        found = self._pages().contains(self._keys(keys))
        count = next((number for number, one in enumerate(found) if not one), len(keys))
        if pin:
            count = next((number for number in range(count) if not self.pin(keys[number])), count)
        return count

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """As :meth:`batched_contains`, which waits for nothing."""
        return self.batched_contains(keys, pin)

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Whether the chunk is being stored."""
        with self._lock:
            return key in self._putting

    def pin(self, key: Any) -> bool:
        """Keeps the chunk where it is; False where it is not found."""
        pins = self._pages().pin_prefix(self._keys([key]))
        if len(pins):
            with self._lock:
                self._pins.setdefault(key, []).append(pins)
        return bool(len(pins))

    def unpin(self, key: Any) -> bool:
        """Takes one pin back; False where there is none."""
        with self._lock:
            held = self._pins.get(key, [])
            pins = held.pop() if held else None
            if not held:
                self._pins.pop(key, None)
        if pins is not None:
            pins.release()
        return pins is not None

    def remove(self, key: Any, force: bool = True) -> bool:
        """Removes the chunk, durably."""
        return bool(self._pages().remove(self._keys([key])))

    def touch_cache(self) -> None:
        """Nothing: a chunk counts as used when it is loaded."""

    def get_allocator_backend(self) -> Any:
        """LMCache's memory of the host, into which chunks are loaded."""
        return self.local_cpu_backend

    # ---- storing

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[None]] | None:
        """Starts to store chunks together; ``on_complete_callback`` is called for each that is found from now on."""
        pages, names = self._pages(), self._keys(keys)
        there = pages.contains(names)
        chosen = []
        with self._lock:
            for key, name, obj, is_there in zip(keys, names, objs, there):
                if not is_there and key not in self._putting:
                    self._putting.add(key)
                    chosen.append((key, name, obj))
        if not chosen:
            return None
        held: list[Any] = []
        try:
            for _, _, obj in chosen:
                obj.ref_count_up()
                held.append(obj)
            pending = pages.store_async([name for _, name, _ in chosen], [obj.byte_array for _, _, obj in chosen])
            work = self._put([key for key, _, _ in chosen], held, pending, on_complete_callback)
            return [asyncio.run_coroutine_threadsafe(work, self.loop)]
        except BaseException:
            self._put_ended([key for key, _, _ in chosen], held)
            raise

    async def _put(self, keys: list[Any], objs: list[Any], pending: PendingPages, ended: Callable[[Any], None] | None) -> None:
        try:
            outcomes = await pending
            self._log("stored", outcomes)
            for key, outcome in zip(keys, outcomes):
                if ended is not None and outcome in ("stored", "present"):
                    try:
                        ended(key)
                    except Exception:
                        _LOG.exception("LMCache: a callback failed for %s", key)
        finally:
            self._put_ended(keys, objs)

    def _put_ended(self, keys: list[Any], objs: list[Any]) -> None:
        with self._lock:
            self._putting.difference_update(keys)
        for obj in objs:
            obj.ref_count_down()

    # ---- loading

    def get_blocking(self, key: Any) -> Any:
        """The chunk, or None where it is to be computed."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Each chunk, or None where it is to be computed."""
        objs, pending = self._load(keys, True)
        return self._loaded(objs, pending.result())

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
        """The first chunks, up to one that is to be computed."""
        objs, pending = self._load(keys, False)
        loaded = self._loaded(objs, await pending)
        count = next((number for number, one in enumerate(loaded) if one is None), len(loaded))
        for obj in loaded[count:]:
            if obj is not None:
                obj.ref_count_down()
        return loaded[:count]

    def _load(self, keys: list[Any], may_wait: bool) -> tuple[list[Any], PendingPages]:
        """Memory for each chunk that is found, else None, and the reads into it."""
        pages, names = self._pages(), self._keys(keys)
        objs = [None if length is None else self._memory(length, may_wait) for length in pages.lengths(names)]
        try:
            there = [(name, obj) for name, obj in zip(names, objs) if obj is not None]
            return objs, pages.load_async([name for name, _ in there], [obj.byte_array for _, obj in there])
        except BaseException:
            for obj in objs:
                if obj is not None:
                    obj.ref_count_down()
            raise

    def _memory(self, length: int, may_wait: bool) -> Any:
        of = self.metadata
        dtypes = of.get_dtypes()
        tokens, rest = divmod(length, _nbytes(of.get_shapes(1), dtypes))
        if rest or not 1 <= tokens <= of.chunk_size:
            _LOG.warning("LMCache: a chunk of %d bytes is not of 1 to %d tokens", length, of.chunk_size)
            return None
        form = MemoryFormat.KV_MLA_FMT if of.use_mla else MemoryFormat.KV_2LTD
        return self.local_cpu_backend.allocate(of.get_shapes(tokens), dtypes, form, busy_loop=may_wait)

    def _loaded(self, objs: list[Any], outcomes: list[Any]) -> list[Any]:
        self._log("loaded", outcomes)
        rest = iter(outcomes)
        found = []
        for obj in objs:
            if obj is not None and isinstance(next(rest), NvmeGpuError):
                obj.ref_count_down()
                obj = None
            found.append(obj)
        return found

    def _log(self, word: str, outcomes: list[Any]) -> None:
        failed = [one for one in outcomes if isinstance(one, NvmeGpuError) and not (isinstance(one, PageMiss) and one.code == "missing")]
        if failed or "no_room" in outcomes:
            full = ["all pages are in use"] * ("no_room" in outcomes)
            _LOG.warning("LMCache: of %d chunks some were not %s: %s", len(outcomes), word, listed([*map(str, failed), *full]))

    def close(self) -> None:
        """Closes the area and its device; chunks that are being stored are stored to their end."""
        with self._lock:
            pages, self._opened, self._is_closed = self._opened, None, True
            held, self._pins = self._pins, {}
        for pins in held.values():
            for one in pins:
                one.release()
        if pages is not None:
            close(pages)


def _nbytes(shapes: Sequence[Any], dtypes: Sequence[Any]) -> int:
    return sum(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes))
