"""fastsafetensors with this library's copier: files, files of a drive, parts of files, and what goes wrong."""

from __future__ import annotations

import ctypes

import pytest

import nvme_gpu
from conftest import drain, python, stand_in
from nvme_gpu import _files
from test_files import LAYERS, MODEL, image, is_right

torch = pytest.importorskip("torch")
fst = pytest.importorskip("fastsafetensors")
import nvme_gpu.fastsafetensors as plugin  # noqa: E402
from fastsafetensors.copier import copier_class_of, create_copier_constructor  # noqa: E402
from fastsafetensors.frameworks import get_framework_op  # noqa: E402
from fastsafetensors.st_types import Device, DeviceType, DType  # noqa: E402

ON_GPU = Device(DeviceType.CUDA, 0)
MORE = {"nogds": True, "device": "cpu"}


@pytest.fixture(autouse=True)
def registered():
    plugin.register()
    yield
    plugin.unregister()
    drain()
    assert fst.live_allocation_count() == 0


@pytest.fixture
def tensors():
    random = torch.Generator().manual_seed(3)
    return {
        "a": torch.randn(300, 7, generator=random),
        "b": torch.arange(5000, dtype=torch.int64),
        "c": torch.randn(9, 11, generator=random).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "odd": torch.arange(77, dtype=torch.uint8),
        "one": torch.tensor(3.5, dtype=torch.float16),
    }


@pytest.fixture
def file(tmp_path, tensors):
    save = pytest.importorskip("safetensors.torch").save_file
    save(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return str(tmp_path / "model.safetensors")


@pytest.fixture
def reads(monkeypatch):
    """What is read from stores: first byte and number."""
    found, real = [], nvme_gpu.Store.read_into

    def read_into(store, buf, offset=0, **more):
        found.append((offset, len(buf) if hasattr(buf, "__len__") else None))
        return real(store, buf, offset, **more)

    monkeypatch.setattr(nvme_gpu.Store, "read_into", read_into)
    return found


def same(found, wanted):
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)


def loader_of(path, **more):
    loader = fst.SafeTensorsFileLoader(None, **MORE, **more)
    loader.add_filenames({0: [path]})
    return loader


def test_a_program_of_fastsafetensors_reads_by_this_library(file, tensors, reads):
    with fst.fastsafe_open(file, **MORE) as opened:
        assert set(opened.keys()) == set(tensors) and opened.metadata()[file] == {"format": "pt"}
        found = {name: opened.get_tensor(name) for name in tensors}
    assert reads and all(same(found[name], tensor) for name, tensor in tensors.items())
    found.clear()
    del reads[:]
    plugin.unregister()
    with fst.fastsafe_open(file, **MORE) as opened:
        assert same(opened.get_tensor("a"), tensors["a"])
    assert not reads


@pytest.mark.parametrize("kind", ["nvme_gpu", "gds", "nogds", "unified"])
def test_every_kind_that_loaders_ask_for_is_ours(kind):
    construct = create_copier_constructor(kind, Device(), framework=get_framework_op("pytorch"), bbuf_size_kb=1)
    assert copier_class_of(construct) is plugin.NvmeCopier
    plugin.unregister()
    if kind == "nogds":
        construct = create_copier_constructor(kind, Device(), framework=get_framework_op("pytorch"))
        assert copier_class_of(construct).__name__ == "NoGdsFileCopier"


def test_a_tensor_filter_reads_its_tensors_alone(file, tensors, reads):
    loader = loader_of(file)
    loader.set_tensor_filter(lambda name: name == "odd")
    buffers = loader.copy_files_to_device()
    assert same(buffers.get_tensor("odd"), tensors["odd"])
    assert [nbytes for _, nbytes in reads] == [77]
    buffers.close()


def test_a_file_is_read_in_blocks(file, tensors, reads):
    buffers = loader_of(file).copy_files_to_device(max_copy_block_size=1000)
    assert len(reads) > 40 and max(nbytes for _, nbytes in reads) == 1000
    assert all(same(buffers.get_tensor(name), tensor) for name, tensor in tensors.items())
    buffers.close()
    with pytest.raises(nvme_gpu.Usage, match="max_copy_block_size is 0"):
        loader_of(file).copy_files_to_device(max_copy_block_size=0)


def test_chunks_of_a_file_are_loaded_one_after_the_other(file, tensors, reads):
    pipeline = fst.ParallelLoader(None, [file], device="cpu", nogds=True, max_batch_bytes=41_000, use_tqdm_on_load=False)
    found = {name: tensor.clone() for name, tensor in pipeline.iterate_weights()}
    pipeline.close()
    assert len(reads) > 1 and max(nbytes for _, nbytes in reads) <= 41_000
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


