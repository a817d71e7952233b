"""What a launch on a GPU uses is kept until it has ended, whatever goes before: names, tables, the store."""

from __future__ import annotations

import gc
import weakref

import pytest

import nvme_gpu
from conftest import Device, drain, during_reads

QUEUES = "sim:mem?size=32MiB&queues=32"


class Watched(Device):
    """Memory of the stand-in's GPU that says when it goes."""


def gather(store, table, keep):
    table.gather(keep("ids", [1, 2]), out=keep("out", [7] * 8, "<i4", (2, 4)), status=keep("status", [9, 9], "<i4"))


def scatter(store, table, keep):
    table.scatter(keep("ids", [1, 2]), keep("rows", [7] * 8, "<i4", (2, 4)), status=keep("status", [9, 9], "<i4"))


def scatter_add(store, table, keep):
    table.scatter_add(keep("ids", [1, 2]), keep("rows", [7] * 8, "<i4", (2, 4)), status=keep("status", [9, 9], "<i4"))


def read_into(store, table, keep):
    store.read_into(keep("buffer", [7] * 64, "<i4"), 5)


def write_from(store, table, keep):
    store.write_from(keep("buffer", [7] * 64, "<i4"), 5)


CALLS = [gather, scatter, scatter_add, read_into, write_from]


@pytest.mark.parametrize("goes", ["names", "table", "store"])
@pytest.mark.parametrize("call", CALLS)
def test_all_buffers_of_a_call_are_kept_until_it_has_ended(call, goes):
    def let_go(store, saw):
        watched = {}

        def keep(name, values, typestr="<i8", shape=None):
            made = Watched(values, typestr, shape)
            watched[name] = weakref.ref(made)
            return made

        table = store.table(0, shape=(100, 4), dtype="int32")
        call(store, table, keep)
        native = store._native
        if goes != "names":
            del table
        gc.collect()
        kept = {name: found() is not None for name, found in watched.items()}
        if call in (gather, read_into):
            # Threads of the host run in the call where the driver is the stand-in.
            saw()
            assert all(kept.values()), f"let go during {call.__name__}: {kept}"
        if goes == "store":
            # It waits for what was launched.
            store.close()
        begin = nvme_gpu._native.calls_under_way()
        assert begin >= 0
        if goes == "names":
            table.check()
            table._native.is_idle()
        del native
        with nvme_gpu.open("sim:mem?size=1MiB") as other:
            # Opening any store frees the transfers that have ended.
            other.read(1)
        if goes == "names" or (goes == "table" and call in (read_into, write_from)):
            # Bytes belong to the store: its next transfer gives their buffers back, or its end.
            store.close()
        drain()
        gc.collect()
        gone = {name: found() is None for name, found in watched.items()}
        assert all(gone.values()), f"kept for good after {call.__name__}: {gone}"

    during_reads(let_go, QUEUES, "@op=read" if call is not write_from else "@op=write", gpu=0)
