"""The adapters of nvme_gpu.kv over stand-ins of the engines' modules; engines/kv_*_on_cpu.py have the real ones."""

from __future__ import annotations

import asyncio
import enum
import math
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import nvme_gpu
from kv_stand_in import Locality, LookupResult, Medium, OffloadingEvent, adapter, lmcache_modules, modules, vllm_modules
from nvme_gpu.kv import _areas

CHUNK = 16_384


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "pages"
    with path.open("wb") as file:
        file.truncate(4 << 20)
    return f"file:{path}"


# ---- vLLM


@pytest.fixture
def vllm(monkeypatch):
    pytest.importorskip("torch")
    vllm_modules(monkeypatch)
    return adapter("vllm")


def spec(replica=0, replicas=1, version=16, **parallel):
    sizes = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "is_parallelism_agnostic": False, **parallel}
    config = SimpleNamespace(
        parallel=SimpleNamespace(data_parallel_index=replica, data_parallel_size=replicas, **sizes),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="NHD",
        groups=[SimpleNamespace(tokens_per_block=version, layer_names=("0", "1"))],
        model=SimpleNamespace(name="meta/" + "long" * 80, dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16),
    )
    events = SimpleNamespace(enable_kv_cache_events=True)
    return SimpleNamespace(config=config, blocks_per_chunk=2, kv_events_config=events)


def view(chunks=8):
    memory = bytearray(chunks * CHUNK)
    for number in range(chunks):
        memory[number * CHUNK : (number + 1) * CHUNK] = bytes([number + 1]) * CHUNK
    return memory, memoryview(memory).cast("B", (chunks, CHUNK))


def job(number, keys, chunks):
    return SimpleNamespace(job_id=number, keys=keys, chunk_ids=chunks)


def ended(tier):
    tier.drain_jobs()
    assert all(one.pending.done() for one in tier._jobs.values())
    return list(tier.get_finished_jobs())


def test_chunks_of_vllm_are_found_after_a_restart(vllm, device):
    memory, chunks = view()
    tier = vllm.NvmeTier(spec(), chunks, "nvme", locality="LOCAL", enable_kv_events=True, device=device, allow_write=True)
    keys = [b"hash %d" % number + bytes(4) for number in range(4)]
    assert tier.lookup(keys[0], None) is LookupResult.MISS and not tier.has_pending_work()
    tier.submit_store(job(1, keys[:3], [0, 1, 2]))
    assert tier.has_pending_work()
    (done,) = ended(tier)
    assert (done.job_id, done.success, done.transfer_bytes, done.successful_keys) == (1, True, 3 * CHUNK, None)
    assert list(tier.take_events()) == [OffloadingEvent(keys[:3], Medium.STORAGE, False, Locality.LOCAL)]
    assert not list(tier.take_events()) and not tier.has_pending_work()
    tier.touch(keys[:1], None)
    assert isinstance(tier.on_new_request(None), SimpleNamespace)
    tier.shutdown()
    tier = vllm.NvmeTier(spec(), chunks, "nvme", device=device, allow_write=True)
    assert [tier.lookup(key, None) for key in keys] == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    tier.submit_load(job(2, keys[:2], [6, 7]))
    tier.submit_load(job(3, keys[2:], [4, 5]))
    whole, partly = sorted(ended(tier), key=lambda one: one.job_id)
    assert whole.success and whole.successful_keys == (keys[0], keys[1]) and whole.transfer_time > 0
    assert not partly.success and partly.successful_keys == (keys[2],) and partly.transfer_bytes == CHUNK
    assert [memory[number * CHUNK] for number in range(8)] == [1, 2, 3, 4, 3, 0, 1, 2]
    tier.shutdown()