def test_a_dtype_is_converted(tmp_path, tensors):
    save = pytest.importorskip("safetensors.torch").save_file
    save({"a": tensors["a"]}, tmp_path / "a.safetensors")
    buffers = loader_of(str(tmp_path / "a.safetensors")).copy_files_to_device(dtype=DType.F16)
    assert same(buffers.get_tensor("a"), tensors["a"].half())
    buffers.close()


def test_tensors_are_used_while_others_are_read(file, tensors):
    buffers = loader_of(file).copy_files_to_device(allow_inflight=True, max_copy_block_size=4096)
    assert all(same(buffers.get_tensor(name), tensor) for name, tensor in tensors.items())
    buffers.close()


def drive(tmp_path, extra=""):
    path = tmp_path / "drive.img"
    path.write_bytes(image("pieces"))
    return f"sim:{path}{extra}"


@pytest.mark.parametrize("inflight", [False, True])
def test_a_file_of_a_drive_is_loaded_from_its_pieces(tmp_path, reads, inflight):
    with nvme_gpu.Volume(drive(tmp_path)) as volume:
        plugin.register({"/drive": volume, "/drive/sub": volume})
        loader = loader_of(f"/drive{MODEL}")
        buffers = loader.copy_files_to_device(allow_inflight=inflight)
        for layer in range(LAYERS):
            assert is_right(layer, buffers.get_tensor(f"m.layers.{layer}.w").tolist())
        assert len(reads) == 8, "the data lie in eight pieces"
        buffers.close()
        same_file = loader_of(f"/drive/sub/../sub{MODEL}")
        assert set(same_file.get_keys()) == set(loader.get_keys())
        with pytest.raises(nvme_gpu.NotFound):
            loader_of("/drive/none.safetensors")
        with pytest.raises(nvme_gpu.Usage, match="no header of safetensors"):
            loader_of("/drive/models/rows.npy")


def test_folders_for_volumes_that_cannot_be_are_refused(tmp_path):
    with nvme_gpu.Volume(drive(tmp_path)) as volume:
        for prefix in ("drive", "/a/../b", "/a/"):
            with pytest.raises(nvme_gpu.Usage, match="no folder for a volume"):
                plugin.register({prefix: volume})
    with pytest.raises(TypeError, match="pass a nvme_gpu.Volume"):
        plugin.register({"/drive": "sim:mem"})


def test_a_header_that_is_no_text_is_refused(tmp_path, monkeypatch):
    with nvme_gpu.Volume(drive(tmp_path)) as volume:
        plugin.register({"/drive": volume})
        real = nvme_gpu.DriveFile.pread
        monkeypatch.setattr(nvme_gpu.DriveFile, "pread", lambda *words: real(*words).replace(b"{", b"\xff"))
        with pytest.raises(nvme_gpu.Usage, match="is no text"):
            loader_of(f"/drive{MODEL}")


@pytest.mark.parametrize("inflight", [False, True])
def test_an_error_of_the_drive_is_raised_and_nothing_stays(tmp_path, inflight):
    with nvme_gpu.Volume(drive(tmp_path)) as volume:
        plugin.register({"/drive": volume})
        loader_of(f"/drive{MODEL}")
        volume.open(MODEL).close()
        header = volume.store.stats()["commands"]
    extra = f"?fault=status:0x281@op=read,nth={header + 1}-1000000"
    with nvme_gpu.Volume(drive(tmp_path, extra)) as volume:
        plugin.register({"/drive": volume})
        loader = loader_of(f"/drive{MODEL}")
        if not inflight:
            with pytest.raises(nvme_gpu.Status):
                loader.copy_files_to_device()
            return
        buffers = loader.copy_files_to_device(allow_inflight=True)
        with pytest.raises(nvme_gpu.Status) as first:
            buffers.get_tensor("m.layers.2.w")
        with pytest.raises(nvme_gpu.Status) as second:
            buffers.get_tensor("m.layers.2.w")
        assert first.value is second.value, "known from then on"
        try:
            buffers.close()
        except nvme_gpu.Status:
            pass


def test_a_file_that_became_shorter_is_refused(file):
    loader = loader_of(file)
    with open(file, "r+b") as cut:
        cut.truncate(9000)
    with pytest.raises(nvme_gpu.NvmeGpuError) as caught:
        loader.copy_files_to_device()
    assert caught.value.code == "mismatch" and "9000 bytes" in caught.value.cause
    with pytest.raises(Exception, match="MetadataIncompleteBuffer"):
        loader_of(file)


def test_a_file_that_is_gone_is_not_found(file, tmp_path):
    loader = loader_of(file)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(nvme_gpu.NotFound):
        loader.copy_files_to_device()


