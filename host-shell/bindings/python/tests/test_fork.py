"""A child of fork(): every call on what its parent made is refused, nothing of it is closed or dropped, and it may make its
own. The same in C and C++: host-shell/bindings/c/tests/c/fork.c and fork.cpp."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest

import nvme_gpu
from conftest import SIM, SIM_GPU, Device, rows_of, stand_in
from nvme_gpu import compute

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(calls, end=os._exit):
    """Runs each call in a child, which says which of them was not refused."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        wrong = []
        for name, call in calls.items():
            try:
                found = call()
            except nvme_gpu.Usage as error:
                if "fork" not in error.cause:
                    wrong.append(f"{name}: {error}")
            except BaseException as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
            else:
                wrong.append(f"{name} gave {found!r}")
        os.write(write, "\n".join(wrong).encode())
        os.close(write)
        calls.clear()
        gc.collect()
        if end is os._exit:
            os._exit(0)
        sys.stderr = open(os.devnull, "w")
        raise SystemExit(0)
    os.close(write)
    said = b""
    while part := os.read(read, 1 << 16):
        said += part
    os.close(read)
    status = os.waitpid(child, 0)[1]
    assert (said.decode(), status) == ("", 0)


def every_call(store, folder):
    """Objects of each kind over ``store``, and calls on them."""
    table = rows_of(store, 50, 4)
    ended = store.read_into(bytearray(64))
    ended.result()
    calls = {
        "nbytes": lambda: store.nbytes,
        "block_bytes": lambda: store.block_bytes,
        "path": lambda: store.path,
        "stats": store.stats,
        "read": lambda: store.read(8),
        "write": lambda: store.write(b"child"),
        "read_into": lambda: store.read_into(bytearray(8)),
        "write_from": lambda: store.write_from(b"child"),
        "flush": store.flush,
        "table": lambda: store.table(0, shape=(2, 4), dtype="int32"),
        "gather": lambda: table[[1]],
        "scatter": lambda: table.scatter([1], np.zeros((1, 4), np.int32)),
        "scatter_add": lambda: table.scatter_add([1], np.zeros((1, 4), np.int32)),
        "check": table.check,
        "done": ended.done,
        "result": ended.result,
    }
    matrix = compute.Matrix(store, 0, "float32", (2, 32))
    x = np.zeros(32, np.float32)
    calls["gemv"] = lambda: matrix.gemv(x)
    calls["gathered_gemv"] = lambda: matrix.gathered_gemv(np.array([0]), x)
    calls["matrix.check"] = matrix.check
    pages = compute.KvPages(store, 0, 2, kv_heads=1, head_dim=32, page_tokens=64)
    bounds = pages.summaries("cpu")
    queries, numbers = np.zeros((1, 1, 32), np.float32), (np.zeros((1, 1), np.int32), np.ones(1, np.int32))
    calls["attention_paged"] = lambda: compute.attention_paged(queries, pages, *numbers)
    calls["choose"] = lambda: pages.choose(queries, *numbers, bounds, (1, 0, 0))
    calls["summaries"] = lambda: pages.summaries("cpu")
    calls["summaries.read"] = bounds.read
    calls["summaries.tobytes"] = bounds.tobytes
    experts = compute.Experts(store, [[(0, "float32")] * 3], width=32, hidden=32, experts=1, choices=1)
    calls["experts"] = lambda: experts.compute(0, np.zeros((1, 1), np.float32), np.zeros((1, 32), np.float32))
    vectors = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    index = nvme_gpu.build_index(store, vectors, 1 << 20)
    calls["search"] = lambda: index.search(vectors[:2], k=1)
    loader = nvme_gpu.DataLoader(table, 10)
    batches = iter(nvme_gpu.DataLoader(table, 10, prefetch_depth=3))
    next(batches)
    calls["loader"] = lambda: next(iter(loader))
    calls["batches"] = lambda: list(batches)
    np.save(folder / "rows.npy", np.zeros((8, 4), np.float32))
    catalog = nvme_gpu.import_file(store, folder / "rows.npy", 4 << 20)
    layers = nvme_gpu.LayerLoader(catalog, "cpu", layers=["rows"])
    with layers.layer(0) as layer:
        held = layer
        calls["layer.check"] = held.check
    calls["layers"] = lambda: layers.layer(0).__enter__()
    calls["layers.stats"] = layers.stats
    calls["layers.check"] = layers.check
    calls["layers.path"] = lambda: layers.path
    calls["as_table"] = lambda: catalog["rows"].as_table()
    calls["import"] = lambda: nvme_gpu.import_file(store, folder / "rows.npy", 4 << 20)
    calls["catalog"] = lambda: nvme_gpu.catalog(store, 4 << 20)
    closing = {
        one: one.close for one in (matrix, pages, experts, index, layers, store)
    }
    return calls, closing