def test_another_layout_of_vllm_finds_nothing(vllm, device):
    _, chunks = view()
    for changed in ({"tp_size": 2}, {"version": 32}, {"is_parallelism_agnostic": True}):
        tier = vllm.NvmeTier(spec(), chunks, "nvme", device=device, allow_write=True)
        tier.submit_store(job(1, [b"key"], [0]))
        assert ended(tier)[0].success
        tier.shutdown()
        with pytest.raises(nvme_gpu.NvmeGpuError) as refused:
            vllm.NvmeTier(spec(**changed), chunks, "nvme", device=device, allow_write=True, create="never")
        assert refused.value.code == "mismatch"
        tier = vllm.NvmeTier(spec(**changed), chunks, "nvme", device=device, allow_write=True)
        assert tier.lookup(b"key", None) is LookupResult.MISS
        tier.shutdown()


def test_replicas_of_vllm_have_areas_of_their_own(vllm, device):
    _, chunks = view()
    with pytest.raises(nvme_gpu.Usage, match="nbytes"):
        vllm.NvmeTier(spec(0, 2), chunks, "nvme", device=device, allow_write=True)
    tiers = [vllm.NvmeTier(spec(replica, 2), chunks, "nvme", device=device, nbytes=1 << 20, allow_write=True) for replica in (0, 1)]
    tiers[1].submit_store(job(1, [b"key"], [0]))
    assert ended(tiers[1])[0].success
    assert [tier.lookup(b"key", None) for tier in tiers] == [LookupResult.MISS, LookupResult.HIT]
    for tier in tiers:
        tier.shutdown()


def test_a_drive_that_fails_makes_misses_in_vllm(vllm):
    _, chunks = view()
    device = "sim:mem?size=4MiB&fault=status:0x281@op=read,nth=100-100000"
    tier = vllm.NvmeTier(spec(), chunks, "nvme", device=device)
    keys = [b"key %d" % number for number in range(60)]
    for number, key in enumerate(keys):
        tier.submit_store(job(number, [key], [number % 8]))
    assert all(one.success for one in ended(tier))
    for number, key in enumerate(keys * 2):
        tier.submit_load(job(number, [key], [number % 8]))
        (done,) = ended(tier)
        # A failed key is not asked for again and again, until vLLM has computed and stored it.
        assert done.success == (tier.lookup(key, None) is LookupResult.HIT)
        assert done.success or done.successful_keys is None
    assert tier.lookup(keys[-1], None) is LookupResult.MISS
    tier.submit_store(job(1, keys[-1:], [0]))
    (done,) = ended(tier)
    assert done.success and tier.lookup(keys[-1], None) is LookupResult.HIT
    tier.shutdown()


def test_a_drive_that_fails_takes_no_memory_without_end_in_vllm(vllm, device, monkeypatch):
    monkeypatch.setattr(_areas, "MOST_REFUSED", 10)
    _, chunks = view()
    tier = vllm.NvmeTier(spec(), chunks, "nvme", device=device)

    def timed_out(self, timeout=None):
        raise nvme_gpu.Timeout("the drive did not answer", code="timeout")

    keys = [b"key %d" % number for number in range(60)]
    for number, key in enumerate(keys):
        tier.submit_load(job(number, [key], [number % 8]))
        tier.drain_jobs()
        with monkeypatch.context() as patched:
            patched.setattr(nvme_gpu.PendingPages, "result", timed_out)
            assert not list(tier.get_finished_jobs())[0].success
    assert [key in tier._refused for key in keys] == [False] * 50 + [True] * 10 and len(tier._refused) == 10
    tier._refused.add(keys[50])
    tier._refused.add(keys[0])
    assert [key in tier._refused for key in keys] == [True] + [False] * 49 + [True, False] + [True] * 8
    tier.shutdown()


def test_a_job_of_vllm_that_fails_as_a_whole_is_reported(vllm, device, monkeypatch):
    _, chunks = view()
    tier = vllm.NvmeTier(spec(), chunks, "nvme", device=device)

    def panicked(self, timeout=None):
        raise nvme_gpu.NvmeGpuError("a thread of the library panicked", code="internal")

    tier.submit_store(job(1, [b"key", b"another"], [0, 1]))
    tier.drain_jobs()
    with monkeypatch.context() as patched:
        patched.setattr(nvme_gpu.PendingPages, "result", panicked)
        (done,) = tier.get_finished_jobs()
    assert not done.success and done.transfer_bytes == 0 and not tier.has_pending_work()
    tier.shutdown()


