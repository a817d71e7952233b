"""LMCache's second level in server mode on NVMe: an L2 adapter, chosen by an option alone.

    --l2-adapter '{"type": "plugin", "module_path": "nvme_gpu.kv.lmcache", "class_name": "NvmeL2Adapter",
      "adapter_params": {"device": "file:/nvme/pages", "page_bytes": 4194304}}'

``page_bytes`` is the longest object: the bytes of a chunk. The other parameters are :class:`AreaOptions`. Written for
LMCache 0.5.6.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from .._arguments import whole
from .._errors import NvmeGpuError, Usage, listed
from .._pages import PagePins, PendingPages
from ._areas import AreaOptions, close, digest, versions

_LOG = logging.getLogger("nvme_gpu")
_KINDS = ("store", "lookup", "load")
_MOST_FORMS = 16
"""Forms of objects that are kept for each model and group, for lookups that tell none."""


class NvmeL2Adapter(L2AdapterInterface):
    """Objects of LMCache on a drive. Any thread may call.

    An object is found again under the key, shapes and element types with which it was stored.

    Raises :class:`Usage` for parameters that are not known, and without ``page_bytes``.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        options = dict(config)
        page_bytes = options.pop("page_bytes", None)
        if page_bytes is None:
            raise Usage("adapter_params has no page_bytes", 'add "page_bytes": the bytes of a chunk of all layers')
        area = AreaOptions.of(options, "adapter_params")
        self._pages = area.open(
            0,
            1,
            whole("page_bytes", page_bytes, 1, 1 << 30),
            model="LMCache",
            layout=digest({"objects": 1, "versions": versions("lmcache")}),
            parallel_rank="in the key",
            hash_algorithm="lmcache",
        )
        _LOG.info("LMCache: %s", self._pages.stats())
        self._notifiers = {name: create_event_notifier() for name in _KINDS}
        self._results: dict[str, dict[int, Any]] = {name: {} for name in _KINDS}
        self._lock = threading.Lock()
        self._is_closed = False
        self._next_task = 0
        self._under_way: set[PendingPages] = set()
        self._forms: dict[tuple[str, int], list[str]] = {}
        self._pins: dict[Any, list[PagePins]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="nvme-gpu-l2", daemon=True)
        self._thread.start()

    def get_store_event_fd(self) -> int:
        """Readable when stores have ended."""
        return int(self._notifiers["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when lookups have ended."""
        return int(self._notifiers["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        """Readable when loads have ended."""
        return int(self._notifiers["load"].fileno())

    # ---- storing

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Starts to store objects."""
        names = [self._name(key, self._seen(key, obj)) for key, obj in zip(keys, objects, strict=True)]
        sizes = [len(obj.byte_array) for obj in objects]

        def ended(task: int, outcomes: list[Any]) -> None:
            # What another task is storing may still fail, and this one would have told of a success.
            good = all(one in ("stored", "present") for one in outcomes)
            new = [place for place, one in enumerate(outcomes) if one == "stored"]
            self._tell("stored", self._notify_keys_stored, [keys[place] for place in new], [sizes[place] for place in new])
            self._end("store", task, L2StoreResult(good, sum(sizes[place] for place in new)))

        return self._submit(self._pages.store_async, names, objects, "stored", ended)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """The stores that have ended since the last call: a success where all objects are found from now on."""
        with self._lock:
            ended, self._results["store"] = self._results["store"], {}
        return ended

    # ---- lookups

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Starts to look for objects, and locks those that are found until :meth:`submit_unlock`."""

        def look() -> None:
            found = Bitmap(len(keys))
            for place, key in enumerate(keys):
                try:
                    layout = group_layout_descs.get(key.object_group_id)
                    told = [_form(layout.shapes, layout.dtypes)] if layout is not None and layout.shapes else None
                    if self._pin(key, self._known(key) if told is None else told):
                        found.set(place)
                except Exception as error:
                    # LMCache waits for the result of each task, whatever its keys and layouts are.
                    _LOG.warning("LMCache: an object was not looked for: %s", error)
            self._end("lookup", task, found)

        with self._lock:
            task = self._task()
            self._loop.call_soon_threadsafe(look)
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """The bitmap of the objects that are locked, once; None while it is not known."""
        with self._lock:
            return self._results["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Takes one lock of each object back."""
        for key in keys:
            with self._lock:
                held = self._pins.get(key, [])
                pins = held.pop() if held else None
                if not held:
                    self._pins.pop(key, None)
            if pins is not None:
                pins.release()

    def _pin(self, key: Any, forms: Iterable[str]) -> bool:
        for form in forms:
            pins = self._pages.pin_prefix(self._pages.keys([self._name(key, form)]))
            if len(pins):
                with self._lock:
                    self._pins.setdefault(key, []).append(pins)
                return True
        return False

    # ---- loading

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Starts to fill objects. One that was stored with other shapes is not found."""
        names = [self._name(key, self._seen(key, obj)) for key, obj in zip(keys, objects, strict=True)]
        sizes = [len(obj.byte_array) for obj in objects]

        def ended(task: int, outcomes: list[Any]) -> None:
            loaded = Bitmap(len(keys))
            good = [place for place, one in enumerate(outcomes) if one == sizes[place]]
            for place in good:
                loaded.set(place)
            self._tell("loaded", self._notify_keys_accessed, [keys[place] for place in good])
            self._end("load", task, loaded)

        return self._submit(self._pages.load_async, names, objects, "loaded", ended)

    def query_load_result(self, task_id: int) -> Any:
        """The bitmap of the objects that were filled, once; None while it is not known."""
        with self._lock:
            return self._results["load"].pop(task_id, None)

    # ---- further calls

    def delete(self, keys: list[Any]) -> None:
        """Removes objects of the shapes that this process has seen last, durably. Logs those that it could not look for."""
        removed, sizes, unknown = [], [], 0
        for key in keys:
            forms = self._known(key)
            names = self._pages.keys([self._name(key, form) for form in forms])
            found = [(name, size) for name, size in zip(names, self._pages.lengths(names)) if size is not None]
            unknown += not found and len(forms) in (0, _MOST_FORMS)
            if found and self._pages.remove([name for name, _ in found]):
                removed.append(key)
                sizes.append(sum(size for _, size in found))
        if unknown:
            _LOG.warning(
                "LMCache: %d of %d objects were not removed: their shapes are known once one of each is stored or loaded",
                unknown,
                len(keys),
            )
        self._tell("removed", self._notify_keys_deleted, removed, sizes)

    def report_status(self) -> dict[str, Any]:
        """Whether it works, and the counts of :meth:`PageStore.stats`."""
        if self._is_closed:
            return {"is_healthy": False, "type": "NvmeL2Adapter"}
        return {"is_healthy": self._thread.is_alive(), "type": "NvmeL2Adapter", **self._pages.stats()}

    def close(self) -> None:
        """Waits for what is being stored and loaded, and closes the area and the event descriptors."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            pending, held = list(self._under_way), [one for pins in self._pins.values() for one in pins]
            self._pins.clear()
        for one in pending:
            one.exception()
        for pins in held:
            pins.release()
        asyncio.run_coroutine_threadsafe(_others_ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        close(self._pages)
        for notifier in self._notifiers.values():
            notifier.close()

    # ---- tasks

    def _task(self) -> int:
        # The caller holds the lock until the loop or the drive has the task: close() waits for those alone.
        if self._is_closed:
            raise Usage("the L2 adapter is closed", "do not use it after close()")
        self._next_task += 1
        return self._next_task - 1

    def _submit(
        self,
        move: Callable[[list[bytes], list[Any]], PendingPages],
        names: list[bytes],
        objects: list[Any],
        word: str,
        ended: Callable[[int, list[Any]], None],
    ) -> int:
        async def wait(task: int, pending: PendingPages) -> None:
            try:
                outcomes = await pending
            except NvmeGpuError as error:
                outcomes = [error] * len(names)
            with self._lock:
                self._under_way.discard(pending)
            _log(word, outcomes)
            ended(task, outcomes)

        def fail(task: int, error: Exception) -> None:
            outcomes = [error] * len(names)
            _log(word, outcomes)
            ended(task, outcomes)

        with self._lock:
            task = self._task()
            try:
                pending = move(self._pages.keys(names), [obj.byte_array for obj in objects])
            except (NvmeGpuError, TypeError) as error:
                # LMCache waits for the result of each task.
                self._loop.call_soon_threadsafe(fail, task, error)
            else:
                self._under_way.add(pending)
                asyncio.run_coroutine_threadsafe(wait(task, pending), self._loop)
        return task

    def _end(self, kind: str, task: int, result: Any) -> None:
        with self._lock:
            self._results[kind][task] = result
        self._notifiers[kind].notify()

    def _tell(self, word: str, notify: Callable[..., None], *found: list[Any]) -> None:
        if not found[0]:
            return
        try:
            notify(*found)
        except Exception:
            _LOG.exception("LMCache: a listener failed for objects that were %s", word)

    # ---- keys

    def _seen(self, key: Any, obj: Any) -> str:
        """The form of the object, which lookups without one try from now on."""
        about = obj.metadata
        form = _form(about.shapes or [about.shape], about.dtypes or [about.dtype])
        with self._lock:
            forms = self._forms.setdefault((key.model_name, key.object_group_id), [])
            if form not in forms:
                forms.insert(0, form)
                del forms[_MOST_FORMS:]
        return form

    def _known(self, key: Any) -> list[str]:
        with self._lock:
            return list(self._forms.get((key.model_name, key.object_group_id), ()))

    def _name(self, key: Any, form: str) -> bytes:
        fields = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, key.chunk_hash.hex(), form)
        return "\0".join(map(str, fields)).encode()


def _form(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    return f"{[[*map(int, shape)] for shape in shapes]} {[*map(str, dtypes)]}"


def _log(word: str, outcomes: Sequence[Any]) -> None:
    failed = [one for one in outcomes if isinstance(one, Exception) and getattr(one, "code", "") != "missing"]
    full = ["all pages are in use"] * ("no_room" in outcomes)
    if failed or full:
        _LOG.warning("LMCache: of %d objects some were not %s: %s", len(outcomes), word, listed([*map(str, failed), *full]))


async def _others_ended() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await asyncio.gather(*others, return_exceptions=True)
