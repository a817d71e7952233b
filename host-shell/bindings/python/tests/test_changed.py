"""Another host changes the device: the next call of each interface says so, and nothing is sent."""

from __future__ import annotations

import pytest

import nvme_gpu
from conftest import Device, stand_in

SAYS = {
    "format:512": r"namespace 1 was formatted \(4096 -> 512 bytes a block\)",
    "shrink:1MiB": r"namespace 1 has become smaller \(8192 -> 256 blocks\)",
    "detach": "namespace 1 was deleted or detached",
    "firmware:1": r"largest transfer \(MDTS\) fell from 131072 bytes to 8192 bytes",
}


def opened(change: str, **options: object) -> nvme_gpu.Store:
    device = f"sim:mem?size=32MiB&block=4096&queues=32&threads=2&fault={change}@op=write,nth=1"
    return nvme_gpu.open(device, **options)


def meet(store: nvme_gpu.Store) -> None:
    """The write after which the device is another one: whether it was right is not known."""
    with pytest.raises(nvme_gpu.Changed):
        store.write(b"7" * 4096, 0)


def calls(store: nvme_gpu.Store, table: nvme_gpu.Table) -> list:
    return [
        lambda: store.read(4096),
        lambda: store.write(b"8" * 4096, 4096),
        lambda: store.read_into(bytearray(4096)).result(),
        lambda: store.write_from(b"9" * 4096, 0).result(),
        lambda: store.flush(),
        lambda: table[[1, 2]],
        lambda: table.scatter([1], memoryview(b"1" * 4096).cast("i", (1, 1024))),
    ]


@pytest.mark.parametrize("change", SAYS)
def test_every_call_says_what_changed(change):
    with opened(change) as store:
        table = store.table(0, shape=(100, 1024), dtype="int32")
        meet(store)
        before = store.stats()["commands"]
        for call in calls(store, table):
            with pytest.raises(nvme_gpu.Changed, match=SAYS[change]) as caught:
                call()
            assert caught.value.code == "changed" and "open it again" in str(caught.value)
        assert store.stats()["commands"] == before, "nothing was sent"


def test_a_write_protected_namespace_is_read_and_not_written():
    with opened("protect") as store:
        store.write(b"7" * 4096, 0)
        assert store.read(4096)[:1] == b"7"
        with pytest.raises(nvme_gpu.Changed, match="has become write protected"):
            store.write(b"8" * 4096, 0)


def test_what_was_sanitized_is_not_read():
    with opened("erase") as store:
        store.write(b"7" * 4096, 0)
        with pytest.raises((nvme_gpu.Changed, nvme_gpu.Status)):
            store.read(4096)
        with pytest.raises(nvme_gpu.Changed, match="was sanitized"):
            store.read(4096)


@pytest.mark.skipif(not stand_in(), reason="the stand-in of CUDA")
@pytest.mark.parametrize("change", SAYS)
def test_launches_are_refused(change):
    with opened(change, gpu=0) as store:
        table = store.table(0, shape=(100, 1024), dtype="int32")
        table[Device([1, 2])].tobytes()
        meet(store)
        for launch in (
            lambda: table[Device([1, 2])],
            lambda: table.scatter(Device([1]), Device([0] * 1024, "<i4", shape=(1, 1024))),
            lambda: store.read_into(Device([0] * 1024, "<i4")),
        ):
            with pytest.raises(nvme_gpu.Changed, match=SAYS[change]):
                pending = launch()
                if pending is not None:
                    pending.result()