def test_options_of_vllm_that_cannot_be(vllm, device):
    _, chunks = view()
    for wrong, word in (({"devise": 1}, "devise"), ({"device": ""}, "device"), ({"device": 7}, "device"),
                        ({"offset": 4095}, "4096|4,096"), ({"nbytes": 4096}, "room"), ({"create": "no"}, "create")):  # fmt: skip
        with pytest.raises(nvme_gpu.Usage, match=word):
            vllm.NvmeTier(spec(), chunks, "nvme", **{"device": device, "allow_write": True, **wrong})
    with pytest.raises(ValueError):
        vllm.NvmeTier(spec(), chunks, "nvme", locality="near", device=device, allow_write=True)


# ---- SGLang


class PoolName(str, enum.Enum):
    KV, MAMBA = "kv", "mamba"

    def __str__(self):
        return self.value


class PoolHitPolicy(str, enum.Enum):
    ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS = "all_pages", "trailing_pages", "block_groups"


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[Any, int]
    restorable_prefix_pages: Any = None


class HostPool:
    """As far as the adapter uses SGLang's."""

    page_size, layout = 2, "page_first"

    def __init__(self, np, pages, elements):
        torch = pytest.importorskip("torch")
        self.torch, self.dtype = torch, torch.float32
        self.memory = torch.rand(pages, elements)

    def get_dummy_flat_data_page(self):
        return self.torch.zeros(self.memory.shape[1])

    def get_data_page(self, index, flat=True):
        return self.memory[index // self.page_size]

    def set_from_flat_data_page(self, index, page):
        self.memory[index // self.page_size] = page


@pytest.fixture
def sglang(monkeypatch):
    pytest.importorskip("torch")
    members = {"HiCacheStorage": object, "PoolHitPolicy": PoolHitPolicy, "PoolName": PoolName, "PoolTransferResult": PoolTransferResult}
    modules(monkeypatch, {"sglang.srt.mem_cache.hicache_storage": members})
    return adapter("sglang")


def test_formats_of_sglang_that_are_stored_as_bytes(sglang, device):
    """Pools of the host have uint8 for each FP8; those of the GPU have the format."""

    def opened(form, **options):
        pool = HostPool(None, 2, 1024)
        pool.dtype, pool.device_pool = "torch.uint8", SimpleNamespace(dtype=form)
        return pool, hicache(sglang, device, (pool, HostPool(None, 2, 100)), **options)

    with pytest.raises(nvme_gpu.Usage, match="kv_format"):
        opened("torch.uint8")
    for form, found in (("float8_e4m3fn", False), ("float8_e4m3fn", True), ("float8_e5m2", False)):
        pool, storage = opened(form)
        assert storage.exists("key") == found
        assert storage.set("key", pool.get_data_page(0))
        storage.close()


def hicache(sglang, device, pools, tp=(0, 1), mla=False, dcp=(0, 1), **options):
    config = SimpleNamespace(
        dcp_rank=dcp[0], dcp_size=dcp[1], logical_page_size=2 * dcp[1],
        tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, dp_rank=0, is_mla_model=mla,
        is_page_first_layout=True, model_name="model",
        extra_config={"backend_name": "nvme_gpu", "interface_v1": 0, "device": device, "allow_write": True, **options},
    )  # fmt: skip
    storage = sglang.NvmeStorage(config, {})
    storage.register_mem_pool_host(pools[0])
    for name, pool in zip(PoolName, pools):
        storage.register_mem_host_pool_v2(pool, name)
    storage.on_host_pools_registered()
    return storage


def transfer(name, keys, places=None, policy=PoolHitPolicy.ALL_PAGES):
    return SimpleNamespace(name=name, keys=keys, host_indices=places, hit_policy=policy)


def test_pages_of_sglang_are_found_after_a_restart(sglang, device):
    import torch

    pools = HostPool(None, 10, 1024), HostPool(None, 10, 100)
    keys = [f"hash {number}" for number in range(8)]
    storage = hicache(sglang, device, pools)
    assert storage.batch_exists(keys) == 0 and storage.get_stats() is None
    assert storage.batch_set(keys[:5], [pools[0].get_data_page(2 * number) for number in range(5)])
    assert storage.set(keys[0], pools[0].get_data_page(0)) and storage.exists(keys[0]) and not storage.exists(keys[5])
    places = torch.tensor([4, 5, 6, 7])
    assert storage.batch_set_v2([transfer(PoolName.MAMBA, keys[2:4], places)]) == {PoolName.MAMBA: [True, True]}
    storage.close()
    storage = hicache(sglang, device, pools)
    pages = storage.batch_get(keys[:6], [pools[0].get_dummy_flat_data_page() for _ in range(6)])
    assert pages[5] is None and all(torch.equal(page, pools[0].memory[number]) for number, page in enumerate(pages[:5]))
    assert torch.equal(storage.get(keys[1], pools[0].get_dummy_flat_data_page()), pools[0].memory[1])
    found = storage.batch_exists_v2(keys)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages) == (5, {PoolName.KV: 5}, [1, 2, 3, 4, 5])
    trailing = PoolHitPolicy.TRAILING_PAGES
    found = storage.batch_exists_v2(keys, [transfer(PoolName.MAMBA, keys[:1], policy=trailing)])
    assert found == PoolTransferResult(4, {PoolName.KV: 5, PoolName.MAMBA: 4}, [3, 4])
    found = storage.batch_exists_v2(keys, [transfer(PoolName.MAMBA, keys[:2], policy=trailing)])
    assert found == PoolTransferResult(4, {PoolName.KV: 5, PoolName.MAMBA: 4}, [4])
    found = storage.batch_exists_v2(keys, [transfer(PoolName.MAMBA, keys)])
    assert found == PoolTransferResult(0, {PoolName.KV: 5}, [])
    with pytest.raises(nvme_gpu.Usage, match="BLOCK_GROUPS"):
        storage.batch_exists_v2(keys, [transfer(PoolName.MAMBA, keys, policy=PoolHitPolicy.BLOCK_GROUPS)])
    before = pools[1].memory.clone()
    pools[1].memory[2] = 0
    loaded = storage.batch_get_v2([transfer(PoolName.MAMBA, keys[2:5], torch.tensor([4, 5, 6, 7, 8, 9]))])
    assert loaded == {PoolName.MAMBA: [True, True, False]} and torch.equal(pools[1].memory, before)
    wrong = [transfer(PoolName.MAMBA, keys[:1], places), transfer(PoolName.KV, keys[:1])]
    assert storage.batch_get_v2(wrong) == {PoolName.MAMBA: [False], PoolName.KV: [False]}
    assert storage.batch_set_v2([transfer(PoolName.MAMBA, [], places[:0])]) == {PoolName.MAMBA: []}
    with pytest.raises(nvme_gpu.Usage, match="target"):
        storage.batch_get(keys[:2], [])
    assert storage.clear() and storage.batch_exists(keys) == 0
    storage.close()
    storage.close()


def test_ranks_of_sglang(sglang, device):
    pools = HostPool(None, 2, 1024), HostPool(None, 2, 100)
    with pytest.raises(nvme_gpu.Usage, match="replicate"):
        hicache(sglang, device, pools, tp=(0, 2), mla=True)
    with pytest.raises(nvme_gpu.Usage, match="nbytes"):
        hicache(sglang, device, pools, tp=(1, 2))
    with pytest.raises(nvme_gpu.Usage, match="devise"):
        hicache(sglang, device, pools, devise="")
    ranks = [hicache(sglang, device, pools, tp=(rank, 2), nbytes=1 << 20) for rank in (0, 1)]
    assert ranks[1].set("key", pools[0].get_data_page(0))
    assert [rank.exists("key") for rank in ranks] == [False, True]
    with pytest.raises(nvme_gpu.Usage, match="attach"):
        ranks[0].register_mem_host_pool_v2(HostPool(None, 1, 4096), "late")
    for rank in ranks:
        rank.close()


def test_a_drive_that_fails_makes_misses_in_sglang(sglang, caplog):
    pools = HostPool(None, 2, 1024), HostPool(None, 2, 100)
    storage = hicache(sglang, "sim:mem?size=4MiB&fault=status:0x281@op=read,nth=40-100000", pools)
    assert storage.set("key", pools[0].get_data_page(0))
    results = {storage.get("key", pools[0].get_dummy_flat_data_page()) is None for _ in range(50)}
    assert True in results and "were not loaded" in caplog.text
    storage.close()


# ---- LMCache


@dataclass(frozen=True)
class Key:
    number: int

    def to_string(self):
        return f"model@1@0@{self.number:x}@bfloat16"


class Shape(tuple):
    def numel(self):
        return math.prod(self)


@dataclass
class MemoryObject:
    """As far as the adapter uses LMCache's."""

    byte_array: memoryview
    shape: Any = None
    references: int = 1

    def ref_count_up(self):
        self.references += 1

    def ref_count_down(self):
        self.references -= 1


@dataclass
class Cpu:
    made: list[MemoryObject] = field(default_factory=list)
    room: int = 1000
    is_closed: bool = False

    def close(self):
        self.is_closed = True

    def allocate(self, shapes, dtypes, form, busy_loop):
        assert form == "KV_2LTD"
        if len(self.made) >= self.room:
            assert not busy_loop, "it would wait for what its caller holds"
            return None
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes))
        self.made.append(MemoryObject(memoryview(bytearray(size)), shapes))
        return self.made[-1]


