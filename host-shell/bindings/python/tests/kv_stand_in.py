"""Small stand-ins of the modules of vLLM and LMCache that the adapters of nvme_gpu.kv import; engines/ has the real ones."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"


def modules(monkeypatch, names: dict[str, dict[str, Any]]):
    """Puts modules with these names in place of those that are installed, their packages too."""
    for name, members in names.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            if package not in names:
                monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


def adapter(name):
    """Imports the adapter anew, over the modules that are there now."""
    for loaded in [one for one in sys.modules if one.startswith((f"nvme_gpu.kv.{name}", f"nvme_gpu.kv._{name}"))]:
        sys.modules.pop(loaded)
    return importlib.import_module(f"nvme_gpu.kv.{name}")


# ---- vLLM


class LookupResult(enum.Enum):
    MISS, HIT, HIT_PENDING, RETRY = range(4)


class Medium(enum.Enum):
    CPU, STORAGE = "CPU", "STORAGE"


class Locality(enum.Enum):
    LOCAL, REMOTE = "LOCAL", "REMOTE"


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Any
    removed: bool
    locality: Any = None


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self.block_size_bytes, self.tier_type = primary_kv_view.strides[0], tier_type


class LoadStoreSpec:
    pass


class OffloadingManager:
    pass


class OffloadingWorker:
    pass


@dataclass
class PrepareStoreOutput:
    keys_to_store: list[bytes]
    store_spec: Any
    evicted_keys: list[bytes]


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


@dataclass
class OffloadingConnectorMetadata:
    load_jobs: dict[int, Any] = field(default_factory=dict)
    store_jobs: dict[int, Any] = field(default_factory=dict)
    jobs_to_flush: Any = None


@dataclass
class OffloadingWorkerMetadata:
    completed_jobs: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other):
        merged = dict(self.completed_jobs)
        for job, count in other.completed_jobs.items():
            merged[job] = merged.get(job, 0) + count
        return OffloadingWorkerMetadata(merged)


class OffloadingSpec:
    def __init__(self, config):
        self.config, self.blocks_per_chunk = config, config.cache.blocks_per_chunk
        self.kv_events_config = SimpleNamespace(enable_kv_cache_events=config.enable_kv_cache_events)


class SpecFactory:
    @staticmethod
    def get_spec_cls(options):
        return getattr(importlib.import_module(options["spec_module_path"]), options["spec_name"])


class OffloadingConnector:
    """As far as ours uses vLLM's. The test fills ``jobs``, and it stops at a failed transfer, as vLLM does."""

    def __init__(self, vllm_config, role, kv_cache_config):
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        spec = SpecFactory.get_spec_cls(options)(vllm_config.offloading)
        self.connector_scheduler = SimpleNamespace(manager=spec.get_manager()) if role == "scheduler" else None
        self.connector_worker = None if role == "scheduler" else SimpleNamespace(spec=spec, worker=None)
        self.jobs, self.completed, self._loads = OffloadingConnectorMetadata(), [], {}

    def build_connector_meta(self, scheduler_output):
        jobs, self.jobs = self.jobs, OffloadingConnectorMetadata()
        return jobs

    def update_connector_output(self, connector_output):
        meta = connector_output.kv_connector_worker_meta
        self.completed += [] if meta is None else list(meta.completed_jobs)

    def reset_cache(self):
        self.connector_scheduler.manager.reset_cache()
        return True

    def register_kv_caches(self, kv_caches):
        flat = [one.view(one.shape[0], -1) for one in kv_caches.values()]
        rows = [SimpleNamespace(tensor=one, page_size_bytes=one.shape[1]) for one in flat]
        refs = [SimpleNamespace(tensor_idx=at, page_size_bytes=one.page_size_bytes) for at, one in enumerate(rows)]
        groups = self.connector_worker.spec.config.groups
        caches = SimpleNamespace(tensors=rows, group_data_refs=[refs for _ in groups])
        self.connector_worker.worker = self.connector_worker.spec.get_worker(caches)

    def start_load_kv(self, forward_context):
        for number, job in self._connector_metadata.store_jobs.items():
            assert self.connector_worker.worker.submit_store(number, job.src_spec, job.dst_spec)
        for number, job in self._connector_metadata.load_jobs.items():
            self._loads[number] = job.req_id
            assert self.connector_worker.worker.submit_load(number, job.src_spec, job.dst_spec)

    def get_finished(self, finished_req_ids):
        received = set()
        for result in self.connector_worker.worker.get_finished():
            assert result.success
            self.completed.append(result.job_id)
            received |= {self._loads.pop(result.job_id)} if result.job_id in self._loads else set()
        return set(), received

    def get_transfer_results(self, finished_req_ids):
        _, received = self.get_finished(finished_req_ids)
        return SimpleNamespace(finished_recving=received, failed_recving=set())

    def build_connector_worker_meta(self):
        completed, self.completed = self.completed, []
        return OffloadingWorkerMetadata(dict.fromkeys(completed, 1)) if completed else None


