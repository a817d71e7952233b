"""What tests share: the stand-in of CUDA, memory that a GPU would have, stores with data."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import nvme_gpu

SIM = "sim:mem?size=32MiB"
# A store with a GPU leaves the CPU eight queues and gives the GPU sixteen.
SIM_GPU = "sim:mem?size=32MiB&queues=32&threads=2"


def rows_of(store: nvme_gpu.Store, rows: int, width: int, offset: int = 0) -> nvme_gpu.Table:
    """A table of int32 whose row i is [i * 1000 + 0, 1, ...]."""
    import array

    data = array.array("i", [row * 1000 + column for row in range(rows) for column in range(width)])
    store.write(data, offset)
    return store.table(offset, shape=(rows, width), dtype="int32")


def stand_in() -> bool:
    """Whether libcuda is the stand-in, in this process."""
    try:
        return nvme_gpu._native.gpu(0).startswith("GPU 0 (Stand-in)")
    except nvme_gpu.NvmeGpuError:
        return False


class Device:
    """Memory of the stand-in's GPU, as an object with ``__cuda_array_interface__``."""

    def __init__(self, values, typestr="<i8", shape=None, stream=None, strides=None):
        kinds = {"<i8": ctypes.c_int64, "<i4": ctypes.c_int32, "<f4": ctypes.c_float, "|u1": ctypes.c_uint8}
        kind = kinds[typestr]
        self.memory = (kind * max(len(values), 1))(*values)
        self.shape = (len(values),) if shape is None else shape
        self.typestr, self.stream, self.strides = typestr, stream, strides

    @property
    def __cuda_array_interface__(self):
        found = {
            "version": 3,
            "shape": self.shape,
            "typestr": self.typestr,
            "data": (ctypes.addressof(self.memory), False),
            "strides": self.strides,
        }
        if self.stream is not None:
            found["stream"] = self.stream
        return found

    def tolist(self):
        return list(self.memory)[: self.count]

    @property
    def count(self):
        count = 1
        for one in self.shape:
            count *= one
        return count


def python(text: str, *, check: bool = True, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **env},
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def store():
    with nvme_gpu.open(SIM) as opened:
        yield opened


@pytest.fixture
def gpu_store():
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA: LD_LIBRARY_PATH with its libcuda.so.1")
    with nvme_gpu.open(SIM_GPU, gpu=0) as opened:
        yield opened


@pytest.fixture
def cuda(monkeypatch):
    """torch with a GPU, as far as this package looks at it."""
    pytest.importorskip("torch")
    from torch_on_stand_in import Cuda, synchronize

    yield Cuda(monkeypatch)
    if stand_in():
        synchronize()


class TooSlow(Exception):
    """The machine took longer for what a test does during a read than the read was delayed."""


def during_reads(test, device: str = "sim:mem?size=16MiB", what: str = "@op=read", **more) -> None:
    """Calls ``test`` with a store whose reads take a while, and a function that it calls when it has looked at what
    there is during a read: what it saw does not count where the machine took as long as the read (or as ``times`` of
    them). Then it is called again, with reads that take ten times as long."""
    for ms in (300, 3_000, 30_000):
        slow = f"{device}&fault=delay:{ms}ms{what}"
        with nvme_gpu.open(slow, timeout_ms=120_000, **more) as opened:
            begin = time.monotonic()

            def saw(times: int = 1, ms: int = ms, begin: float = begin) -> None:
                if time.monotonic() - begin >= times * ms / 1000:
                    raise TooSlow

            try:
                return test(opened, saw)
            except TooSlow:
                drain()
    pytest.fail("a read ended before the test had looked at it, even one of 30 s")


def interrupted(call) -> None:
    """Calls it, and has Ctrl-C come a little after it has begun to wait: not while it imports numpy, which would stay
    half imported."""
    is_over = threading.Event()

    def press() -> None:
        while not nvme_gpu._native.calls_under_way() and not is_over.wait(0.005):
            pass
        is_over.wait(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt):
        presses.start()
        call()
        # It ended before: the signal is still to come.
        is_over.set()
        presses.join()
        time.sleep(60)


def drain() -> None:
    """Waits until transfers that were left under way have ended and their buffers are given back."""
    begin = time.monotonic()
    while nvme_gpu._native.calls_under_way() or nvme_gpu._native.kept_buffers():
        assert time.monotonic() - begin < 120, "transfers or buffers that stay for ever"
        time.sleep(0.01)
