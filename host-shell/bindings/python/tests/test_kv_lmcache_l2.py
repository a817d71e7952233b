"""LMCache's L2 adapter over pages, in stand-ins of LMCache's modules."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import nvme_gpu
from kv_stand_in import adapter, lmcache_modules

SHAPE, DTYPE = (2, 4, 16, 32), "bfloat16"
SIZE = 2 * 4 * 16 * 32 * 2


@dataclass(frozen=True)
class Key:
    number: int
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""

    @property
    def chunk_hash(self):
        return self.number.to_bytes(4, "big")


class Object:
    def __init__(self, fill, shape=SHAPE, nbytes=SIZE):
        self.byte_array = memoryview(bytearray([fill]) * nbytes)
        self.metadata = SimpleNamespace(shapes=[shape], dtypes=[DTYPE], shape=shape, dtype=DTYPE)


LAYOUT = {0: SimpleNamespace(shapes=[SHAPE], dtypes=[DTYPE])}
KEYS = [Key(number) for number in range(6)]


@pytest.fixture
def lmcache(monkeypatch):
    lmcache_modules(monkeypatch)
    return adapter("lmcache")


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "pages"
    with path.open("wb") as file:
        file.truncate(4 << 20)
    return f"file:{path}"


def opened(lmcache, device, **options):
    return lmcache.NvmeL2Adapter({"device": device, "page_bytes": SIZE, "allow_write": True, **options}, l1_memory_desc=None)


def after(ask: Any) -> Any:
    """The result of a task once it is there."""
    for _ in range(60_000):
        result = ask()
        if result or result == 0:
            return result
        threading.Event().wait(0.001)
    raise AssertionError("the task did not end")


def store(l2, keys, objects):
    task = l2.submit_store_task(keys, objects)
    return after(l2.pop_completed_store_tasks)[task]


def look(l2, keys, layout=LAYOUT):
    task = l2.submit_lookup_and_lock_task(keys, layout)
    found = after(lambda: l2.query_lookup_and_lock_result(task))
    assert l2.query_lookup_and_lock_result(task) is None
    return sorted(found.bits)


def load(l2, keys, objects):
    task = l2.submit_load_task(keys, objects)
    found = after(lambda: l2.query_load_result(task))
    assert l2.query_load_result(task) is None
    return sorted(found.bits)


def test_objects_are_found_after_a_restart(lmcache, device, caplog):
    l2 = opened(lmcache, device)
    descriptors = {l2.get_store_event_fd(), l2.get_lookup_and_lock_event_fd(), l2.get_load_event_fd()}
    assert len(descriptors) == 3 and look(l2, KEYS) == []
    assert store(l2, KEYS[:4], [Object(number + 1) for number in range(4)]) == 4 * SIZE
    assert store(l2, KEYS[:4], [Object(number + 1) for number in range(4)]) == 0
    assert [one[0] for one in l2.told] == ["stored"] and l2.told[0][2] == [SIZE] * 4
    assert [one.count for one in l2._notifiers.values()] == [2, 1, 0]
    l2.close()
    l2 = opened(lmcache, device)
    # Its shape is in its name, and not in its key: it stays, and that is said.
    with caplog.at_level("WARNING", logger="nvme_gpu"):
        l2.delete(KEYS[:1])
    assert "1 of 1 objects were not removed" in caplog.text
    caplog.clear()
    assert look(l2, KEYS) == [0, 1, 2, 3]
    objects = [Object(99) for _ in KEYS]
    assert load(l2, KEYS, objects) == [0, 1, 2, 3] and [one.byte_array[5] for one in objects] == [1, 2, 3, 4, 0, 0]
    l2.submit_unlock(KEYS)
    assert not l2._pins and l2.report_status()["is_healthy"] and l2.report_status()["pages"] == 4
    with caplog.at_level("WARNING", logger="nvme_gpu"):
        l2.delete([KEYS[0], KEYS[5]])
    assert not caplog.records
    assert l2.told[-1] == ("deleted", [KEYS[0]], [SIZE]) and look(l2, KEYS[:2]) == [1]
    l2.close()
    l2.close()
    assert not l2.report_status()["is_healthy"] and all(one.is_closed for one in l2._notifiers.values())
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        l2.submit_store_task([], [])


def test_an_object_is_found_under_its_whole_key_and_shape_alone(lmcache, device):
    l2 = opened(lmcache, device)
    assert store(l2, KEYS[:1], [Object(1)]) == SIZE
    others = [Key(0, model_name="other"), Key(0, kv_rank=1), Key(0, object_group_id=1), Key(0, cache_salt="s")]
    assert look(l2, others, {}) == []
    # The same bytes in another order of dimensions, as after an update of the engine.
    turned = (2, 16, 4, 32)
    assert look(l2, KEYS[:1], {0: SimpleNamespace(shapes=[turned], dtypes=[DTYPE])}) == []
    assert load(l2, KEYS[:1], [Object(9, turned)]) == []
    # Lookups that tell no shapes find what this process has seen.
    assert look(l2, KEYS[:1], {}) == [0] and look(l2, KEYS[:1], {0: SimpleNamespace(shapes=[], dtypes=[])}) == [0]
    l2.close()
    l2 = opened(lmcache, device)
    assert look(l2, KEYS[:1], {}) == [] and look(l2, KEYS[:1]) == [0]
    l2.close()


def test_locked_objects_make_no_room(lmcache, device):
    l2 = opened(lmcache, device)
    assert store(l2, KEYS[:2], [Object(1), Object(2)]) == 2 * SIZE
    assert look(l2, KEYS[:2]) == [0, 1]
    capacity = l2.report_status()["capacity"]
    for number in range(100, 110 + capacity):
        store(l2, [Key(number)], [Object(3)])
    objects = [Object(9), Object(9)]
    assert load(l2, KEYS[:2], objects) == [0, 1] and [one.byte_array[0] for one in objects] == [1, 2]
    l2.submit_unlock(KEYS[:2])
    for number in range(1000, 1010 + capacity):
        store(l2, [Key(number)], [Object(3)])
    assert look(l2, KEYS[:2]) == []
    l2.close()


def test_a_spoilt_object_is_a_miss(lmcache, device, tmp_path, caplog):
    l2 = opened(lmcache, device)
    assert store(l2, KEYS[:2], [Object(0xA6), Object(2)]) == 2 * SIZE
    data = (tmp_path / "pages").read_bytes()
    with (tmp_path / "pages").open("r+b") as file:
        file.seek(data.index(b"\xa6" * SIZE) + 5)
        file.write(b"x")
    objects = [Object(9), Object(9)]
    assert look(l2, KEYS[:2]) == [0, 1] and load(l2, KEYS[:2], objects) == [1]
    assert not any(objects[0].byte_array) and "checksum" in caplog.text and look(l2, KEYS[:2]) == [1]
    l2.close()


@pytest.mark.parametrize("fault", ["status:0x280@op=write", "drop@op=write"])
def test_a_failed_store_fails_its_task_and_is_a_miss(lmcache, fault):
    l2 = opened(lmcache, f"sim:mem?size=4MiB&fault={fault},nth=60-100000", timeout_ms=1000)
    results = []
    for number in range(40):
        results.append(store(l2, [Key(number)], [Object(1)]))
        assert look(l2, [Key(number)]) == ([0] if results[-1] == SIZE else [])
        if results[-1] < 0:
            break
    assert results[0] == SIZE and results[-1] == -1
    assert store(l2, KEYS[:1], [Object(1, nbytes=2 * SIZE)]) == -1
    l2.close()


def test_a_failed_load_is_told(lmcache):
    l2 = opened(lmcache, "sim:mem?size=4MiB&fault=status:0x281@op=read,nth=40-100000")
    assert store(l2, KEYS[:1], [Object(1)]) == SIZE
    results = [load(l2, KEYS[:1], [Object(9)]) for _ in range(60)]
    assert results[0] == [0] and results[-1] == []
    l2.close()


def test_close_waits_for_transfers(lmcache):
    l2 = opened(lmcache, "sim:mem?size=4MiB&latency=100ms")
    l2.submit_store_task(KEYS, [Object(1) for _ in KEYS])
    pending = list(l2._under_way)
    l2.close()
    assert all(one.done() for one in pending)


def test_close_waits_for_a_task_that_begins(lmcache, device, monkeypatch):
    l2 = opened(lmcache, device)
    closing, begin = threading.Thread(target=l2.close), nvme_gpu.PageStore.store_async

    def begun(*arguments):
        closing.start()
        closing.join(0.3)
        assert closing.is_alive(), "close() has not waited"
        return begin(*arguments)

    monkeypatch.setattr(nvme_gpu.PageStore, "store_async", begun)
    task = l2.submit_store_task(KEYS[:1], [Object(1)])
    closing.join(60)
    assert l2.pop_completed_store_tasks() == {task: SIZE}
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        l2.submit_lookup_and_lock_task(KEYS, LAYOUT)


def test_a_listener_that_fails_ends_no_task(lmcache, device, caplog):
    l2 = opened(lmcache, device)

    def failed(*_):
        raise RuntimeError("a listener")

    l2._notify_keys_stored = failed
    assert store(l2, KEYS[:1], [Object(1)]) == SIZE and "a listener" in caplog.text
    l2.close()


def test_a_lookup_that_cannot_be_made_ends(lmcache, device, caplog):
    """LMCache would wait for it for ever."""
    l2 = opened(lmcache, device)
    assert store(l2, KEYS[:1], [Object(1)]) == SIZE
    assert look(l2, KEYS[:1], {0: SimpleNamespace(shapes=[SHAPE], dtypes=None)}) == []
    assert "an object was not looked for" in caplog.text
    assert look(l2, KEYS[:1]) == [0]
    l2.close()


def test_parameters_that_cannot_be(lmcache, device):
    for wrong, word in (({"page_bytes": None}, "page_bytes"), ({"page_bytes": 0}, "page_bytes"), ({"devise": 1}, "devise"), ({"device": ""}, "device")):
        with pytest.raises(nvme_gpu.Usage, match=word):
            opened(lmcache, **{"device": device, **wrong})
