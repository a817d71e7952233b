"""SGLang's HiCache on NVMe: a storage back end, chosen by options alone.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "nvme_gpu",
        "module_path": "nvme_gpu.kv.sglang", "class_name": "NvmeStorage", "device": "file:/nvme/pages"}'

Its options are :class:`AreaOptions`: ``device``, ``offset``, ``nbytes``, ``revision``, ``create``, ``allow_write``,
``queues``, ``depth``, ``timeout_ms``. Each rank has an area of its own, or all have one with ``shared``.
Written for SGLang 0.5.23.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from .._errors import NvmeGpuError, PageMiss, Usage, listed
from .._pages import PageStore
from ._areas import AreaOptions, close, digest, leading, versions

_LOG = logging.getLogger("nvme_gpu")
# Those that SGLang itself reads from the same object.
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "prefetch_threshold", "prefetch_timeout_base",
              "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys", "tp_lcm_size")  # fmt: skip


class NvmeStorage(HiCacheStorage):
    """Pages of HiCache on a drive. Any thread of SGLang may call.

    Raises :class:`Usage` where ranks would need each other's pages, and the area is not ``shared``: tensor parallel ranks of
    a model whose keys and values they replicate.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        options = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in _OF_SGLANG}
        self._options = AreaOptions.of(options, "the storage back end")
        self._config = storage_config
        self._lock = threading.Lock()
        self._opened: PageStore | None = None
        self._part = 0
        self._within = (storage_config.pp_rank * storage_config.tp_size + storage_config.tp_rank) * storage_config.attn_cp_size
        self._within += storage_config.attn_cp_rank
        self.registered_pools: dict[Any, Any] = {}
        if storage_config.is_mla_model and storage_config.tp_size > 1 and not self._options.shared:
            raise Usage(
                f"{storage_config.tp_size} ranks replicate the keys and values of {storage_config.model_name}, and one writes",
                "set shared to true, or use a tensor parallel size of 1 for this model",
            )

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of keys and values."""
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A further pool, as that of states."""
        self.registered_pools[host_pool_name] = host_pool
        if self._opened is not None and _page_bytes(host_pool) > self._opened.page_bytes:
            raise Usage(
                f"a page of the pool {host_pool_name} has {_page_bytes(host_pool)} bytes, and those of the area "
                f"{self._opened.page_bytes}",
                "attach the storage back end after this pool",
            )

    def on_host_pools_registered(self) -> None:
        """All pools are known: opens the area, so that a mistake ends the start."""
        self._pages()

    def _pages(self) -> PageStore:
        with self._lock:
            if self._opened is None:
                config = self._config
                pools = {"kv": self.mem_pool_host, **{str(name): pool for name, pool in self.registered_pools.items()}}
                sizes = {name: _page_bytes(pool) for name, pool in pools.items()}
                ranks = config.tp_size * config.pp_size * config.attn_cp_size
                rank = config.dp_rank * ranks + self._within
                # Replicas have the same pages, and so have tensor parallel ranks with MLA, of which one writes: one of each
                # shard with decode context parallelism.
                shard, shards = getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)
                alike = (config.pp_rank * shards + shard) * config.attn_cp_size + config.attn_cp_rank
                self._part = self._options.part(alike if config.is_mla_model else self._within)
                pool = self.mem_pool_host
                layout = {
                    "pools": sizes,
                    "page_first": config.is_page_first_layout,
                    "order": getattr(pool, "layout", None),
                    "mla": config.is_mla_model,
                    "versions": versions("sglang"),
                    **({"shards": [shards, config.logical_page_size]} if shards > 1 else {}),
                }
                self._opened = self._options.open(
                    rank,
                    max(ranks, rank + 1),
                    max(sizes.values()),
                    model=config.model_name or "",
                    # The pool of the host has bytes where that of the GPU has FP8.
                    dtype=self._options.dtype(*(getattr(one, "dtype", "") for one in (getattr(pool, "device_pool", pool), pool))),
                    layout=digest(layout),
                    block_tokens=getattr(pool, "page_size", 0),
                    parallel_rank=self._options.parallel_rank(rank, ranks),
                    hash_algorithm="sglang",
                )
                _LOG.info("HiCache: %s", self._opened.stats())
            return self._opened

    def _keys(self, names: Sequence[str]) -> list[bytes]:
        return self._pages().keys([name.encode() for name in names], self._part)

    def _names(self, keys: Sequence[str], pool: Any) -> list[str]:
        """What the pages of a pool are called."""
        if pool == PoolName.KV:
            return list(keys)
        # Ranks that replicate keys and values have, and write, states of their own.
        is_own = pool == PoolName.MAMBA and self._config.is_mla_model and self._config.tp_size > 1
        return [f"{key}.{pool}.{self._within}" if is_own else f"{key}.{pool}" for key in keys]

    # ---- pages of keys and values

    def exists(self, key: str) -> bool:
        """Whether the page is found."""
        return self._pages().contains(self._keys([key]))[0]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first keys are found."""
        return leading(self._pages().contains(self._keys(keys)))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """``target_location``, filled; None where the page is to be computed."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """For each key its target, filled, or None."""
        if target_locations is None or len(target_locations) != len(keys):
            raise Usage(f"{len(keys)} keys come without a target for each", "pass a tensor for each key")
        loaded = self._pages().get(self._keys(keys), target_locations)
        self._log("loaded", keys, loaded)
        whole = [target.numel() * target.element_size() for target in target_locations]
        return [target if got == size else None for target, got, size in zip(target_locations, loaded, whole)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores ``value``; whether it is found from now on."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Stores ``values``; whether all are found from now on."""
        return all(self._store(keys, values))

    def _store(self, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        stored = self._pages().put(self._keys(keys), [value.contiguous() for value in values])
        self._log("stored", keys, stored)
        return [outcome in ("stored", "present") for outcome in stored]

    def _log(self, word: str, keys: Sequence[str], outcomes: Sequence[Any]) -> None:
        failed = [one for one in outcomes if isinstance(one, NvmeGpuError) and not (isinstance(one, PageMiss) and one.code == "missing")]
        if failed:
            _LOG.warning("HiCache: %d of %d pages were not %s: %s", len(failed), len(keys), word, listed(map(str, failed)))

    # ---- pages of several pools

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix of which each pool has what its rule asks for."""
        there = self._pages().contains(self._keys(keys))
        pages = leading(there)
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        possible = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            of_pool = self._pages().contains(self._keys(self._names(keys[:pages], transfer.name)))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                last = leading(of_pool)
                allowed = set(range(1, last + 1))
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or []))
                allowed = {end for end in range(1, pages + 1) if all(of_pool[max(0, end - window) : end])}
                last = max(allowed, default=0)
            else:
                raise Usage(f"the pool {transfer.name} has the rule {transfer.hit_policy}", "use another back end for it")
            if last:
                hits[transfer.name] = last
            possible = [end for end in possible if end in allowed]
        return PoolTransferResult(possible[-1] if possible else 0, hits, possible)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Loads the pages of each transfer into its pool."""

        def load(names: list[str], pool: Any, places: list[int]) -> list[bool]:
            pages = [pool.get_dummy_flat_data_page() for _ in names]
            found = self.batch_get(names, pages)
            for place, page in zip(places, found):
                if page is not None:
                    pool.set_from_flat_data_page(place, page)
            return [page is not None for page in found]

        return self._each(transfers, load)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Stores the pages of each transfer from its pool."""

        def store(names: list[str], pool: Any, places: list[int]) -> list[bool]:
            return self._store(names, [pool.get_data_page(place, flat=True) for place in places])

        return self._each(transfers, store)

    def _each(self, transfers: list[Any], move: Callable[[list[str], Any, list[int]], list[bool]]) -> dict[Any, list[bool]]:
        results: dict[Any, list[bool]] = {}
        for transfer in transfers:
            pool, keys = self.registered_pools[transfer.name], list(transfer.keys or [])
            tokens = getattr(pool, "page_size", 1) or 1
            places = transfer.host_indices
            if places is None or places.numel() != len(keys) * tokens:
                count = 0 if places is None else places.numel()
                _LOG.error("HiCache: %d pages of %s come with %d indices of a host pool", len(keys), transfer.name, count)
                results[transfer.name] = [False] * len(keys)
                continue
            names = self._names(keys, transfer.name)
            results[transfer.name] = move(names, pool, [int(place) for place in places[::tokens]]) if keys else []
        return results

    # ---- the store

    def clear(self) -> bool:
        """Removes all pages, durably."""
        self._pages().clear()
        return True

    def get_stats(self) -> None:
        """None: counts are :meth:`PageStore.stats`, in the log at the start."""
        return None

    def close(self) -> None:
        """Closes the area and its device."""
        with self._lock:
            if self._opened is not None:
                close(self._opened)


def _page_bytes(pool: Any) -> int:
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())