class Dtype(str):
    itemsize = 2


METADATA = SimpleNamespace(
    get_shapes=lambda tokens=16: [Shape((2, 4, tokens, 32))], get_dtypes=lambda: [Dtype("torch.bfloat16")],
    use_mla=False, model_name="model", worker_id=0, world_size=1, chunk_size=16,
)  # fmt: skip
TOKEN = 2 * 4 * 32 * 2


@pytest.fixture
def loop():
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(60)
    made.close()


@pytest.fixture
def lmcache(monkeypatch):
    lmcache_modules(monkeypatch)
    return adapter("lmcache")


def plugin(lmcache, device, loop, metadata=METADATA, layerwise=False, **options):
    extra = {"nvme_gpu.device": device, "nvme_gpu.allow_write": True, "storage_plugin.nvme.class_name": "NvmeBackend",
             **{f"nvme_gpu.{name}": value for name, value in options.items()}}  # fmt: skip
    config = SimpleNamespace(use_layerwise=layerwise, extra_config=extra)
    return lmcache.NvmeBackend("cpu", config, metadata, Cpu(), loop)


def chunk(number, tokens=16):
    return MemoryObject(memoryview(bytes([number + 1]) * (TOKEN * tokens)))


def test_chunks_of_lmcache_are_found_after_a_restart(lmcache, device, loop):
    keys, chunks = [Key(number) for number in range(6)], [chunk(number, 16 if number < 3 else 5) for number in range(4)]
    backend, seen = plugin(lmcache, device, loop), []

    def called(key):
        seen.append(key)
        raise RuntimeError("logged")

    for future in backend.batched_submit_put_task(keys[:4], chunks, on_complete_callback=called):
        future.result(60)
    assert seen == keys[:4] and {one.references for one in chunks} == {1} and not backend.exists_in_put_tasks(keys[0])
    assert backend.batched_submit_put_task(keys[:4], chunks) is None
    assert backend.get_allocator_backend() is backend.local_cpu_backend and str(backend) == "NvmeBackend"
    backend.close()
    backend = plugin(lmcache, device, loop)
    assert backend.contains(keys[3]) and not backend.contains(keys[4]) and backend.batched_contains(keys) == 4
    found = backend.batched_get_blocking(keys)
    assert [None if one is None else bytes(one.byte_array) for one in found] == [bytes(one.byte_array) for one in chunks] + [None] * 2
    assert found[3].shape == [(2, 4, 5, 32)]
    assert bytes(backend.get_blocking(keys[1]).byte_array) == bytes(chunks[1].byte_array) and backend.get_blocking(keys[5]) is None

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    assert run(backend.batched_async_contains("id", keys)) == 4
    assert run(backend.batched_async_contains("id", keys, True)) == 4 and len(backend._lookups) == 1
    assert len(run(backend.batched_get_non_blocking("id", [keys[0], keys[5], keys[1]]))) == 1
    # What comes behind a chunk that is not there is given back, and the pins of the lookup are.
    assert backend.local_cpu_backend.made[-1].references == 0 and not backend._lookups
    for number in range(1500):
        run(backend.batched_async_contains(f"aborted {number}", keys, True))
    assert len(backend._lookups) == 1024
    assert backend.contains(keys[0], pin=True) and backend.batched_contains(keys, pin=True) == 4
    assert backend.unpin(keys[0]) and backend.unpin(keys[0]) and not backend.unpin(keys[0]) and not backend.pin(keys[5])
    backend.touch_cache()
    assert backend.remove(keys[0]) and not backend.remove(keys[0]) and backend.batched_contains(keys) == 0
    # A request that has more chunks than there is memory does not wait for itself.
    backend.local_cpu_backend.room = len(backend.local_cpu_backend.made) + 1
    assert [one is not None for one in backend.batched_get_blocking(keys[1:3])] == [True, False]
    backend.close()
    assert not backend.contains(keys[0]) and not backend.pin(keys[0]) and not backend.remove(keys[0])
    assert backend.batched_submit_put_task(keys, chunks) is None and backend.batched_get_blocking(keys[:2]) == [None, None]
    assert run(backend.batched_get_non_blocking("id", keys)) == [] and run(backend.batched_async_contains("id", keys, True)) == 0
    backend.close()