def test_a_read_that_cannot_begin_gives_the_memory_back(file, monkeypatch):
    real, calls = nvme_gpu.Store.read_into, []

    def read_into(store, buf, offset=0, **more):
        calls.append(offset)
        if len(calls) == 3:
            raise nvme_gpu.Gone("the device left", "open it again", "gone")
        return real(store, buf, offset, **more)

    monkeypatch.setattr(nvme_gpu.Store, "read_into", read_into)
    framework = get_framework_op("pytorch")
    before = framework.get_mem_used()
    with pytest.raises(nvme_gpu.Gone):
        loader_of(file).copy_files_to_device(max_copy_block_size=4096)
    assert framework.get_mem_used() == before


def test_the_memory_stays_until_reads_have_ended_also_after_an_interrupt(file, monkeypatch):
    ended = []

    class Slow:
        def __init__(self, pending):
            self.pending, self.waits = pending, 0

        def result(self, timeout=None):
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            ended.append(self.pending.result())

    real = nvme_gpu.Store.read_into
    monkeypatch.setattr(nvme_gpu.Store, "read_into", lambda *words, **more: Slow(real(*words, **more)))
    framework = get_framework_op("pytorch")
    free = framework.free_tensor_memory

    def freed(gbuf, device):
        assert ended, "a read is under way"
        free(gbuf, device)

    monkeypatch.setattr(framework, "free_tensor_memory", freed, raising=False)
    with pytest.raises(KeyboardInterrupt):
        loader_of(file).copy_files_to_device()
    assert len(ended) == 1


@pytest.fixture
def on_gpu(monkeypatch):
    """The framework's operations for a GPU whose memory is that of the host, as the stand-in's is."""
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA: LD_LIBRARY_PATH with its libcuda.so.1")
    framework = get_framework_op("pytorch")
    real, free = framework.alloc_tensor_memory, framework.free_tensor_memory
    lend = ctypes.CDLL("libcuda.so.1").fake_cuda_lend

    def alloc(length, _):
        gbuf = real(length, Device())
        lend(ctypes.c_uint64(gbuf.get_base_address()), ctypes.c_size_t(length), 0)
        return gbuf

    def give_back(gbuf, _):
        lend(ctypes.c_uint64(gbuf.get_base_address()), ctypes.c_size_t(0), 0)
        free(gbuf, Device())

    monkeypatch.setattr(framework, "alloc_tensor_memory", alloc, raising=False)
    monkeypatch.setattr(framework, "free_tensor_memory", give_back, raising=False)
    return framework


def copied(framework, path, device=ON_GPU, **options):
    """The tensors of a file through memory of the stand-in's GPU, and the buffer."""
    construct = create_copier_constructor("nvme_gpu", device, framework=framework)
    copier = construct(fst.SafeTensorsMetadata.from_file(path, framework), device, framework)
    buffer = copier.submit_io(False, 1 << 30)
    copier.finish_io()
    # This torch has no GPU: the same memory as tensors of the host.
    copier.device = Device()
    return copier.wait_io(buffer), buffer


def test_a_file_comes_into_memory_of_the_gpu(on_gpu, file, tensors, monkeypatch):
    opened, real = [], _files._open
    monkeypatch.setattr(_files, "_open", lambda *words, **more: opened.append(more) or real(*words, **more))
    plugin.register(gpu_blocks=2)
    found, buffer = copied(on_gpu, file)
    assert opened == [{"gpu_blocks": 2, "gpu": 0, "read_only": True}]
    assert all(same(found[name].get_raw(), tensor) for name, tensor in tensors.items())
    del found
    on_gpu.free_tensor_memory(buffer, ON_GPU)


def test_a_file_of_a_drive_comes_into_memory_of_the_gpu(on_gpu, tmp_path):
    device = drive(tmp_path, "?queues=32&threads=2")
    with nvme_gpu.Volume(device, gpu=0) as volume:
        plugin.register({"/drive": volume})
        found, buffer = copied(on_gpu, f"/drive{MODEL}")
        for layer in range(LAYERS):
            assert is_right(layer, found[f"m.layers.{layer}.w"].get_raw().tolist())
        on_gpu.free_tensor_memory(buffer, ON_GPU)
        with pytest.raises(nvme_gpu.Usage, match="lies on GPU 1"):
            copied(on_gpu, f"/drive{MODEL}", Device(DeviceType.CUDA, 1))


def test_a_gpu_without_a_number_is_the_current_one(on_gpu, file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    construct = create_copier_constructor("nvme_gpu", ON_GPU, framework=on_gpu)
    copier = construct(fst.SafeTensorsMetadata.from_file(file, on_gpu), Device(DeviceType.CUDA), on_gpu)
    assert copier._gpu() == 3


def test_without_fastsafetensors_the_import_says_how_to_get_it():
    done = python(
        """
        import sys
        sys.modules["fastsafetensors"] = None
        try:
            import nvme_gpu.fastsafetensors
        except ImportError as error:
            print(error)
        """
    )
    assert "pip install 'fastsafetensors>=0.5,<0.6'" in done.stdout
