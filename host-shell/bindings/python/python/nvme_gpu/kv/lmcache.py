"""LMCache's chunks on NVMe: a storage plugin, chosen by its configuration alone.

    local_cpu: true
    storage_plugins: ["nvme"]
    extra_config:
      storage_plugin.nvme.module_path: nvme_gpu.kv.lmcache
      storage_plugin.nvme.class_name: NvmeBackend
      nvme_gpu.device: file:/nvme/pages

The options behind ``nvme_gpu.`` are :class:`AreaOptions`: ``device``, ``offset``, ``nbytes``, ``revision``, ``create``,
``allow_write``, ``queues``, ``depth``, ``timeout_ms``. Each worker has an area of its own, or all have one with ``shared``.
Written for LMCache 0.5.6.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from .._errors import NvmeGpuError, Usage, listed
from .._pages import PagePins, PageStore, PendingPages
from ._areas import AreaOptions, close, digest, leading, versions
from ._lmcache_l2 import NvmeL2Adapter

__all__ = ["NvmeBackend", "NvmeL2Adapter"]

_LOG = logging.getLogger("nvme_gpu")
_PREFIX = "nvme_gpu."
_MOST_LOOKUPS = 1024
"""Lookups whose chunks stay pinned until they are loaded."""


class NvmeBackend(StoragePluginInterface):
    """Chunks of LMCache on a drive. Any thread of LMCache may call.

    Raises :class:`Usage` for options that are not known, for layerwise caches, whose chunks have other shapes, and for caches
    of bytes (FP8) without ``kv_format``.
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
        self._options.dtype(*metadata.get_dtypes())
        self._lock = threading.Lock()
        self._opened: PageStore | None = None
        self._is_closed = False
        self._putting: set[Any] = set()
        self._moves: set[_Move] = set()
        self._pins: dict[Any, list[PagePins]] = {}
        self._lookups: OrderedDict[str, list[PagePins]] = OrderedDict()
        self._failure: str | None = None
        # LMCache frees its memory first, and threads of ours may still read and write it then.
        freeing = local_cpu_backend.close

        def close_memory() -> None:
            self.close()
            freeing()

        local_cpu_backend.close = close_memory

    def __str__(self) -> str:
        return "NvmeBackend"

    def _pages(self) -> PageStore | None:
        """The page store; None where it cannot be opened, which is logged once: LMCache goes on without it."""
        # LMCache learns the shapes of a chunk from its engine after it has made this object.
        with self._lock:
            if self._opened is None and not self._is_closed and self._failure is None:
                try:
                    self._opened = self._open()
                    _LOG.info("LMCache: %s", self._opened.stats())
                except NvmeGpuError as error:
                    self._failure = str(error)
                    _LOG.error("LMCache: the pages on the drive are not used: %s", error)
            return self._opened

    def _open(self) -> PageStore:
        of = self.metadata
        shapes, dtypes = of.get_shapes(), of.get_dtypes()
        layout = {
            "shapes": [list(shape) for shape in of.get_shapes(1)],
            "dtypes": [str(dtype) for dtype in dtypes],
            "mla": of.use_mla,
            "versions": versions("lmcache", "vllm", "sglang"),
        }
        return self._options.open(
            of.worker_id,
            of.world_size,
            _nbytes(shapes, dtypes),
            model=of.model_name,
            dtype=self._options.dtype(*dtypes),
            layout=digest(layout),
            block_tokens=of.chunk_size,
            parallel_rank=self._options.parallel_rank(of.worker_id, of.world_size),
            hash_algorithm=str(getattr(self.config, "pre_caching_hash_algorithm", "")),
        )

    def _keys(self, pages: PageStore, keys: Sequence[Any]) -> list[bytes]:
        # LMCache's text of tags is ambiguous where they contain its separators.
        names = [f"{key.to_string()}\0{getattr(key, 'tags', None)!r}".encode() for key in keys]
        return pages.keys(names, self._options.part(self.metadata.worker_id))

    # ---- what is there

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Whether the chunk is found; with ``pin`` it stays until ``unpin``."""
        if pin:
            return self.pin(key)
        pages = self._pages()
        return pages is not None and pages.contains(self._keys(pages, [key]))[0]

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """How many of the first chunks are found."""
        if pin:
            return leading(self.pin(key) for key in keys)
        pages = self._pages()
        return 0 if pages is None else leading(pages.contains(self._keys(pages, keys)))

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:
        """As :meth:`batched_contains`. Chunks that it pins stay until ``batched_get_non_blocking`` has loaded those of this
        lookup, or until many later lookups have come."""
        pages = self._pages()
        if pages is None or not pin:
            return self.batched_contains(keys)
        pins = pages.pin_prefix(self._keys(pages, keys))
        with self._lock:
            self._lookups.setdefault(lookup_id, []).append(pins)
            self._lookups.move_to_end(lookup_id)
            oldest = self._lookups.popitem(last=False)[1] if len(self._lookups) > _MOST_LOOKUPS else []
        _release(oldest)
        return len(pins)

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Whether the chunk is being stored."""
        with self._lock:
            return key in self._putting

    def pin(self, key: Any) -> bool:
        """Keeps the chunk where it is; False where it is not found."""
        pages = self._pages()
        if pages is None:
            return False
        pins = pages.pin_prefix(self._keys(pages, [key]))
        if not len(pins):
            return False
        with self._lock:
            self._pins.setdefault(key, []).append(pins)
        return True

    def unpin(self, key: Any) -> bool:
        """Takes one pin back; False where there is none."""
        with self._lock:
            held = self._pins.get(key, [])
            pins = held.pop() if held else None
            if not held:
                self._pins.pop(key, None)
        _release([] if pins is None else [pins])
        return pins is not None

    def remove(self, key: Any, force: bool = True) -> bool:
        """Removes the chunk, durably."""
        pages = self._pages()
        return pages is not None and bool(pages.remove(self._keys(pages, [key])))

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
        pages = self._pages()
        if pages is None:
            return None
        names = self._keys(pages, keys)
        there = pages.contains(names)
        chosen = []
        with self._lock:
            for key, name, obj, is_there in zip(keys, names, objs, there):
                if not is_there and key not in self._putting:
                    self._putting.add(key)
                    chosen.append((key, name, obj))
        if not chosen:
            return None
        move = _Move([obj for _, _, obj in chosen])
        for obj in move.objs:
            obj.ref_count_up()
        stored = [key for key, _, _ in chosen]
        try:
            self._begin(move, pages.store_async, [name for _, name, _ in chosen])
            return [asyncio.run_coroutine_threadsafe(self._put(stored, move, on_complete_callback), self.loop)]
        except BaseException:
            self._put_ended(stored, move)
            raise

    async def _put(self, keys: list[Any], move: _Move, ended: Callable[[Any], None] | None) -> None:
        try:
            assert move.pending is not None
            outcomes = await move.pending
            self._log("stored", outcomes)
            for key, outcome in zip(keys, outcomes):
                if ended is not None and outcome in ("stored", "present"):
                    try:
                        ended(key)
                    except Exception:
                        _LOG.exception("LMCache: a callback failed for %s", key)
        finally:
            self._put_ended(keys, move)

    def _put_ended(self, keys: list[Any], move: _Move) -> None:
        with self._lock:
            self._putting.difference_update(keys)
        self._end(move, move.objs)

    # ---- loading

    def get_blocking(self, key: Any) -> Any:
        """The chunk, or None where it is to be computed."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Each chunk, or None where it is to be computed."""
        found, move = self._load(keys, True)
        try:
            outcomes = move.pending.result() if move.pending else []
        except BaseException:
            self._end(move, move.objs)
            raise
        return self._loaded(found, move, outcomes)

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[Any], transfer_spec: Any = None) -> list[Any]:
        """The first chunks, up to one that is to be computed."""
        try:
            found, move = self._load(keys, False)
            try:
                outcomes = await move.pending if move.pending else []
            except BaseException:
                self._end(move, move.objs)
                raise
            loaded = self._loaded(found, move, outcomes)
        finally:
            with self._lock:
                pins = self._lookups.pop(lookup_id, [])
            _release(pins)
        count = leading(one is not None for one in loaded)
        for obj in loaded[count:]:
            if obj is not None:
                obj.ref_count_down()
        return loaded[:count]

    def _load(self, keys: list[Any], may_wait: bool) -> tuple[list[Any], _Move]:
        """Memory for each chunk that is found, else None, and the reads into it."""
        pages, move = self._pages(), _Move([])
        found: list[Any] = [None] * len(keys)
        if pages is None:
            return found, move
        names = self._keys(pages, keys)
        try:
            for number, length in enumerate(pages.lengths(names)):
                if length is not None:
                    # LMCache waits without an end for memory, which this call may hold itself.
                    found[number] = self._memory(length, may_wait and not move.objs)
                    if found[number] is not None:
                        move.objs.append(found[number])
            self._begin(move, pages.load_async, [name for name, obj in zip(names, found) if obj is not None])
        except BaseException:
            self._end(move, move.objs)
            raise
        return found, move

    def _memory(self, length: int, may_wait: bool) -> Any:
        of = self.metadata
        dtypes = of.get_dtypes()
        tokens, rest = divmod(length, _nbytes(of.get_shapes(1), dtypes))
        if rest or not 1 <= tokens <= of.chunk_size:
            _LOG.warning("LMCache: a chunk of %d bytes is not of 1 to %d tokens", length, of.chunk_size)
            return None
        form = MemoryFormat.KV_MLA_FMT if of.use_mla else MemoryFormat.KV_2LTD
        return self.local_cpu_backend.allocate(of.get_shapes(tokens), dtypes, form, busy_loop=may_wait)

    def _loaded(self, found: list[Any], move: _Move, outcomes: list[Any]) -> list[Any]:
        self._log("loaded", outcomes)
        # Another process may have stored a chunk of another length since the lookup.
        failed = [obj for obj, outcome in zip(move.objs, outcomes) if outcome != len(obj.byte_array)]
        self._end(move, failed)
        return [None if any(obj is one for one in failed) else obj for obj in found]

    # ---- memory of LMCache that is in use

    def _begin(self, move: _Move, start: Callable[[list[bytes], list[Any]], PendingPages], names: list[bytes]) -> None:
        with self._lock:
            if self._is_closed:
                raise Usage("the storage plugin is closed", "do not use it after close()")
            self._moves.add(move)
            move.pending = start(names, [obj.byte_array for obj in move.objs])

    def _end(self, move: _Move, objs: list[Any]) -> None:
        """Gives ``objs`` back once the transfer has ended; the buffers of LMCache do not own their memory."""
        with self._lock:
            if move.pending is not None and not move.pending.done():
                # Of a wait that was ended by an exception.
                move.left = objs
                return
            self._moves.discard(move)
            ended = [one for one in self._moves if one.left and one.pending is not None and one.pending.done()]
            self._moves.difference_update(ended)
            left = [obj for one in ended for obj in one.take_left()]
        for obj in [*objs, *left]:
            obj.ref_count_down()

    def _log(self, word: str, outcomes: list[Any]) -> None:
        failed = [one for one in outcomes if isinstance(one, NvmeGpuError) and one.code != "missing"]
        if failed or "no_room" in outcomes:
            full = ["all pages are in use"] * ("no_room" in outcomes)
            _LOG.warning("LMCache: of %d chunks some were not %s: %s", len(outcomes), word, listed([*map(str, failed), *full]))

    def close(self) -> None:
        """Waits for what is being stored and loaded, and closes the area and its device. A second call does nothing."""
        with self._lock:
            pages, self._opened, self._is_closed = self._opened, None, True
            moves, held = list(self._moves), [*self._pins.values(), *self._lookups.values()]
            self._pins.clear()
            self._lookups.clear()
        for move in moves:
            if move.pending is not None:
                move.pending.exception()
            with self._lock:
                left = move.take_left()
            for obj in left:
                obj.ref_count_down()
        for pins in held:
            _release(pins)
        if pages is not None:
            close(pages)


class _Move:
    """A transfer and LMCache's objects whose memory it uses."""

    def __init__(self, objs: list[Any]) -> None:
        self.objs = objs
        self.pending: PendingPages | None = None
        self.left: list[Any] = []
        """Objects to give back when it has ended."""

    def take_left(self) -> list[Any]:
        """Returns them once. The caller holds the lock: two threads would give them back twice."""
        left, self.left = self.left, []
        return left


def _release(pins: Iterable[PagePins]) -> None:
    for one in pins:
        one.release()


def _nbytes(shapes: Sequence[Any], dtypes: Sequence[Any]) -> int:
    return sum(int(shape.numel()) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes))
