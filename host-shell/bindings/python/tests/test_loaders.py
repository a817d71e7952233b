"""Layers that are read ahead: on the host, by the stand-in of a GPU, with faults."""

from __future__ import annotations

import gc
import itertools
import math
import os
import pickle
import sys
import threading
import time

import pytest

import nvme_gpu
from conftest import SIM, SIM_GPU, python, stand_in
from safetensors_file import file_bytes

LAYERS, ROWS, WIDTH = 6, 20, 33


def model(path):
    """A safetensors file: layers of a weight, a bias of float16 and one of bfloat16, and an embedding."""
    import array

    tensors = [("embed", "F32", [4], array.array("f", [1, 2, 3, 4]).tobytes())]
    for layer in range(LAYERS):
        weight = array.array("f", [layer * 10_000 + at for at in range(ROWS * WIDTH)])
        tensors.append((f"m.layers.{layer}.w", "F32", [ROWS, WIDTH], weight.tobytes()))
        tensors.append((f"m.layers.{layer}.b", "BF16", [3], bytes(range(6))))
    path.write_bytes(file_bytes(tensors))
    return path


def is_right(layer, values):
    flat = [number for row in values for number in row]
    return flat == [layer * 10_000 + at for at in range(ROWS * WIDTH)]


@pytest.fixture
def catalog(store, tmp_path):
    return nvme_gpu.import_file(store, model(tmp_path / "m.safetensors"), offset=4096)


def test_layers_come_in_their_order_pass_after_pass(catalog):
    loader = nvme_gpu.LayerLoader(catalog)
    assert len(loader) == LAYERS and loader.names[2] == "m.layers.2."
    for _ in range(3):
        for index in range(len(loader)):
            with loader.layer(index) as w:
                assert is_right(index, w["w"].tolist())
                assert list(w) == [f"m.layers.{index}.w", f"m.layers.{index}.b"] and len(w) == 2
                assert w[f"m.layers.{index}.w"] is w["w"] and tuple(w["w"].shape) == (ROWS, WIDTH)
                assert w.index == index and w.name == f"m.layers.{index}." and w.nbytes >= ROWS * WIDTH * 4
                w.check()
                with pytest.raises(KeyError):
                    w["x"]
    stats = loader.stats()
    assert (stats["asked"], stats["ready"]) == (3 * LAYERS, 3 * LAYERS - 1)
    assert loader.path["memory"] == "host" and "threads of the store" in loader.path["mover"]
    assert "6 layers" in repr(loader) and "not in use" in repr(loader.layer(0))
    loader.check()


def test_layers_are_named_by_prefixes_and_by_lists(catalog):
    for layers, names in (
        (["embed", "m.layers.1."], ("embed", "m.layers.1.")),
        ({"first": ["embed", "m.layers.0.w"], "b": ["m.layers.5.b"]}, ("first", "b")),
    ):
        loader = nvme_gpu.LayerLoader(catalog, layers=layers, resident=[0], order=[0, 1, 0])
        assert loader.names == names
        with loader.layer(names[0]) as w, loader.layer(1) as other:
            assert w["embed"].tolist() == [1, 2, 3, 4] and len(other)
        assert loader.path["resident"] == 1


def test_arrays_that_are_kept_hold_their_slot(catalog):
    loader = nvme_gpu.LayerLoader(catalog, slots=2)
    with loader.layer(0) as w:
        kept = w["w"]
        with pytest.raises(nvme_gpu.Usage):
            with w:
                pass
    with pytest.raises(nvme_gpu.Usage):
        w["w"]
    for index in range(1, LAYERS):
        with loader.layer(index) as w:
            assert is_right(index, w["w"].tolist())
    assert is_right(0, kept.tolist())
    with loader.layer(1), pytest.raises(nvme_gpu.Usage, match="no slot"):
        with loader.layer(2):
            pass
    del kept
    gc.collect()
    with loader.layer(1), loader.layer(2) as w:
        assert is_right(2, w["w"].tolist())


def test_a_fault_is_raised_for_its_layer_and_the_next_call_reads_again(tmp_path):
    # One command of each layer; the import has read nothing.
    path = model(tmp_path / "m.safetensors")
    for fault, kind in (
        ("status:0x281@op=read,nth=9", nvme_gpu.Status),
        ("drop@op=read,nth=9", nvme_gpu.Timeout),
    ):
        with nvme_gpu.open(f"{SIM}&fault={fault}", timeout_ms=3000) as store:
            loader = nvme_gpu.LayerLoader(nvme_gpu.import_file(store, path, verify=False))
            failed = []
            for index in [*range(LAYERS)] * 3:
                try:
                    with loader.layer(index) as w:
                        assert is_right(index, w["w"].tolist())
                except kind as error:
                    assert f"layer {index} (m.layers.{index}.)" in error.cause
                    failed.append(index)
                    with loader.layer(index) as w:
                        assert is_right(index, w["w"].tolist())
            assert len(failed) == 1


