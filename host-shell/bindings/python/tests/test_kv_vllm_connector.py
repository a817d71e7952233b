"""vLLM's offloading connector over pages, in stand-ins of vLLM's modules: lookups and pins by messages, jobs, what fails.

NVME_GPU_TEST_DEVICE=cuda puts keys and values on a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

import nvme_gpu
from kv_stand_in import LookupResult, adapter, vllm_modules

torch = pytest.importorskip("torch")

DEVICE = os.environ.get("NVME_GPU_TEST_DEVICE", "cpu")
PAGE = 1024
BLOCKS = 40


@pytest.fixture
def vllm(monkeypatch):
    vllm_modules(monkeypatch)
    return adapter("vllm")


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "pages"
    with path.open("wb") as file:
        file.truncate(4 << 20)
    return f"file:{path}"


def config(device, rank=0, ranks=1, groups=1, chunk=1, **options):
    sizes = {"tp_size": ranks, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "world_size": ranks, "rank": rank}
    extra = {"spec_name": "NvmeOffloadingSpec", "spec_module_path": "nvme_gpu.kv.vllm", "device": device,
             "allow_write": True, **options}  # fmt: skip
    offloading = SimpleNamespace(
        parallel=SimpleNamespace(data_parallel_index=0, data_parallel_size=1, **sizes),
        canonical_layout=options.get("canonical_layout", False),
        kv_cache_layout="LBHNC",
        groups=[SimpleNamespace(group_id=number, tokens_per_block=16, layer_names=("0", "1")) for number in range(groups)],
        model=SimpleNamespace(name="model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=chunk),
        extra_config=extra,
        enable_kv_cache_events=True,
    )
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    return SimpleNamespace(
        kv_transfer_config=transfer,
        offloading=offloading,
        model_config=SimpleNamespace(revision=None),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
    )


class Engine:
    """A scheduler and workers, which step by step do what a test says."""

    def __init__(self, vllm, device, ranks=1, groups=1, layers=2, page=PAGE, form=(-1,), **options):
        caches = SimpleNamespace(kv_cache_groups=[None] * groups, num_blocks=BLOCKS)
        if ranks > 1:
            options.setdefault("nbytes", 1 << 20)
        made = [config(device, rank, ranks, groups, **options) for rank in range(ranks)]
        connector = vllm.NvmeOffloadingConnector
        self.scheduler = connector(made[0], "scheduler", caches)
        self.workers = [connector(one, "worker", caches) for one in made]
        self.tensors = []
        for rank, worker in enumerate(self.workers):
            flat = [torch.randint(-128, 127, (BLOCKS, page), dtype=torch.int8).to(DEVICE) for _ in range(layers)]
            worker.register_kv_caches({f"layer {number}": one.view(BLOCKS, *form) for number, one in enumerate(flat)})
            self.tensors.append(flat)
        self.manager = self.scheduler._manager()
        self.numbers, self.failed_blocks, self.failed, self.received = 0, set(), set(), set()

    def step(self, waits=True):
        message = self.scheduler.build_connector_meta(None)
        merged = None
        for worker in self.workers:
            worker._connector_metadata = message
            worker.start_load_kv(None)
            if waits:
                worker._worker().wait(list(worker._worker()._jobs))
            results = worker.get_transfer_results(set())
            self.received |= results.finished_recving
            self.failed |= results.failed_recving
            self.failed_blocks |= worker.get_block_ids_with_load_errors()
            answer = worker.build_connector_worker_meta()
            merged = answer if merged is None else merged if answer is None else merged.aggregate(answer)
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=merged))
        return merged

    def look(self, keys, request="request"):
        context = SimpleNamespace(req_id=request)
        if LookupResult.RETRY in [self.manager.lookup(key, context) for key in keys]:
            assert self.manager.has_pending_work()
            self.step()
        return [self.manager.lookup(key, context) is LookupResult.HIT for key in keys]

    def blocks(self, numbers, groups=1, first=0):
        sizes = [len(numbers)] + [0] * (groups - 1)
        return SimpleNamespace(block_ids=numbers, group_sizes=sizes, block_indices=[first] * groups)

    def store(self, keys, blocks, request="request", **options):
        context = SimpleNamespace(req_id=request)
        output = self.manager.prepare_store(keys, context)
        job = SimpleNamespace(req_id=request, src_spec=self.blocks(blocks, **options), dst_spec=output.store_spec)
        self.scheduler.jobs.store_jobs[self.numbers] = job
        self.numbers += 1
        self.step()
        self.manager.complete_store(keys, context)

    def load(self, keys, blocks, request="request", waits=True, **options):
        context = SimpleNamespace(req_id=request)
        spec = self.manager.prepare_load(keys, context)
        job = SimpleNamespace(req_id=request, src_spec=spec, dst_spec=self.blocks(blocks, **options))
        self.scheduler.jobs.load_jobs[self.numbers] = job
        self.numbers += 1
        self.step(waits)
        if waits:
            self.manager.complete_load(keys, context)

    def content(self, blocks, rank=0):
        return [b"".join(one[block].cpu().numpy().tobytes() for one in self.tensors[rank]) for block in blocks]

    def pinned(self):
        return [len(worker._worker()._pins) for worker in self.workers]

    def close(self):
        for worker in self.workers:
            worker._worker().shutdown()


def key(number, group=0):
    return b"hash %d" % number + group.to_bytes(4, "big")


KEYS = [key(number) for number in range(8)]


@pytest.mark.parametrize("layers", [1, 2], ids=["in_place", "in_pieces"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_pages_are_found_after_a_restart(vllm, device, ranks, layers):
    engine = Engine(vllm, device, ranks, layers=layers)
    assert engine.look(KEYS) == [False] * 8
    engine.store(KEYS[:3], [4, 5, 6])
    (event,) = engine.manager.take_events()
    assert event.keys == KEYS[:3] and not event.removed
    kept = [engine.content([4, 5, 6], rank) for rank in range(ranks)]
    engine.close()
    engine = Engine(vllm, device, ranks, layers=layers)
    assert engine.look(KEYS[:4]) == [True, True, True, False] and engine.pinned() == [3] * ranks
    engine.load(KEYS[:3], [20, 21, 22])
    assert engine.received == {"request"} and not engine.failed_blocks
    assert [engine.content([20, 21, 22], rank) for rank in range(ranks)] == kept
    engine.step()
    assert engine.pinned() == [0] * ranks
    engine.close()


def test_pages_that_were_found_stay_until_they_are_loaded(vllm, device):
    """A lookup is an answer for a later step: what it found must not make room in between."""
    engine = Engine(vllm, device)
    engine.store(KEYS[:2], [1, 2])
    assert engine.look(KEYS[:2]) == [True, True]
    capacity = engine.workers[0]._worker()._pages.stats()["capacity"]
    many = [key(number) for number in range(100, 100 + capacity + 10)]
    for number in range(0, len(many), 30):
        engine.store(many[number : number + 30], [number % 9 for number in range(len(many[number : number + 30]))], "other")
    engine.load(KEYS[:2], [20, 21])
    assert engine.content([20, 21]) == engine.content([1, 2]) and not engine.failed_blocks
    engine.close()


def spoil(device, page):
    path = device[len("file:") :]
    with open(path, "r+b") as file:
        data = file.read()
        at = data.index(page)
        file.seek(at + 9)
        file.write(bytes([data[at + 9] ^ 1]))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_spoilt_page_is_computed_again(vllm, device, groups):
    engine = Engine(vllm, device, groups=groups)
    engine.store(KEYS[:3], [4, 5, 6], groups=groups)
    spoil(device, engine.content([5])[0])
    assert engine.look(KEYS[:3], "first") == [True] * 3 and engine.look(KEYS[:3], "second") == [True] * 3
    engine.load(KEYS[:3], [20, 21, 22], "first", groups=groups)
    # Block numbers of several groups overlap, and the whole request is computed.
    assert (engine.failed_blocks, engine.failed) == ((set(), {"first"}) if groups > 1 else ({21}, set()))
    assert engine.received == {"first"} and engine.content([20, 22]) == engine.content([4, 6])
    # Another request that had found the page is not told so any more.
    assert engine.look(KEYS[:3], "second") == [True, False, True]
    engine.store(KEYS[1:2], [5], groups=groups)
    engine.manager.on_request_finished(SimpleNamespace(req_id="second"))
    assert engine.look(KEYS[:3], "third") == [True] * 3
    engine.close()


def test_a_failed_store_is_a_miss_and_no_event(vllm):
    engine = Engine(vllm, "sim:mem?size=4MiB&fault=status:0x280@op=write,nth=40-100000")
    stored = []
    for number in range(40):
        engine.store([key(number)], [1], f"{number}")
        stored.append(bool(engine.manager.take_events()))
        assert engine.look([key(number)], f"{number}") == [stored[-1]]
        engine.manager.on_request_finished(SimpleNamespace(req_id=f"{number}"))
    assert stored[0] and not stored[-1]
    engine.close()


def test_a_page_that_one_rank_has_not_is_a_miss(vllm, device):
    engine = Engine(vllm, device, 2)
    engine.store(KEYS[:2], [1, 2])
    pages = engine.workers[1]._worker()._pages
    assert pages.remove(pages.keys(KEYS[1:2])) == 1
    assert engine.look(KEYS[:2]) == [True, False]
    engine.step()
    assert engine.pinned() == [1, 1]
    engine.close()


def test_a_page_that_cannot_be_read_is_asked_for_once(vllm):
    engine = Engine(vllm, "sim:mem?size=4MiB&fault=status:0x281@op=read,nth=60-100000")
    engine.store(KEYS[:1], [1])
    results = []
    for number in range(80):
        found = engine.look(KEYS[:1], f"{number}") == [True]
        if found:
            engine.failed_blocks.clear()
            engine.load(KEYS[:1], [20], f"{number}")
            found = not engine.failed_blocks
        results.append(found)
        engine.manager.on_request_finished(SimpleNamespace(req_id=f"{number}"))
    assert results[0] and not results[-1]
    assert not engine.look(KEYS[:1], "last")[0]
    engine.store(KEYS[:1], [1])
    assert engine.look(KEYS[:1], "once more") == [True]
    engine.close()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_drive_that_never_answers_fails_the_job(vllm, op):
    engine = Engine(vllm, f"sim:mem?size=4MiB&fault=drop@op={op},nth=60-100000", timeout_ms=1000)
    found = []
    for number in range(40):
        engine.store([key(number)], [1], f"{number}")
        found.append(engine.look([key(number)], f"{number}") == [True])
        if found[-1]:
            engine.failed_blocks.clear()
            engine.load([key(number)], [20], f"{number}")
            found[-1] = not engine.failed_blocks
        if not found[-1]:
            break
    assert found[0] and not found[-1]
    # What could not be read may be right, and is not asked for again and again.
    assert engine.look([key(number)], "again") == [False]
    engine.close()


def test_a_read_while_the_same_key_is_stored_is_whole_or_a_miss(vllm):
    engine = Engine(vllm, "sim:mem?size=4MiB&latency=5ms")
    engine.tensors[0][0][1] = 7
    engine.tensors[0][1][1] = 7
    context = SimpleNamespace(req_id="writer")
    spec = engine.manager.prepare_store(KEYS[:1], context).store_spec
    engine.scheduler.jobs.store_jobs[0] = SimpleNamespace(req_id="writer", src_spec=engine.blocks([1]), dst_spec=spec)
    engine.numbers = 1
    engine.load(KEYS[:1], [20], "reader")
    assert 20 in engine.failed_blocks or engine.content([20]) == engine.content([1])
    engine.close()


def test_a_reset_removes_pages_and_drops_stores_of_before(vllm, device):
    engine = Engine(vllm, device)
    engine.store(KEYS[:2], [1, 2])
    assert engine.look(KEYS[:2]) == [True, True]
    late = SimpleNamespace(req_id="late", src_spec=engine.blocks([3]), dst_spec=engine.manager.prepare_store(KEYS[2:3], None).store_spec)
    engine.scheduler.jobs.store_jobs[1] = late
    held = engine.scheduler.build_connector_meta(None)
    assert engine.scheduler.reset_cache() and engine.manager.has_pending_work()
    # The store of before comes with the message of the reset, as one that vLLM defers by a step does.
    engine.scheduler.jobs = held
    assert engine.look(KEYS[:3], "next") == [False] * 3 and not engine.manager.has_pending_work()
    assert engine.look(KEYS[:3], "later") == [False] * 3
    engine.numbers = 2
    engine.store(KEYS[:1], [1], "again")
    engine.manager.on_request_finished(SimpleNamespace(req_id="next"))
    engine.manager.on_request_finished(SimpleNamespace(req_id="later"))
    assert engine.look(KEYS[:3], "last") == [True, False, False]
    engine.close()


def test_a_reset_that_fails_ends_the_use_of_the_pages(vllm, device, monkeypatch):
    engine = Engine(vllm, device)
    engine.store(KEYS[:2], [1, 2])

    def failed(self):
        raise nvme_gpu.NvmeGpuError("the drive failed", code="device")

    monkeypatch.setattr(nvme_gpu.PageStore, "clear", failed)
    engine.scheduler.reset_cache()
    assert engine.look(KEYS[:2]) == [False, False]
    engine.store(KEYS[2:3], [3])
    assert engine.look(KEYS[2:3]) == [False]
    engine.close()


def test_answers_of_before_a_reset_do_not_count(vllm, device):
    engine = Engine(vllm, device)
    engine.store(KEYS[:1], [1])
    context = SimpleNamespace(req_id="request")
    assert engine.manager.lookup(KEYS[0], context) is LookupResult.RETRY
    message = engine.scheduler.build_connector_meta(None)
    worker = engine.workers[0]
    worker._connector_metadata = message
    worker.start_load_kv(None)
    worker.get_finished(set())
    answer = worker.build_connector_worker_meta()
    engine.scheduler.reset_cache()
    assert engine.manager.lookup(KEYS[0], context) is LookupResult.RETRY
    engine.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=answer))
    assert engine.manager.lookup(KEYS[0], context) is LookupResult.RETRY
    assert engine.look(KEYS[:1]) == [False]
    engine.close()


def test_a_request_that_is_aborted_lets_go(vllm, device):
    engine = Engine(vllm, device)
    engine.store(KEYS[:3], [1, 2, 3])
    aborted = SimpleNamespace(req_id="aborted")
    assert engine.manager.lookup(KEYS[0], aborted) is LookupResult.RETRY
    engine.manager.on_request_finished(aborted)
    engine.step()
    engine.step()
    assert engine.pinned() == [0]
    # What is being loaded stays, and goes when the load has ended.
    assert engine.look(KEYS[:3], "loads") == [True] * 3
    engine.load(KEYS[:2], [20, 21], "loads", waits=False)
    engine.manager.on_request_finished(SimpleNamespace(req_id="loads"))
    engine.step()
    assert engine.pinned() == [2]
    engine.manager.complete_load(KEYS[:2], SimpleNamespace(req_id="loads"))
    engine.step()
    assert engine.pinned() == [0] and not engine.manager._held and not engine.manager._holders
    # A request that is computed asks no more.
    assert engine.look(KEYS[:3], "runs") == [True] * 3
    engine.manager.on_schedule_end(SimpleNamespace(new_req_ids=["runs"]))
    engine.step()
    assert engine.pinned() == [0]
    engine.close()


def test_chunks_of_several_blocks(vllm, device):
    engine = Engine(vllm, device, chunk=2)
    engine.store(KEYS[:2], [1, 2, 3, 4])
    assert engine.look(KEYS[:2]) == [True, True]
    before = engine.content([19])
    engine.load(KEYS[:2], [20, 21, 22], first=1)
    assert engine.content([20, 21, 22]) == engine.content([2, 3, 4]) and engine.content([19]) == before
    # A chunk of which blocks are missing is not stored, nor are chunks that cannot be told apart.
    engine.store(KEYS[2:4], [5, 6, 7], first=1)
    assert engine.look(KEYS[2:4]) == [False, True]
    engine.store(KEYS[4:6], [1, 2, 3])
    assert engine.look(KEYS[4:6]) == [False, False]
    engine.close()


def test_what_a_load_has_no_block_for_shares_no_memory(vllm, device):
    """A GPU writes all pieces of a load at once, and a load whose pieces overlap is refused."""
    engine = Engine(vllm, device, chunk=2)
    layout = engine.workers[0]._worker()._layout
    places, refused = layout.places(KEYS[:2], engine.blocks([20, 21], first=1), True)
    assert [place.blocks for place in places] == [[None, 20], [21, None]] and not refused
    pieces = [piece for place in places for piece in layout.pieces(place)]
    assert len({piece.data_ptr() for piece in pieces}) == len(pieces) == 8
    engine.close()


def test_another_layout_size_or_rank_is_refused(vllm, device):
    engine = Engine(vllm, device)
    engine.store(KEYS[:1], [1])
    engine.close()
    for changed in ({"ranks": 2}, {"layers": 4, "page": PAGE // 2}, {"chunk": 2}, {"revision": "2"}, {"groups": 2},
                    {"form": (2, 16, PAGE // 32)}):  # fmt: skip
        with pytest.raises(nvme_gpu.NvmeGpuError) as refused:
            Engine(vllm, device, create="never", **changed)
        assert refused.value.code == "mismatch"
    engine = Engine(vllm, device, create="never")
    assert engine.look(KEYS[:1]) == [True]
    engine.close()


def test_a_page_of_another_group_is_a_miss(vllm, device):
    engine = Engine(vllm, device, groups=2)
    first, second = key(1, 0), key(1, 1)
    engine.store([first], [1], groups=2)
    assert engine.look([first, second]) == [True, False]
    context = SimpleNamespace(req_id="request")
    spec = engine.manager.prepare_store([second], context).store_spec
    blocks = SimpleNamespace(block_ids=[2], group_sizes=[0, 1], block_indices=[0, 0])
    engine.scheduler.jobs.store_jobs[engine.numbers] = SimpleNamespace(req_id="request", src_spec=blocks, dst_spec=spec)
    engine.numbers += 1
    engine.step()
    engine.manager.complete_store([second], context)
    assert engine.look([first, second]) == [True, True]
    engine.load([first], [20], groups=2)
    assert engine.content([20]) == engine.content([1]) and not engine.failed
    engine.close()


def test_the_area_of_another_rank_is_refused(vllm, device):
    engine = Engine(vllm, device, 2)
    engine.store(KEYS[:1], [1])
    engine.close()
    path = device[len("file:") :]
    with open(path, "r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(data[1 << 20 : 2 << 20] + data[: 1 << 20])
    with pytest.raises(nvme_gpu.NvmeGpuError) as refused:
        Engine(vllm, device, 2, create="never")
    assert refused.value.code == "mismatch"


def test_ranks_share_an_area(vllm, device, tmp_path):
    if DEVICE != "cpu":
        with pytest.raises(nvme_gpu.Usage, match="takes no memory of a GPU"):
            Engine(vllm, device, 2, shared=True, directory=str(tmp_path), nbytes=2 << 20)
        return
    engine = Engine(vllm, device, 2, shared=True, directory=str(tmp_path), nbytes=2 << 20)
    engine.store(KEYS[:2], [1, 2])
    assert engine.look(KEYS[:2]) == [True, True]
    engine.load(KEYS[:2], [20, 21])
    assert all(engine.content([20, 21], rank) == engine.content([1, 2], rank) for rank in (0, 1))
    engine.close()


def test_what_cannot_be_is_refused_by_name(vllm, device, monkeypatch):
    for wrong, word in (({"devise": 1}, "devise"), ({"canonical_layout": True}, "canonical_layout"), ({"ranks": 2, "nbytes": None}, "nbytes")):
        with pytest.raises(nvme_gpu.Usage, match=word):
            Engine(vllm, device, **wrong)
    with pytest.raises(nvme_gpu.Usage, match="failed transfers"):
        vllm.NvmeOffloadingSpec(config(device).offloading)
    with pytest.raises(nvme_gpu.Usage, match="spec_name"):
        monkeypatch.setattr(vllm, "Another", object, raising=False)
        Engine(vllm, device, spec_name="Another")
    vllm_modules(monkeypatch, "0.34.0")
    with pytest.raises(nvme_gpu.Usage, match="0.34.0"):
        Engine(adapter("vllm"), device)


def test_the_signatures_of_vllm_0_33(vllm, device):
    engine = Engine(vllm, device)
    with engine.manager.lock():
        assert engine.manager.lookup(KEYS[0], SimpleNamespace(req_id="request")) is LookupResult.RETRY
    worker = engine.workers[0]._worker()
    assert worker.submit_load(7, engine.manager.prepare_load([], SimpleNamespace(req_id="request")), engine.blocks([]), expedited=True)
    closed = SimpleNamespace(req_id="closed", load_tier_filter=SimpleNamespace(allows=lambda medium, locality: False))
    assert engine.manager.lookup(KEYS[0], closed) is LookupResult.MISS
    engine.close()
