"""What tests share: the stand-in of CUDA, memory that a GPU would have, stores with data."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

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