def test_a_closed_store_ends_its_loaders_and_arrays_stay(tmp_path):
    store = nvme_gpu.open(SIM)
    loader = nvme_gpu.LayerLoader(nvme_gpu.import_file(store, model(tmp_path / "m.safetensors")), slots=3)
    with loader.layer(3) as w:
        kept = w["w"]
        store.close()
        assert is_right(3, w["w"].tolist())
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            with loader.layer(4):
                pass
    loader.close()
    del loader, w
    gc.collect()
    assert is_right(3, kept.tolist())


def test_threads_share_a_loader(catalog):
    loader = nvme_gpu.LayerLoader(catalog, slots=5, order="learned")
    wrong = []

    def run(first):
        for step in range(30):
            index = (first + step) % LAYERS
            with loader.layer(index) as w:
                if not is_right(index, w["w"].tolist()):
                    wrong.append(index)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and loader.stats()["asked"] == 120


def test_what_cannot_be_is_refused(catalog):
    loader = nvme_gpu.LayerLoader
    for wrong in (
        {"slots": 0},
        {"layers": []},
        {"layers": ["x."]},
        {"layers": {"a": ["x"]}},
        {"order": [LAYERS]},
        {"order": []},
        {"order": "random"},
        {"ahead": -1},
        {"resident": -1},
        {"device": "cuda"},
        {"device": "cuda:0"},
        {"device": "tpu"},
    ):
        with pytest.raises(nvme_gpu.Usage):
            loader(catalog, **wrong)
    for wrong in ({"layers": "m."}, {"layers": [1]}, {"slots": "two"}, {"resident": [0.5]}):
        with pytest.raises(TypeError):
            loader(catalog, **wrong)
    with pytest.raises(TypeError):
        loader({})
    made = loader(catalog, "cpu")
    for wrong in (-1, LAYERS, "m."):
        with pytest.raises(nvme_gpu.Usage):
            made.layer(wrong)
    with pytest.raises(TypeError):
        made.layer(1.5)
    for value in (made, made.layer(0)):
        with pytest.raises(nvme_gpu.Usage):
            pickle.dumps(value)


def test_a_child_of_a_fork_leaves_the_parents_loader_alone(catalog):
    loader = nvme_gpu.LayerLoader(catalog)
    layer = loader.layer(0)
    with layer as w:
        child = os.fork()
        if child == 0:
            try:
                loader.stats()
                os._exit(1)
            except nvme_gpu.Usage:
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_right(0, w["w"].tolist())
    with loader.layer(1) as w:
        assert is_right(1, w["w"].tolist())


PROGRAM = """
    import sys
    {before}
    import nvme_gpu
    with nvme_gpu.open("file:{path}", read_only=True) as store:
        loader = nvme_gpu.LayerLoader(nvme_gpu.catalog(store), order="learned")
        for index in [0, 1, 2] * 2:
            with loader.layer(index) as w:
                assert w["w"].tolist()[0][0] == index * 10_000
                bias = w["b"]
        print(type(bias).__module__, type(bias).__name__, tuple(bias.shape), bias.tolist() if hasattr(bias, "tolist") else 0)
"""


@pytest.mark.parametrize(
    ("before", "printed"),
    [
        ("import torch", "torch Tensor (3,)"),
        ("", "numpy ndarray (6,) [0, 1, 2, 3, 4, 5]"),
        ("sys.modules['numpy'] = None", "builtins memoryview (6,) [0, 1, 2, 3, 4, 5]"),
    ],
)
def test_arrays_come_from_the_library_that_is_there(tmp_path, before, printed):
    if before == "import torch":
        pytest.importorskip("torch")
    path = model(tmp_path / "m.safetensors")
    assert printed in python(PROGRAM.format(before=before, path=path)).stdout


GPU_PROGRAM = """
    import ctypes
    import nvme_gpu
    with nvme_gpu.open("{device}", gpu=0, timeout_ms=500) as store:
        catalog = nvme_gpu.import_file(store, "{path}", offset=1001)
        loader = nvme_gpu.LayerLoader(catalog, "cuda:0", resident=1 << 12)
        assert loader.path["memory"] == "gpu", loader.path
        failed = 0
        for index in [*range(6)] * 4:
            try:
                with loader.layer(index, stream=2) as w:
                    found = w["w"].__cuda_array_interface__
                    assert w["w"].shape == found["shape"] == (20, 33) and found["typestr"] == "<f4"
                    assert found["stream"] == 2 and w["w"].dtype == "float32"
                    assert w["b"].shape == (6,) and w["b"].dtype == "uint8"
                    loader.check(10)
                    first = ctypes.c_float.from_address(found["data"][0]).value
                    assert first == index * 10_000, (index, first)
            except nvme_gpu.Status as error:
                assert "layer " in error.cause
                failed += 1
        print("failed", failed, loader.path["mover"], loader.stats()["asked"])
"""


