"""Each planned fault of the simulator through each way in: right data or a typed error, nothing lost, a usable store."""

from __future__ import annotations

import time

import pytest

import nvme_gpu
from conftest import Device, drain, stand_in

numpy = pytest.importorskip("numpy")

ROWS, WIDTH = 4096, 64
STATUS = nvme_gpu.Status
# What the CPU's callers see; None: nothing, the driver recovers and sends again what the fault took. Of a row that ended
# with a status, the blocks are read or written again one by one, and the fault is over then.
FAULTS = {
    "drop": nvme_gpu.Timeout,
    "delay:50ms": None,
    "delay:2s": nvme_gpu.Timeout,
    "stubborn:2s": nvme_gpu.Timeout,
    "reorder": None,
    "duplicate": None,
    "echo:50ms": None,
    "wrongcid:0x1234": None,
    "flippedcid:0x8000": None,
    "wrongphase": nvme_gpu.Timeout,
    "badsqhd:0xffff": None,
    "torncqe": None,
    "status:0x281": STATUS,
    "status:0x006": STATUS,
    "cfs": None,
    "allones": nvme_gpu.Gone,
}
# On a GPU these need no recovery. With the others, gathers during the recovery end with Gone, and later ones work.
UNSEEN_BY_THE_GPU = ("delay:50ms", "reorder", "torncqe")


def content():
    return (numpy.arange(ROWS * WIDTH, dtype=numpy.int32) * 7).reshape(ROWS, WIDTH)


def by_bytes(store, table, values):
    for begin in range(0, ROWS, 512):
        buffer = bytearray(512 * WIDTH * 4)
        store.read_into(buffer, begin * WIDTH * 4).result(30)
        assert bytes(buffer) == values[begin : begin + 512].tobytes()


def by_rows(store, table, values):
    for begin in range(0, ROWS, 512):
        ids = numpy.arange(begin, begin + 512, 5)
        assert (table[ids] == values[ids]).all()


def by_operations(store, table, values):
    torch = pytest.importorskip("torch")
    import nvme_gpu.torch

    state = nvme_gpu.torch.state(table, "cpu")
    for begin in range(0, ROWS, 512):
        ids = torch.arange(begin, begin + 512, 7)
        found = torch.ops.nvme_ops.gather(state, ids)
        assert torch.equal(found, torch.from_numpy(values)[ids])


def by_the_gpu(store, table, values):
    for begin in range(0, ROWS, 512):
        ids = list(range(begin, begin + 512, 9))
        found = table.gather(Device(ids), check="now")
        assert (numpy.array(found.tolist()) == values[ids]).all()


def by_writes(store, table, values):
    for begin in range(0, ROWS, 512):
        table.scatter(numpy.arange(begin, begin + 512), values[begin : begin + 512])


FACES = {"bytes": by_bytes, "rows": by_rows, "torch": by_operations, "the GPU": by_the_gpu, "writes": by_writes}


def run(fault, face):
    """What calls ended with until one did well, with the fault in their way."""
    gpu = 0 if face == "the GPU" else None
    values, op = content(), "write" if face == "writes" else "read"
    options = "&queues=32&threads=2" if gpu is not None else ""
    # The content is written by writes of their own: the fault meets the commands that follow.
    nth = 3 if face != "writes" else 9
    device = f"sim:mem?size=4MiB{options}&fault={fault}@op={op},nth={nth}"
    with nvme_gpu.open(device, gpu, timeout_ms=1000, queues=4) as store:
        for begin in range(0, ROWS, 512):
            store.write(values[begin : begin + 512], begin * WIDTH * 4)
        table = store.table(0, shape=(ROWS, WIDTH), dtype="int32")
        seen, begin = [], time.monotonic()
        # A queue that a block owns meets an echo in its next batch, after a pass that did well.
        passes = 2 if gpu is not None and fault.startswith("echo") else 1
        while seen.count(None) < passes:
            assert time.monotonic() - begin < 120, seen
            try:
                FACES[face](store, table, values)
                seen.append(None)
                if passes == 2:
                    time.sleep(0.1)
            except nvme_gpu.NvmeGpuError as error:
                assert error.cause and error.remedy and error.code
                seen.append(type(error))
                if fault == "allones" and type(error) is nvme_gpu.Gone:
                    with pytest.raises(nvme_gpu.Gone):
                        store.read(512)
                    return seen
                if gpu is not None:
                    time.sleep(0.02)
        FACES[face](store, table, values)
        assert store.read(values.nbytes) == values.tobytes()
        return seen


def is_as_planned(fault, face, seen):
    wanted = FAULTS[fault]
    if fault == "allones":
        return seen[-1] is nvme_gpu.Gone
    if face == "the GPU":
        kinds = {STATUS} if wanted is STATUS else {nvme_gpu.Timeout, nvme_gpu.Gone}
        if not set(seen) <= kinds | {None}:
            return False
        # An echo is seen when a command with the same identifier is in flight then; a status when its command was not
        # for several rows, which are read again one by one.
        return (seen == [None]) == (fault in UNSEEN_BY_THE_GPU) or fault.startswith(("echo", "status"))
    if wanted is None or wanted is STATUS and face != "bytes":
        return seen == [None]
    return seen == [wanted, None]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_typed_error_and_nothing_is_lost(fault, face):
    assert face != "the GPU" or stand_in(), "needs the stand-in of CUDA"
    # On a busy machine another command may take longer than its time-out: the case is tried again then.
    found = []
    while not found or not is_as_planned(fault, face, found[-1]):
        assert len(found) < 5, found
        try:
            found.append(run(fault, face))
        except (nvme_gpu.Timeout, nvme_gpu.Gone) as error:
            found.append([type(error), "outside of what is judged"])
    drain()


def test_a_remedy_names_the_options_of_python():
    store = nvme_gpu.open("sim:mem?size=1MiB&fault=drop@op=read,every=1", timeout_ms=50)
    with pytest.raises(nvme_gpu.Timeout) as caught:
        store.read(4096)
    assert "timeout_ms=" in caught.value.remedy and "--" not in caught.value.remedy, caught.value.remedy