def test_lmcache_frees_its_memory_after_the_last_transfer(lmcache, loop):
    """LMCache closes its memory first; its buffers do not own what they point to."""
    backend = plugin(lmcache, "sim:mem?size=4MiB&latency=200ms", loop)
    memory, chunks = backend.local_cpu_backend, [chunk(number) for number in range(8)]
    futures = backend.batched_submit_put_task([Key(number) for number in range(8)], chunks)
    memory.close()
    assert memory.is_closed and not any(not move.pending.done() for move in backend._moves)
    futures[0].result(60)
    assert {one.references for one in chunks} == {1} and not backend._moves
    backend.close()


def test_a_wait_of_lmcache_that_is_ended_gives_memory_back_later(lmcache, loop, monkeypatch):
    backend = plugin(lmcache, "sim:mem?size=4MiB&latency=100ms", loop)
    backend.batched_submit_put_task([Key(1)], [chunk(1)])[0].result(60)

    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(nvme_gpu.PendingPages, "result", interrupted)
        backend.get_blocking(Key(1))
    (held,) = backend.local_cpu_backend.made
    assert held.references == 1, "a thread may still write it"
    coroutine = backend.batched_get_non_blocking("id", [Key(1)])
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    while len(backend._moves) < 2:
        pass
    future.cancel()
    backend.close()
    assert held.references == 0 and backend.local_cpu_backend.made[1].references <= 1


