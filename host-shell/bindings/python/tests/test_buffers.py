"""No buffer of a transfer under way is freed or reused, whatever a program does: random programs over a slow drive.

Each write is read back, although its buffer's names went at once, and memory that was allocated meanwhile keeps its
content, although reads go on whose buffers have no name left. Under AddressSanitizer (`cargo xtask python --asan`)
each byte is judged; NVME_GPU_ASAN is set then.
"""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import os
import random
import threading
import time

import pytest

import nvme_gpu
from conftest import SIM_GPU, Device, drain, python, read_at_last, stand_in

ASAN = bool(os.environ.get("NVME_GPU_ASAN"))
SLOTS, SLOT = 192, 40_960
# Reads come from the first half, writes go to the second.
DRIVE = "sim:mem?size=16MiB&threads=2&fault=delay:30ms@op=read,every=2&fault=delay:40ms@op=write,every=2"
OF_DRIVE, OF_CANARY = 0xEE, 0x11


class Memory(bytearray):
    """A bytearray with a cycle, so that it goes by the collector alone."""

    def __init__(self, *words):
        super().__init__(*words)
        self.itself = self


def of_ctypes(size):
    return (ctypes.c_uint8 * size)()


def of_numpy(size):
    return pytest.importorskip("numpy").zeros(size, dtype="uint8")


def of_dlpack(size):
    class Foreign:
        def __init__(self):
            self.memory = of_numpy(size)

        def __dlpack_device__(self):
            return self.memory.__dlpack_device__()

        def __dlpack__(self, **words):
            return self.memory.__dlpack__()

        def __setitem__(self, key, value):
            self.memory[key] = memoryview(value)

    return Foreign()


KINDS = {
    "bytearray": bytearray,
    "a cycle": Memory,
    "array": lambda size: array.array("B", bytes(size)),
    "mmap": lambda size: mmap.mmap(-1, size),
    "ctypes": of_ctypes,
    "a part of memory": lambda size: memoryview(bytearray(size + 64))[32 : size + 32],
    "numpy": of_numpy,
    "DLPack": of_dlpack,
}


class Program:
    """What a careless program does with buffers, drawn from a seed."""

    def __init__(self, store, seed, slots):
        self.store, self.random, self.slots = store, random.Random(seed), list(slots)
        self.pending, self.buffers, self.canaries, self.written = [], [], [], {}
        self.transfers = 0

    def size(self):
        return self.random.choice((1, 512, 700, 4096, 20_000, SLOT))

    def keep_some(self, pending, buffer):
        self.transfers += 1
        if self.random.random() < 0.4:
            self.pending.append(pending)
        if self.random.random() < 0.3:
            self.buffers.append(buffer)

    def read(self):
        size = self.size()
        buffer = KINDS[self.random.choice(list(KINDS))](size)
        self.keep_some(self.store.read_into(buffer, self.random.randrange(SLOTS * SLOT - size)), buffer)

    def write(self):
        if not self.slots:
            return
        size, slot = self.size(), self.slots.pop()
        data = self.random.randbytes(size)
        buffer = KINDS[self.random.choice([one for one in KINDS if one != "DLPack"])](size)
        memoryview(buffer).cast("B")[:] = data
        self.written[slot] = data
        self.keep_some(self.store.write_from(buffer, (SLOTS + slot) * SLOT), None)

    def gather(self):
        table = self.store.table(0, shape=(SLOTS, SLOT), dtype="uint8")
        found = table[[self.random.randrange(SLOTS) for _ in range(3)]]
        assert bytes(memoryview(found).cast("B")) == bytes([OF_DRIVE]) * 3 * SLOT

    def forget(self):
        for held in (self.pending, self.buffers):
            if held:
                held.pop(self.random.randrange(len(held)))

    def forget_all(self):
        self.pending.clear()
        self.buffers.clear()

    def allocate(self):
        for _ in range(8):
            size = self.size()
            self.canaries.append(bytearray([OF_CANARY]) * size)
        for one in range(8):
            bytes([OF_CANARY]) * self.size()
        del self.canaries[:-64]

    def fail(self):
        try:
            buffer = bytearray(self.size())
            self.store.read_into(buffer)
            raise RuntimeError("of the program")
        except RuntimeError:
            pass

    def wait(self):
        if self.pending:
            self.random.choice(self.pending).result(timeout=30)

    def wait_briefly(self):
        if self.pending:
            try:
                self.random.choice(self.pending).result(timeout=0.001)
            except nvme_gpu.Timeout:
                pass

    def collect(self):
        gc.collect(self.random.randrange(3))

    STEPS = (read, read, read, write, write, gather, forget, forget, forget_all, allocate, fail, wait, wait_briefly)

    def run(self, steps):
        for _ in range(steps):
            self.random.choice((*self.STEPS, Program.collect))(self)

    def judge(self):
        self.forget_all()
        gc.collect()
        drain()
        assert all(set(one) == {OF_CANARY} for one in self.canaries), "memory that was allocated later was written"
        for slot, data in self.written.items():
            assert self.store.read(len(data), (SLOTS + slot) * SLOT) == data, f"slot {slot} was written from memory gone"
        assert self.transfers > 0