@pytest.mark.parametrize("kind", ["sim", "file"])
def test_every_call_is_refused_and_closing_does_nothing(tmp_path, kind):
    path = tmp_path / "data"
    path.write_bytes(bytes(8 << 20))
    with nvme_gpu.open(SIM if kind == "sim" else f"file:{path}") as store:
        calls, closing = every_call(store, tmp_path)
        # Inside of its `with` a layer is in use: it is used below in the parent, and refused in the child.
        del calls["layer.check"]
        retries = store.stats()["retries"]

        def close():
            for one in closing.values():
                one()
            assert store.closed
            store.read(1)

        for _ in range(2):
            in_child({**calls, "close": close})
        assert store.read(8, 16) == np.array([1000, 1001], np.int32).tobytes()
        assert store.stats()["retries"] == retries


def test_a_pending_of_the_parent_is_refused_at_once(tmp_path):
    """Its thread is not in the child: a wait without a limit would never end."""
    with nvme_gpu.open("sim:mem?size=16MiB&latency=500ms", timeout_ms=120_000) as store:
        buffer = bytearray(4096)
        pending = store.read_into(buffer)
        in_child({"done": pending.done, "result": pending.result, "limited": lambda: pending.result(1)})
        assert pending.result() is buffer and pending.done()


def test_objects_of_a_gpu_are_refused():
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA")
    with nvme_gpu.open(SIM_GPU, gpu=0) as store:
        table = rows_of(store, 50, 4)
        array = table.gather(Device([3, 1]), check="now")
        kernels = {
            "steps": nvme_gpu._native.Steps(0),
            "router": nvme_gpu._native.Router(0),
            "ladder": nvme_gpu._native.Ladder(0),
            "linear": nvme_gpu._native.Linear(0),
            "attention": nvme_gpu._native.Attention(0),
        }
        steps, ladder = kernels["steps"], kernels["ladder"]
        pages = compute.KvPages(store, 0, 2, kv_heads=1, head_dim=32, page_tokens=64)
        bounds = pages.summaries()
        in_child(
            {
                "tobytes": array.tobytes,
                "dlpack": array.__dlpack__,
                "gather": lambda: table.gather(Device([3, 1])),
                "steps": lambda: steps.silu_mul(4, (0, 0, 0), 0),
                "ladder": lambda: ladder.has("mma"),
                "attention": lambda: kernels["attention"].workspace_bytes("flash2", (1, 1, 1, 1, 1, 8)),
                "router": lambda: kernels["router"].route((1, 1, 1), False, (0, 0, 0), 0),
                "linear": lambda: kernels["linear"].forward("naive", (1, 1, 1), "none", (0, 0, 0, 0, 0), 0),
                "summaries": bounds.read,
                "bytes": bounds._native.tobytes,
            }
        )
        assert array.tolist() == [[3000, 3001, 3002, 3003], [1000, 1001, 1002, 1003]]
        assert table.gather(Device([2]), check="now").tolist()[0][0] == 2000


def test_a_child_that_ends_as_a_program_ends_leaves_the_parent_alone():
    """atexit closes what is open: in the child nothing of the parent's."""
    from conftest import python

    done = python(
        """
        import os
        import nvme_gpu
        store = nvme_gpu.open("sim:mem?size=16MiB")
        table = store.table(0, shape=(10, 4), dtype="int32")
        store.write(b"parents")
        for _ in range(3):
            child = os.fork()
            if child == 0:
                raise SystemExit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert store.read(7) == b"parents" and store.stats()["retries"] == 0
        print("ok")
        """
    )
    assert done.stdout.strip() == "ok" and not done.stderr.replace("DeprecationWarning", "").count("Error")


def test_a_store_that_a_child_drops_stays_open(tmp_path):
    """What closing does is done to the parent's device: a child that drops the last reference closes nothing."""
    from conftest import python

    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    python(
        f"""
        import gc, os
        import nvme_gpu
        store = nvme_gpu.open("file:{image}")
        child = os.fork()
        if child == 0:
            before = len(os.listdir("/proc/self/fd"))
            del store
            gc.collect()
            os._exit(len(os.listdir("/proc/self/fd")) != before)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
