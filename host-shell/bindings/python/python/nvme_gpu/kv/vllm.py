"""vLLM's prefix cache on NVMe, chosen by options alone. Pages between its tensors and the drive:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "NvmeOffloadingConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "nvme_gpu.kv.vllm", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"spec_name": "NvmeOffloadingSpec", "spec_module_path": "nvme_gpu.kv.vllm",
        "device": "file:/nvme/pages"}}'

Or a secondary tier of its own connector, behind its memory of the host:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "NvmeTier", "module_path": "nvme_gpu.kv.vllm", "device": "file:/nvme/pages"}]}}'

Its options are those of a tier of vLLM (``locality``, ``enable_kv_events``, ``backpressure``) and :class:`AreaOptions`: ``device``, ``offset``,
``nbytes``, ``revision``, ``create``, ``shared``, ``directory``, ``allow_write``, ``queues``, ``depth``, ``timeout_ms``.
Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from .._errors import NvmeGpuError, PageMiss, listed
from .._pages import PendingPages
from ._areas import AreaOptions, RefusedKeys, close, digest, versions
from ._vllm_connector import NvmeOffloadingConnector, NvmeOffloadingSpec

__all__ = ["NvmeOffloadingConnector", "NvmeOffloadingSpec", "NvmeTier"]

_LOG = logging.getLogger("nvme_gpu")


class _Job(NamedTuple):
    keys: list[bytes]
    pending: PendingPages
    is_load: bool
    begun: float


class NvmeTier(SecondaryTierManager):
    """Chunks of vLLM's CPU tier on a drive. Methods are called by the scheduler's thread. ``drain_jobs`` and ``shutdown`` wait
    for the drive; ``lookup`` and ``touch`` do not, but in a shared area for the answer of its owner, two seconds at most.
    Where the owner has ended, one that becomes the owner waits for the device to open and for the recovery, too."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._has_events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] = []
        config = offloading_spec.config
        parallel = config.parallel
        portable = parallel.is_parallelism_agnostic or config.replicated_layout
        sizes = {name: getattr(parallel, f"{name}_size") for name in ("tp", "pp", "pcp", "dcp")}
        groups = [[group.tokens_per_block, list(group.layer_names)] for group in config.groups]
        layout = {
            "groups": groups,
            "canonical": config.canonical_layout,
            "order": config.kv_cache_layout,
            "replicated": config.replicated_layout,
            "versions": versions("vllm"),
        }
        replicas = 1 if parallel.data_parallel_size is None else parallel.data_parallel_size
        # A memory view of several dimensions has no rows.
        self._view = primary_kv_view.cast("B")
        area = AreaOptions.of(options, "the secondary tier")
        self._pages = area.open(
            parallel.data_parallel_index or 0,
            replicas,
            self.block_size_bytes,
            model=config.model.name,
            dtype=area.dtype(config.model.dtype),
            layout=digest(layout),
            block_tokens=config.cache.tokens_per_hash * offloading_spec.blocks_per_chunk,
            parallel_rank="any" if portable else digest(sizes),
            hash_algorithm="vllm",
            seed=os.environ.get("PYTHONHASHSEED", ""),
        )
        self._jobs: dict[int, _Job] = {}
        self._refused = RefusedKeys()
        """A store of the key removes it, since vLLM stores what it has computed in place of a miss."""
        _LOG.info("%s: %s", tier_type, self._pages.stats())

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS, from the index in memory."""
        if key in self._refused:
            return LookupResult.MISS
        found = self._pages.contains(self._pages.keys([key]))[0]
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Starts to write chunks of the CPU tier to the drive."""
        self._submit(job_metadata, False)

    def submit_load(self, job_metadata: Any) -> None:
        """Starts to read chunks into the CPU tier."""
        self._submit(job_metadata, True)

    def _submit(self, job: Any, is_load: bool) -> None:
        keys = [bytes(key) for key in job.keys]
        size = self.block_size_bytes
        chunks = [self._view[int(chunk) * size : (int(chunk) + 1) * size] for chunk in job.chunk_ids]
        move = self._pages.load_async if is_load else self._pages.store_async
        begun = time.monotonic()
        self._jobs[job.job_id] = _Job(keys, move(self._pages.keys(keys), chunks), is_load, begun)

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that have ended since the last call."""
        ended = [number for number, job in self._jobs.items() if job.pending.done()]
        return [self._result(number, self._jobs.pop(number)) for number in ended]

    def _result(self, number: int, job: _Job) -> Any:
        try:
            outcomes = job.pending.result()
        except NvmeGpuError as error:
            # Of the whole job, as of a thread that panicked: vLLM gives its chunks back then.
            outcomes = [error] * len(job.keys)
        size = self.block_size_bytes
        good = [key for key, outcome in zip(job.keys, outcomes) if outcome in ("stored", "present", "in_progress", size)]
        failed = [(key, outcome) for key, outcome in zip(job.keys, outcomes) if isinstance(outcome, NvmeGpuError)]
        if job.is_load:
            for key, outcome in failed:
                if not isinstance(outcome, PageMiss):
                    self._refused.add(key)
        else:
            found = [key for key, outcome in zip(job.keys, outcomes) if outcome in ("stored", "present")]
            for key in found:
                self._refused.discard(key)
            if self._has_events and len(found) == len(job.keys):
                event = OffloadingEvent(keys=job.keys, medium=self.medium, removed=False, locality=self.locality)
                self._events.append(event)
        if failed:
            word = "loaded" if job.is_load else "stored"
            _LOG.warning(
                "%s: %d of %d chunks were not %s: %s",
                self.tier_type,
                len(job.keys) - len(good),
                len(job.keys),
                word,
                listed(str(error) for _, error in failed),
            )
        return JobResult(
            job_id=number,
            success=len(good) == len(job.keys),
            successful_keys=(tuple(good) or None) if job.is_load else None,
            transfer_time=time.monotonic() - job.begun,
            transfer_bytes=sum(outcome in ("stored", size) for outcome in outcomes) * size,
        )

    def take_events(self) -> Iterable[Any]:
        """What was stored since the last call, with ``enable_kv_events`` and events of vLLM's own."""
        events, self._events = self._events, []
        return events

    def has_pending_work(self) -> bool:
        """True while jobs are under way: vLLM asks for their results then."""
        return bool(self._jobs)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Makes the chunks the last to make room."""
        self._pages.touch(self._pages.keys(keys))

    def on_new_request(self, req_context: Any) -> Any:
        """No wish of its own."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Waits until all jobs have ended; their results are those of the next ``get_finished_jobs``."""
        for job in list(self._jobs.values()):
            job.pending.exception()

    def shutdown(self) -> None:
        """Waits for the jobs, and closes the store."""
        self.drain_jobs()
        self._jobs.clear()
        # vLLM frees the memory next, and cannot while a view of it is there.
        self._view = memoryview(b"")
        close(self._pages)