@pytest.fixture
def slow():
    with nvme_gpu.open(DRIVE) as opened:
        opened.write(bytes([OF_DRIVE]) * SLOTS * SLOT)
        yield opened


@pytest.mark.parametrize("seed", range(4))
def test_a_program_that_forgets(slow, seed):
    program = Program(slow, seed, range(SLOTS))
    program.run(150)
    program.judge()


def test_threads_that_forget_and_end(slow):
    programs = [Program(slow, 100 + number, range(number, SLOTS, 6)) for number in range(6)]
    threads = [threading.Thread(target=one.run, args=(60,)) for one in programs]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    del threads
    for one in programs:
        one.judge()


def test_forks_with_transfers_under_way(slow):
    program = Program(slow, 200, range(SLOTS))
    for _ in range(6):
        program.run(15)
        child = os.fork()
        if child == 0:
            # The child has neither the threads nor the drive: it drops all of it and uses the memory.
            try:
                program.forget_all()
                program.allocate()
                gc.collect()
                with nvme_gpu.open("sim:mem?size=8MiB") as own:
                    own.read_into(bytearray(4096))
                    own.write(b"own")
                    os._exit(0 if own.read(3) == b"own" else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    program.judge()


def test_stores_that_go_with_transfers_under_way():
    canaries, generator = [], random.Random(3)
    for round in range(12):
        store = nvme_gpu.open(DRIVE)
        for kind in KINDS.values():
            store.read_into(kind(generator.choice((512, 4096, SLOT))), 512 * round)
        if round % 3 == 0:
            store.close()
        del store
        gc.collect()
        canaries += [bytearray([OF_CANARY]) * size for size in (512, 4096, SLOT)]
    drain()
    assert all(set(one) == {OF_CANARY} for one in canaries)


@pytest.mark.parametrize("fault", ["drop@op=read,nth=3", "stubborn:2s@op=read,nth=3", "cfs@op=read,nth=3"])
def test_a_buffer_of_a_command_that_is_not_answered_is_kept_until_the_reset(fault):
    with nvme_gpu.open(f"sim:mem?size=16MiB&fault={fault}", timeout_ms=1000) as store:
        for number in range(6):
            store.read_into(bytearray(SLOT), number * SLOT)
        gc.collect()
        canaries = [bytearray([OF_CANARY]) * SLOT for _ in range(40)]
        drain()
        time.sleep(1.5)
        assert all(set(one) == {OF_CANARY} for one in canaries)
        assert read_at_last(store, 512) == bytes(512)


def test_gathers_and_transfers_on_the_gpu_that_are_forgotten():
    assert stand_in(), "needs the stand-in of CUDA"
    with nvme_gpu.open(SIM_GPU + "&fault=delay:20ms@op=read,every=60", gpu=0) as store:
        store.write(bytes([OF_DRIVE]) * (1 << 20))
        table, generator, canaries = store.table(0, shape=(4096, 64), dtype="int32"), random.Random(5), []
        for number in range(40):
            ids = Device([generator.randrange(4096) for _ in range(50)])
            stream = generator.randrange(3)
            out = Device([0] * 3200, "<i4", shape=(50, 64))
            table.gather(ids, out=out, stream=stream)
            table.gather(ids, stream=stream)
            if number % 4 == 0:
                store.read_into(Device([0] * 8192, "|u1"), number * 64, stream=stream)
                store.write_from(Device([7] * 4096, "|u1"), (4 << 20) + number * 4096, stream=stream)
            del ids, out
            if number % 7 == 0:
                table = store.table(0, shape=(4096, 64), dtype="int32")
            gc.collect(0)
            canaries += [bytearray([OF_CANARY]) * size for size in (400, 12_800, 8192)]
        del table
        gc.collect()
    drain()
    assert all(set(one) == {OF_CANARY} for one in canaries)


@pytest.mark.parametrize("end", ["", "os._exit(0)", "sys.exit(3)", "raise SystemExit(3)", "os.kill(os.getpid(), 2)"])
def test_a_program_that_ends_in_the_middle(end):
    done = python(
        f"""
        import os, sys, threading
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import nvme_gpu, test_buffers
        store = nvme_gpu.open(test_buffers.DRIVE)
        store.write(bytes([test_buffers.OF_DRIVE]) * test_buffers.SLOTS * test_buffers.SLOT)
        program = test_buffers.Program(store, 7, range(test_buffers.SLOTS))
        threading.Thread(target=test_buffers.Program(store, 8, ()).run, args=(30,), daemon=True).start()
        program.run(40)
        {end}
        """,
        check=False,
    )
    assert done.returncode in (0, 3, -2) and "Sanitizer" not in done.stderr, done.stderr


if ASAN:

    @pytest.mark.parametrize("way", ["read", "write", "gather", "a gather by the GPU"])
    def test_a_buffer_that_is_freed_too_early_is_found(way):
        """That the sanitizer sees what the other tests look for: a view that keeps nothing, and its memory freed."""
        done = python(
            f"""
            import ctypes, time, nvme_gpu
            libc = ctypes.CDLL(None)
            libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
            libc.free.argtypes = [ctypes.c_void_p]
            gpu = 0 if "GPU" in {way!r} else None
            # Of a write, the last commands are made after the first have ended.
            size, queues, delay = (2 << 20, 1, "50ms") if {way!r} == "write" else (65_536, 8, "300ms")
            store = nvme_gpu.open("sim:mem?size=16MiB&queues=32&fault=delay:" + delay, gpu, queues=queues, depth=2)
            address = libc.malloc(size)
            view = nvme_gpu._native.View.raw(None, address, size, (size,), "uint8", (1, 0), False)
            native = store._native
            if {way!r} == "read":
                pending = native.read(view, 512)
            elif {way!r} == "write":
                pending = native.write(view, 0, False)
            elif gpu == 0:
                ids = (ctypes.c_int64 * 16)()
                table = store.table(0, shape=(100, 4096), dtype="uint8")
                pending = table._native.gather_on_gpu(ctypes.addressof(ids), True, 16, address, 0, 0)
            else:
                ids = nvme_gpu._native.View.from_buffer(bytes(128), False)
                table = store.table(0, shape=(100, 4096), dtype="uint8")
                pending = table._native.gather(ids, True, view, None)
            libc.free(address)
            pending.wait()
            time.sleep(1)
            """,
            check=False,
        )
        assert done.returncode != 0 and "AddressSanitizer: heap-use-after-free" in done.stderr, done.stderr
