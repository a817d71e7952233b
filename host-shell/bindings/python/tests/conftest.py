"""What tests share: the stand-in of CUDA, memory that a GPU would have, stores with data."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable

import pytest

import nvme_gpu

# Where SIGINT was ignored when the tests were started, as by nohup or a shell's &, Python has no handler for it; what the
# tests start inherits that, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# By hand alone, where transformers is.
collect_ignore = [] if importlib.util.find_spec("transformers") else ["test_transformers.py"]

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


def cuda_memory(nbytes: int, kind: str = "gpu", gpu: int = 0) -> tuple[int, Callable[[], None]]:
    """The address of new memory as the stand-in of CUDA has it, and what gives it back. ``kind``: "gpu"; "managed";
    "pinned", of the driver; "registered" and "read-only", memory of the host that is registered with it; "host"."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, at, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t(max(nbytes, 1))
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    try:
        if kind in ("registered", "read-only", "host"):
            memory = mmap.mmap(-1, max(nbytes, 1))
            at.value = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            flags = 3 if kind == "registered" else 11
            if kind != "host":
                assert cuda.cuMemHostRegister_v2(at, size, flags) == 0
            return at.value, lambda: (kind == "host" or cuda.cuMemHostUnregister(at), memory)[0]
        if kind == "gpu":
            assert cuda.cuMemAlloc_v2(ctypes.byref(at), size) == 0
        elif kind == "managed":
            assert cuda.cuMemAllocManaged(ctypes.byref(at), size, 1) == 0
        else:
            assert cuda.cuMemHostAlloc(ctypes.byref(at), size, 0) == 0
    finally:
        assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    free = cuda.cuMemFreeHost if kind == "pinned" else cuda.cuMemFree_v2
    return at.value, lambda: free(at)


class Device:
    """Memory of the stand-in's GPU, as an object with ``__cuda_array_interface__``; or of another ``kind``."""

    def __init__(self, values, typestr="<i8", shape=None, stream=None, strides=None, kind="gpu", gpu=0):
        kinds = {"<i8": ctypes.c_int64, "<i4": ctypes.c_int32, "<f4": ctypes.c_float, "|u1": ctypes.c_uint8}
        element = kinds[typestr]
        count = max(len(values), 1)
        at, free = cuda_memory(count * ctypes.sizeof(element), kind, gpu)
        self.memory = (element * count).from_address(at)
        # At the end of the process a launch may still use it.
        weakref.finalize(self.memory, free).atexit = False
        for index, value in enumerate(values):
            self.memory[index] = value
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


def python(text: str, *, check: bool = True, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
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
        # The call ended before the signal came, which is sent now.
        is_over.set()
        presses.join()
        time.sleep(60)


def read_at_last(store: nvme_gpu.Store, nbytes: int) -> bytes:
    """Reads from a store with short time-outs, which a loaded machine exceeds now and then."""
    begin = time.monotonic()
    while True:
        try:
            return store.read(nbytes)
        except nvme_gpu.Timeout:
            assert time.monotonic() - begin < 120, "each command times out"


def drain() -> None:
    """Waits until transfers that were left under way have ended and their buffers are given back."""
    begin = time.monotonic()
    while nvme_gpu._native.calls_under_way() or nvme_gpu._native.kept_buffers():
        assert time.monotonic() - begin < 120, "transfers or buffers that stay for ever"
        time.sleep(0.01)
