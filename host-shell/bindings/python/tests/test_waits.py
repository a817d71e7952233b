"""Waits for work on a GPU whose end never comes, and drivers that register no memory."""

from __future__ import annotations

import os

import pytest

import nvme_gpu
from conftest import Device, python, rows_of, stand_in

HERE = os.path.dirname(__file__)


@pytest.mark.parametrize("fault", ["idle", "hang"])
def test_every_wait_for_a_launch_without_an_end_has_one(fault):
    """"idle": the launch ends without a word, as when its context died. "hang": it does not end."""
    done = python(
        f"""
        import os, sys, threading
        sys.path.insert(0, {HERE!r})
        import nvme_gpu
        from conftest import Device
        store = nvme_gpu.open("sim:mem?size=1MiB&queues=32", gpu=0, timeout_ms=2000)
        table = store.table(0, shape=(100, 4), dtype="int32")
        calls = {{
            "now": lambda: table.gather(Device([1]), stream=1, check="now"),
            "check": lambda: (table.gather(Device([1]), stream=1), table.check()),
            "check in time": lambda: (table.gather(Device([1]), stream=1), table.check(timeout=0.1)),
            "result": lambda: store.read_into(Device([0] * 5000, "|u1"), stream=1).result(),
            "tobytes": lambda: table.gather(Device([1]), stream=1).tobytes(),
        }}
        ends = {{}}
        def run(name):
            try:
                ends[name] = repr(calls[name]())
            except BaseException as error:
                ends[name] = f"{{type(error).__name__}}: {{error}}"
        threads = [threading.Thread(target=run, args=(name,)) for name in calls]
        for one in threads: one.start()
        for one in threads: one.join(200)
        print(ends, flush=True)
        os._exit(sum(not one.startswith("Timeout: ") for one in ends.values()) + len(calls) - len(ends))
        """,
        timeout=300,
        check=False,
        FAKE_CUDA=fault,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["sim", "file", "stripe"])
def test_rows_reach_a_gpu_whose_driver_registers_no_memory(tmp_path, monkeypatch, kind):
    assert stand_in(), "needs the stand-in of CUDA"
    monkeypatch.setenv("FAKE_CUDA", "noregister")
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(1 << 20))
    drive = "sim:mem?size=1MiB&queues=32"
    name = {"sim": drive, "file": f"file:{path}", "stripe": f"stripe:{drive}|{drive}?stripe=4KiB"}[kind]
    with nvme_gpu.open(name, gpu=0) as store:
        assert "registers no" in store.path["why"] and "NOT_SUPPORTED" in store.path["why"], store.path
        assert store.path["data"] == "host" and store.path["tier"] is None
        table = rows_of(store, 100, 4)
        found = table.gather(Device([3, 7]), check="now")
        assert found.tolist() == [[row * 1000 + at for at in range(4)] for row in (3, 7)]
        table.scatter(Device([5]), Device([1, 2, 3, 4], "<i4", (1, 4)), check="now")
        assert table.gather([5]).tolist() == [[1, 2, 3, 4]]
        place = Device([0] * 3000, "|u1")
        store.read_into(place, 100).result()
        assert bytes(place.memory) == store.read(3000, 100)
    for tier in (1, 2):
        with pytest.raises(nvme_gpu.NvmeGpuError, match="NOT_SUPPORTED|does not|registers"):
            nvme_gpu.open(drive, gpu=0, gpu_tier=tier)


@pytest.mark.parametrize("kind", ["sim", "file"])
def test_a_gpu_that_can_be_given_no_memory_is_refused_when_the_store_is_opened(tmp_path, monkeypatch, kind):
    assert stand_in(), "needs the stand-in of CUDA"
    monkeypatch.setenv("FAKE_CUDA", "noregister,nohostalloc")
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(1 << 20))
    name = {"sim": "sim:mem?size=1MiB&queues=32", "file": f"file:{path}"}[kind]
    with pytest.raises(nvme_gpu.NvmeGpuError, match="can be given no memory of the host: .*NOT_SUPPORTED"):
        nvme_gpu.open(name, gpu=0)
    with nvme_gpu.open(name) as store:
        assert store.read(4) == bytes(4)