def vllm_modules(monkeypatch, version="0.32.0"):
    """vLLM's modules."""
    base = {"Locality": Locality, "LookupResult": LookupResult, "Medium": Medium, "OffloadingEvent": OffloadingEvent,
            "RequestOffloadingContext": SimpleNamespace, "LoadStoreSpec": LoadStoreSpec, "OffloadingManager": OffloadingManager,
            "OffloadingWorker": OffloadingWorker, "PrepareStoreOutput": PrepareStoreOutput, "TransferResult": TransferResult,
            "OffloadingSpec": OffloadingSpec}  # fmt: skip
    tier = {"JobResult": JobResult, "SecondaryTierManager": SecondaryTierManager}
    messages = {"OffloadingConnectorMetadata": OffloadingConnectorMetadata, "OffloadingWorkerMetadata": OffloadingWorkerMetadata}
    modules(monkeypatch, {
        "vllm": {"__version__": version}, "vllm.v1.kv_offload.base": base, "vllm.v1.kv_offload.tiering.base": tier,
        "vllm.v1.kv_offload.factory": {"OffloadingSpecFactory": SpecFactory}, f"{_OFFLOADING}.common": messages,
        f"{_OFFLOADING}_connector": {"OffloadingConnector": OffloadingConnector},
    })  # fmt: skip


# ---- LMCache


class Bitmap:
    def __init__(self, size):
        self.size, self.bits = size, set()

    def set(self, index):
        self.bits.add(index)


class StoreResult(int):
    def __new__(cls, success, nbytes):
        return super().__new__(cls, nbytes if success else -1)


class Notifier:
    made = 100

    def __init__(self):
        Notifier.made += 1
        self.number, self.count, self.is_closed = Notifier.made, 0, False

    def fileno(self):
        return self.number

    def notify(self):
        assert not self.is_closed
        self.count += 1

    def close(self):
        self.is_closed = True


class L2AdapterInterface:
    def __init__(self):
        self.told = []

    def _notify_keys_stored(self, keys, sizes):
        self.told.append(("stored", keys, sizes))

    def _notify_keys_accessed(self, keys):
        self.told.append(("accessed", keys))

    def _notify_keys_deleted(self, keys, sizes):
        self.told.append(("deleted", keys, sizes))


class StoragePlugin:
    def __init__(self, dst_device, config, metadata, local_cpu_backend, loop):
        self.config, self.metadata, self.local_cpu_backend, self.loop = config, metadata, local_cpu_backend, loop


def lmcache_modules(monkeypatch):
    """LMCache's modules."""
    form = SimpleNamespace(KV_2LTD="KV_2LTD", KV_MLA_FMT="KV_MLA_FMT")
    modules(monkeypatch, {
        "lmcache.v1.memory_management": {"MemoryFormat": form},
        "lmcache.v1.storage_backend.abstract_backend": {"StoragePluginInterface": StoragePlugin},
        "lmcache.lmcache_native": {"Bitmap": Bitmap}, "lmcache.v1.platform": {"create_event_notifier": Notifier},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": StoreResult},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    })  # fmt: skip