def test_memory_of_lmcache_is_given_back_once(lmcache, device, loop):
    """While close() waits for a transfer, another one ends and finds what the first has left."""
    backend = plugin(lmcache, device, loop)

    class Pending:
        def done(self):
            return True

        def exception(self):
            backend._end(lmcache._Move([]), [])

    one = lmcache._Move([chunk(1)])
    one.left, one.pending = one.objs, Pending()
    backend._moves.add(one)
    backend.close()
    assert one.objs[0].references == 0 and not backend._moves


def test_a_damaged_chunk_is_a_miss_in_lmcache(lmcache, device, loop, tmp_path, caplog):
    backend = plugin(lmcache, device, loop)
    one = chunk(0xA6)
    backend.batched_submit_put_task([Key(1)], [one])[0].result(60)
    data = (tmp_path / "pages").read_bytes()
    with (tmp_path / "pages").open("r+b") as file:
        file.seek(data.index(bytes(one.byte_array)) + 5)
        file.write(b"x")
    assert backend.contains(Key(1)) and backend.get_blocking(Key(1)) is None and not backend.contains(Key(1))
    assert backend.local_cpu_backend.made[0].references == 0 and "checksum" in caplog.text
    backend.batched_submit_put_task([Key(2)], [MemoryObject(memoryview(b"7 bytes"))])[0].result(60)
    assert backend.get_blocking(Key(2)) is None and "7 bytes" in caplog.text
    backend.close()


