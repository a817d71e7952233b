"""Buffers of transfers under way, whatever a program does: del, gc, exceptions, Ctrl-C, threads, fork, exit."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time
import weakref

import pytest

import nvme_gpu
from conftest import SIM, Device, drain, during_reads, interrupted, python

SLOW = "sim:mem?size=16MiB&fault=delay:300ms@op=read"


class Buffer(bytearray):
    """A bytearray that can be watched."""


def test_a_buffer_lives_as_long_as_its_transfer():
    def left_under_way(store, saw):
        buffer = Buffer(4096)
        watched = weakref.ref(buffer)
        pending = store.read_into(buffer)
        del buffer, pending
        gc.collect()
        is_alive, kept = watched() is not None, nvme_gpu._native.kept_buffers()
        saw()
        assert is_alive and kept == 1
        drain()
        gc.collect()
        assert watched() is None

    during_reads(left_under_way)


def test_what_was_seen_after_a_read_does_not_count():
    looks = []

    def look(store, saw):
        store.read(512)
        looks.append(store)
        if len(looks) == 1:
            saw()

    during_reads(look)
    assert len(looks) == 2, "a read takes longer than what `saw` allows"


def test_a_buffer_is_not_resized_under_a_transfer():
    with nvme_gpu.open(SLOW) as store:
        buffer = bytearray(4096)
        pending = store.read_into(buffer)
        with pytest.raises(BufferError):
            buffer.extend(b"more")
        pending.result()
        buffer.extend(b"more")


def test_an_exception_between_start_and_end_keeps_the_buffer():
    def with_an_exception(store, saw):
        watched = None
        try:
            buffer = Buffer(4096)
            watched = weakref.ref(buffer)
            store.read_into(buffer)
            raise RuntimeError("the caller's own")
        except RuntimeError:
            del buffer
        gc.collect()
        is_alive = watched() is not None
        saw()
        assert is_alive
        drain()
        gc.collect()
        assert watched() is None

    during_reads(with_an_exception)


@pytest.mark.parametrize("call", ["read", "gather", "flush"])
def test_ctrl_c_ends_the_wait_and_not_the_transfer(call):
    def wait(store, saw):
        table = store.table(0, shape=(100, 4), dtype="int32")
        calls = {"read": lambda: store.read(512), "gather": lambda: table[[1, 2]], "flush": store.flush}
        interrupted(calls[call])
        under_way = nvme_gpu._native.calls_under_way()
        saw()
        assert under_way == 1
        drain()

    during_reads(wait, what="@op=flush" if call == "flush" else "@op=read")


def test_ctrl_c_ends_a_wait_for_a_pending_read():
    def wait(store, saw):
        pending = store.read_into(bytearray(512))
        interrupted(pending.result)
        saw()
        assert pending.result() == bytearray(512)

    during_reads(wait)


def test_other_threads_run_while_one_waits():
    def wait(store, saw):
        waiting = threading.Thread(target=store.read, args=(512,))
        waiting.start()
        try:
            # Comes here before the read has ended where the wait leaves other threads alone.
            while not nvme_gpu._native.calls_under_way() and waiting.is_alive():
                time.sleep(0.001)
            saw()
            assert waiting.is_alive()
        finally:
            waiting.join()

    during_reads(wait)


def test_a_store_closes_while_others_use_it():
    store = nvme_gpu.open(SLOW)
    ended = []

    def work():
        try:
            while True:
                store.read(512)
        except nvme_gpu.NvmeGpuError as error:
            ended.append(error.code)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    time.sleep(0.1)
    store.close()
    for one in threads:
        one.join()
    assert ended == ["usage"] * 4


def test_a_pending_read_outlives_its_store():
    store = nvme_gpu.open(SLOW)
    pending = store.read_into(bytearray(512))
    store.close()
    del store
    gc.collect()
    assert pending.result() == bytearray(512)


def test_a_pending_read_may_be_waited_for_by_another_thread():
    with nvme_gpu.open(SLOW) as store:
        pending, found = store.read_into(bytearray(512)), []
        threads = [threading.Thread(target=lambda: found.append(pending.result())) for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert found == [bytearray(512)] * 3


@pytest.mark.parametrize("copier", [pickle.dumps, __import__("copy").copy, __import__("copy").deepcopy])
def test_pickling_is_refused_with_the_way_out(store, copier):
    table = store.table(0, shape=(10, 4), dtype="int32")
    for one in (store, table, store.read_into(bytearray(8))):
        with pytest.raises(nvme_gpu.Usage, match="spawn"):
            copier(one)


def test_a_forked_child_is_refused_and_leaves_the_parents_store_alone(store):
    table = store.table(0, shape=(10, 4), dtype="int32")
    store.write(b"\x01\0\0\0" * 4)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"no error"
        try:
            table[[0]]
        except nvme_gpu.Usage as error:
            answer = str(error).encode()
        # A store of its own works.
        with nvme_gpu.open(SIM) as own:
            own.write(b"child")
            answer += own.read(5)
        del table
        gc.collect()
        os.write(write, answer)
        os._exit(0)
    os.close(write)
    answer = b""
    while part := os.read(read, 4096):
        answer += part
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert b"another process" in answer and answer.endswith(b"child")
    assert table[[0]].tolist() == [[1, 1, 1, 1]]


def test_a_fork_during_a_transfer_disturbs_neither():
    def fork(store, saw):
        pending = store.read_into(bytearray(4096))
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (pending.done, pending.result):
                try:
                    call()
                except nvme_gpu.Usage:
                    refused += 1
            del call, pending, store
            gc.collect()
            os._exit(0 if refused == 2 else 1)
        try:
            saw()
        finally:
            status = os.waitpid(child, 0)[1]
        assert status == 0
        assert pending.result() == bytearray(4096)

    during_reads(fork)


def _of_a_worker(path):
    with nvme_gpu.open(path, read_only=True) as store:
        return store.read(5)


def test_workers_that_spawn_open_their_own(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"hello" * 1000)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_of_a_worker, [str(path)] * 4) == [b"hello"] * 4


@pytest.mark.parametrize(
    "end",
    ["", "sys.exit(0)", "os._exit(0)", "del store, pending", "raise SystemExit(0)", "store.close()", "gc.collect()"],
)
def test_a_program_ends_with_a_transfer_under_way(end):
    done = python(
        f"""
        import gc, os, sys, nvme_gpu
        store = nvme_gpu.open({SLOW!r})
        pending = store.read_into(bytearray(1 << 20))
        write = store.write_from(b"x" * 4096, 5)
        table = store.table(0, shape=(10, 4), dtype="int32")
        {end}
        """
    )
    assert done.stderr == ""


def test_a_program_that_is_interrupted_ends_as_others_do():
    done = python(
        """
        import os, signal, threading, nvme_gpu
        store = nvme_gpu.open("sim:mem?size=16MiB&fault=delay:1s@op=read")
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            store.read(512)
        """,
        check=False,
    )
    assert done.returncode == -signal.SIGINT and "KeyboardInterrupt" in done.stderr


def test_what_was_written_is_in_the_image_when_a_program_ends_without_a_close(tmp_path):
    image = tmp_path / "disk.img"
    python(
        f"""
        import nvme_gpu
        store = nvme_gpu.open("sim:{image}?size=16MiB")
        store.write(b"kept", 100)
        """
    )
    with nvme_gpu.open(f"sim:{image}") as store:
        assert store.read(4, 100) == b"kept"


def test_it_works_without_numpy():
    done = python(
        """
        import sys
        sys.modules["numpy"] = None
        import array, nvme_gpu
        with nvme_gpu.open("sim:mem?size=16MiB") as store:
            table = store.table(0, shape=(100, 2), dtype="int32")
            table.scatter([7], array.array("i", [1, 2]).tobytes())
            found = table[[7, 8]]
            print(type(found).__name__, found.tolist(), table[7].tolist(), table[[]].tolist())
        """
    )
    assert done.stdout == "Array [[1, 2], [0, 0]] [1, 2] []\n"


def test_it_says_what_is_missing_without_libcuda():
    done = python(
        f"""
        import nvme_gpu
        try:
            nvme_gpu.open({SIM!r}, gpu=0)
        except nvme_gpu.NvmeGpuError as error:
            print(error.code, error)
        """,
        LD_LIBRARY_PATH="",
    )
    assert done.stdout.startswith("environment no NVIDIA driver: libcuda.so.1 is not on this machine")


def test_ctrl_c_in_a_close_lets_go_of_the_device_all_the_same(tmp_path):
    def closing(store, saw):
        table = store.table(0, shape=(100, 4), dtype="int32")
        # It keeps the device as long as the store is open.
        cached = table.cached(1 << 16)
        pending = store.read_into(bytearray(512))
        cached.gather(Device([1, 2]))
        interrupted(store.close)
        saw()
        assert store.closed
        with pytest.raises(nvme_gpu.NvmeGpuError):
            nvme_gpu.open(image)
        pending.result()
        # The second call goes on where the first one was interrupted.
        store.close()
        nvme_gpu.open(image).close()
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            cached[Device([1])]

    image = f"sim:{tmp_path}/drive.img?size=16MiB"
    during_reads(closing, f"{image}&queues=32&threads=2", gpu=0)