@pytest.mark.parametrize("fault", ["", "&fault=status:0x281@op=read,nth=12"])
def test_a_gpu_gets_layers_in_order_of_its_streams(tmp_path, fault):
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA: LD_LIBRARY_PATH with its libcuda.so.1")
    path = model(tmp_path / "m.safetensors")
    out = python(GPU_PROGRAM.format(device=SIM_GPU + fault, path=path)).stdout
    assert "warps of the GPU" in out
    # A read for several rows that fails is done again for each.
    assert out.startswith("failed 0" if not fault else "failed "), out


def test_arrays_of_numpy_lie_in_the_slot(catalog, monkeypatch):
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr(nvme_gpu._buffers, "torch", lambda: None)
    with nvme_gpu.LayerLoader(catalog) as loader, loader.layer(2) as w:
        weight, bias = w["w"], w["b"]
        assert isinstance(weight, numpy.ndarray) and weight.dtype == numpy.float32 and is_right(2, weight.tolist())
        assert not weight.flags.writeable and not weight.flags.owndata
        # numpy has no bfloat16: its bytes are along the last length.
        assert bias.dtype == numpy.uint8 and bias.tolist() == list(range(6))
    del w
    assert is_right(2, weight.tolist()), "an array keeps its slot"


def test_arrays_without_a_library_are_views_of_memory(store, tmp_path, monkeypatch):
    monkeypatch.setattr(nvme_gpu._buffers, "torch", lambda: None)
    monkeypatch.setattr(nvme_gpu._buffers, "numpy", lambda: None)
    with nvme_gpu.LayerLoader(nvme_gpu.import_file(store, odd_model(tmp_path / "m.safetensors"))) as loader:
        with loader.layer(0) as w:
            found = w["weight"]
            assert isinstance(found, memoryview) and found.format == "i" and found.tolist() == [[1, 2], [3, 4], [5, 6]]
            assert w["one"].shape == (1,) and w["one"].tolist() == [7]
            assert w["half"].format == "B" and w["half"].tolist() == [0, 1, 2, 3]
            assert w["none"].nbytes == 0
        with loader.layer(1) as w:
            assert w["none"].nbytes == 0 and w.nbytes == 0


def odd_model(path):
    """A safetensors file with a layer of a matrix, one number, halves and no bytes, and a layer of no bytes."""
    tensors = [
        ("m.0.weight", "I32", [3, 2], b"".join(one.to_bytes(4, "little") for one in range(1, 7))),
        ("m.0.one", "I64", [], (7).to_bytes(8, "little")),
        ("m.0.half", "BF16", [2], bytes(range(4))),
        ("m.0.word", "U16", [2], bytes(range(4))),
        ("m.0.none", "F32", [0, 4], b""),
        ("m.1.none", "BF16", [2, 0], b""),
    ]
    path.write_bytes(file_bytes(tensors))
    return path


@pytest.mark.parametrize("with_torch", [True, False])
def test_tensors_of_no_bytes_have_their_shape(store, tmp_path, monkeypatch, with_torch):
    if with_torch:
        pytest.importorskip("torch")
    else:
        pytest.importorskip("numpy")
        monkeypatch.setattr(nvme_gpu._buffers, "torch", lambda: None)
    loader = nvme_gpu.LayerLoader(nvme_gpu.import_file(store, odd_model(tmp_path / "m.safetensors")))
    with loader.layer(0) as w:
        assert w["weight"].tolist() == [[1, 2], [3, 4], [5, 6]] and w["one"].tolist() == 7
        if not hasattr(sys.modules.get("torch"), "uint16") and with_torch:
            assert w["word"].tolist() == [0, 1, 2, 3], "bytes of a dtype that torch lacks"
        else:
            assert w["word"].tolist() == [0x100, 0x302]
        assert tuple(w["none"].shape) == (0, 4) and str(w["none"].dtype).endswith("float32")
    with loader.layer(1) as w:
        assert tuple(w["none"].shape) == (2, 0)