def test_a_chunk_whose_length_has_changed_is_a_miss_in_lmcache(lmcache, device, loop, monkeypatch):
    """As of another process of a shared area, between the lookup and the load."""
    backend = plugin(lmcache, device, loop)
    backend.batched_submit_put_task([Key(1)], [chunk(1, 5)])[0].result(60)
    monkeypatch.setattr(nvme_gpu.PageStore, "lengths", lambda self, keys: [TOKEN * 16 for _ in keys])
    assert backend.get_blocking(Key(1)) is None
    coroutine = backend.batched_get_non_blocking("id", [Key(1)])
    assert asyncio.run_coroutine_threadsafe(coroutine, loop).result(60) == []
    assert [one.references for one in backend.local_cpu_backend.made] == [0, 0]
    backend.close()


def of(**changed):
    return SimpleNamespace(**{**vars(METADATA), **changed})


def test_the_format_of_bytes_is_in_the_fingerprint(lmcache, device, loop):
    """LMCache and vLLM store each FP8 as uint8."""
    fp8 = of(get_dtypes=lambda: [Dtype("torch.uint8")])
    backend = plugin(lmcache, device, loop, fp8, kv_format="fp8_e4m3")
    backend.batched_submit_put_task([Key(1)], [chunk(1)])[0].result(60)
    backend.close()
    for form, found in (("fp8_e4m3", True), ("fp8_e5m2", False)):
        backend = plugin(lmcache, device, loop, fp8, kv_format=form)
        assert backend.contains(Key(1)) == found
        backend.close()


def test_options_of_lmcache_that_cannot_be(lmcache, device, loop, caplog):
    for word, call in (
        ("devise", lambda: plugin(lmcache, device, loop, devise=1)),
        ("layer by layer", lambda: plugin(lmcache, device, loop, layerwise=True)),
        ("no configuration", lambda: lmcache.NvmeBackend()),
        ("kv_format", lambda: plugin(lmcache, device, loop, of(get_dtypes=lambda: [Dtype("torch.uint8")]))),
    ):
        with pytest.raises(nvme_gpu.Usage, match=word):
            call()
    # What shows later is logged once, and LMCache goes on without the pages.
    broken = plugin(lmcache, device, loop, of(world_size=2))
    assert not broken.contains(Key(1)) and broken.batched_contains([Key(1)]) == 0 and "nbytes" in broken._failure
    assert caplog.text.count("2 ranks") == 1
    backend = plugin(lmcache, device, loop)
    assert backend.batched_submit_put_task([], []) is None
    with pytest.raises(TypeError):
        backend.batched_submit_put_task([Key(1)], [MemoryObject(None)])
    assert not backend.exists_in_put_tasks(Key(1))
    backend.close()