@pytest.mark.parametrize("with_torch", [True, False])
def test_numbers_that_end_inside_a_byte_are_flat_bytes(store, tmp_path, monkeypatch, with_torch):
    if with_torch:
        torch = pytest.importorskip("torch")
    else:
        pytest.importorskip("numpy")
        monkeypatch.setattr(nvme_gpu._buffers, "torch", lambda: None)
    tensors = {
        "m.0.even": ("F4", [2, 8], [2, 4]),
        "m.0.odd": ("F4", [2, 3], [3]),
        "m.0.six": ("F6_E2M3", [2, 2], [3]),
        "m.0.rows": ("F6_E3M2", [2, 4], [2, 3]),
        "m.0.fnuz": ("F8_E5M2FNUZ", [2, 3], [2, 3]),
    }
    values, parts = iter(range(256)), {}
    for name, (dtype, shape, stored) in tensors.items():
        parts[name] = (name, dtype, shape, bytes(itertools.islice(values, math.prod(stored))))
    path = tmp_path / "packed.safetensors"
    path.write_bytes(file_bytes(parts.values()))
    with nvme_gpu.LayerLoader(nvme_gpu.import_file(store, path)).layer(0) as w:
        for name, (_, _, stored) in tensors.items():
            array = w[name]
            assert list(array.shape) == stored, name
            flat = array.view(torch.uint8) if with_torch else array.view("uint8")
            assert flat.reshape(-1).tolist() == list(parts[name][3]), name


def test_a_manifest_verifies_layers(tmp_path):
    path = model(tmp_path / "m.safetensors")
    manifest = tmp_path / "m.manifest"
    seen = []
    nvme_gpu.write_manifest(path, manifest, progress=lambda *both: seen.append(both))
    assert seen[-1] == (path.stat().st_size,) * 2
    with nvme_gpu.open(SIM) as store:
        catalog = nvme_gpu.import_file(store, path, 4096)
        loader = nvme_gpu.LayerLoader(catalog, manifest=manifest)
        assert loader.path["verified_by"] == "host"
        for index in range(LAYERS):
            with loader.layer(index) as w:
                assert is_right(index, w["w"].tolist())
        assert loader.stats()["verified"] > 0
        wrong = catalog["m.layers.3.w"]
        first = store.read(1, wrong.offset + 5)
        store.write(bytes([first[0] ^ 1]), wrong.offset + 5)
        loader = nvme_gpu.LayerLoader(catalog, manifest=str(manifest))
        for index in range(LAYERS):
            try:
                with loader.layer(index) as w:
                    assert index != 3 and is_right(index, w["w"].tolist())
            except nvme_gpu.NvmeGpuError as error:
                assert index == 3 and error.code == "mismatch" and "layer 3 (m.layers.3.)" in error.cause
        store.write(b"\0", 4096 + 9)
        with pytest.raises(nvme_gpu.NvmeGpuError, match="not the manifest's file"):
            nvme_gpu.LayerLoader(catalog, manifest=manifest)
    manifest.write_text("{}")
    with pytest.raises(nvme_gpu.Usage, match="not a manifest"), nvme_gpu.catalog(path) as catalog:
        nvme_gpu.LayerLoader(catalog, manifest=manifest)


def longest_gap(work) -> float:
    """The longest time in which no Python ran while ``work`` did, as a part of the time that it took."""
    gap, is_over = 0.0, threading.Event()

    def tick() -> None:
        nonlocal gap
        last = time.monotonic()
        while not is_over.is_set():
            time.sleep(0.002)
            now = time.monotonic()
            gap, last = max(gap, now - last), now

    ticker = threading.Thread(target=tick)
    begin = time.monotonic()
    ticker.start()
    try:
        work()
    finally:
        is_over.set()
        ticker.join()
    return gap / (time.monotonic() - begin)


def test_no_call_holds_the_gil_while_another_waits_for_a_read(tmp_path):
    """close() waits for layers that are read ahead. What another thread asks meanwhile must not stop all of Python."""
    path = model(tmp_path / "m.safetensors")

    def wait(latency: int) -> tuple[float, int]:
        asked = 0
        with nvme_gpu.open(f"sim:mem?size=16MiB&latency={latency}ms", timeout_ms=600_000) as store:
            catalog = nvme_gpu.import_file(store, path)
            loader = nvme_gpu.LayerLoader(catalog, "cpu")

            def take() -> None:
                for number in (0, 1):
                    with loader.layer(number):
                        pass
                loader.close()

            def all_of_it() -> None:
                nonlocal asked
                thread = threading.Thread(target=take)
                thread.start()
                while thread.is_alive():
                    loader.stats(), repr(loader), store.stats(), store.path
                    asked += 1
                    thread.join(0.01)

            return longest_gap(all_of_it), asked

    # A call that holds the GIL for a read takes a third of the time or more, however slow the machine is.
    for latency in (300, 1_000, 3_000):
        gap, asked = wait(latency)
        if gap < 0.2 and asked > 3:
            return
    pytest.fail(f"no Python ran for {gap:.0%} of the time; it asked {asked} times")
