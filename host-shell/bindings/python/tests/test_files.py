"""Files of an ext4 on a store: seeds of the reader's fuzz target, and images that mke2fs makes."""

from __future__ import annotations

import io
import os
import pickle
import stat
from pathlib import Path

import pytest

import nvme_gpu
from conftest import SIM_GPU, python, stand_in

CORPUS = Path(__file__).parents[4] / "fuzz/corpus/ext4"
LAYERS, ROWS, WIDTH = 4, 24, 33
MODEL = "/models/model.safetensors"


def image(seed):
    """The image of a seed: its size, then numbers of blocks with what they hold."""
    data = (CORPUS / seed).read_bytes()
    blocks = bytearray((int.from_bytes(data[:2], "little") + 4) * 1024)
    for at in range(2, len(data), 1026):
        place = int.from_bytes(data[at : at + 2], "little") * 1024
        blocks[place : place + 1024] = data[at + 2 : at + 1026]
    return bytes(blocks)


@pytest.fixture
def drive(tmp_path):
    """A drive whose ext4 has a model in eight pieces, among other files."""
    path = tmp_path / "drive.img"
    path.write_bytes(image("pieces"))
    return f"sim:{path}"


@pytest.fixture
def volume(drive):
    with nvme_gpu.Volume(drive) as opened:
        yield opened


def is_right(layer, values):
    flat = [number for row in values for number in row]
    return flat == [layer * 10_000 + at for at in range(ROWS * WIDTH)]


def test_directories_are_listed_and_inodes_described(volume):
    assert volume.listdir() == ["lost+found", "models"]
    assert volume.listdir(b"models/deep/..") == volume.listdir(Path("/models"))
    kinds = {one.name: one.stat().kind for one in volume.scandir("/models/")}
    assert kinds == {
        "deep": "directory",
        "link": "symlink",
        "model.safetensors": "file",
        "null": "char-device",
        "outside": "symlink",
        "pipe": "fifo",
        "rows.npy": "file",
    }
    entries = {one.name: one for one in volume.scandir("models")}
    assert entries["deep"].is_dir() and entries["link"].is_symlink() and entries["rows.npy"].is_file()
    assert not entries["link"].is_file() and not entries["pipe"].is_dir()
    assert entries["deep"].path == "models/deep" and "directory" in repr(entries["deep"])
    found = volume.stat("/models/rows.npy")
    assert found == entries["rows.npy"].stat()
    assert (found.st_size, found.st_nlink, found.st_uid, found.generation) == (928, 1, 0, 0)
    assert stat.filemode(found.st_mode) == "-rw-r--r--" and found.flags == ("extents",)
    assert 1_700_000_000 < found.st_mtime_ns / 1e9 < 1 << 34 and found.st_ctime_ns >= found.st_mtime_ns
    assert volume.readlink("/models/link") == "deep/odd"
    assert volume.stat("/models/link").st_size == 2500
    assert volume.stat("/models/link", follow_symlinks=False).kind == "symlink"
    assert volume.exists("/models/link") and not volume.exists("/models/outside") and not volume.exists("/none")
    info = volume.info
    assert (info["block_bytes"], info["blocks"], info["damage"]) == (1024, 160, None)
    assert len(info["uuid"]) == 36 and info["uuid"].count("-") == 4
    assert "Volume on" in repr(volume)


def test_a_file_is_a_file_of_python(volume):
    odd = bytes(at * 7 % 251 for at in range(2500))
    with volume.open("/models/deep/odd") as file:
        assert (file.nbytes, file.name, file.readable(), file.seekable()) == (2500, "/models/deep/odd", True, True)
        assert file.read(10) == odd[:10] and file.tell() == 10
        assert file.seek(-5, io.SEEK_END) == 2495 and file.read() == odd[-5:] and file.read(3) == b""
        assert file.seek(2, io.SEEK_CUR) == 2502 and file.read() == b"" and file.readinto(bytearray(5)) == 0
        file.seek(1)
        into = bytearray(3000)
        assert file.readinto(into) == 2499 and into[:2499] == odd[1:]
        assert file.readinto(bytearray()) == 0
        assert file.pread(4, 2498) == odd[2498:] and file.pread(4, 1 << 60) == b"" and file.tell() == 2500
        file.seek(0)
        assert io.BufferedReader(file, 100).read() == odd
    assert file.closed and "closed" in repr(file)
    assert volume.read("/models/link") == odd
    assert volume.read("/models/deep/odd", 2400, 7) == odd[2400:2407]
    assert volume.read("/models/deep/odd", 2499, 7) == odd[2499:]
    for call in (file.tell, file.check_unchanged, lambda: file.pread(1, 0), lambda: file.seek(0), file.extents):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_numpy_loads_from_a_drive(volume):
    numpy = pytest.importorskip("numpy")
    with volume.open("/models/rows.npy") as file:
        loaded = numpy.load(file)
    assert (loaded == numpy.arange(200, dtype="float32").reshape(50, 4)).all()


def test_extents_say_where_the_data_lie(volume):
    extents = volume.extents(MODEL)
    assert len(extents) == 8 and all(one.written for one in extents)
    data = b"".join(volume.store.read(one.nbytes, one.place) for one in extents)
    whole = volume.read(MODEL)
    assert data[: len(whole)] == whole
    with volume.open(MODEL) as file:
        assert file.extents() == extents and file.store is volume.store
        pieces = file.pieces(1000, 3000)
        assert b"".join(volume.store.read(nbytes, place) for place, nbytes in pieces) == whole[1000:4000]
        assert len(pieces) == 4 and file.pieces(5, 0) == []
        for offset, nbytes in ((0, len(whole) + 1), (len(whole), 1), ((1 << 64) - 1, 1)):
            with pytest.raises(nvme_gpu.Usage):
                file.pieces(offset, nbytes)


def test_tensors_are_tables_where_they_lie(volume, drive):
    numpy = pytest.importorskip("numpy")
    catalog = nvme_gpu.catalog(volume.open("/models/rows.npy"))
    entry = catalog["rows"]
    assert (entry.shape, entry.offset, entry.pieces[0][1], len(entry.pieces)) == ((50, 4), 128, 800, 1)
    assert entry.as_table()[[49, 0]].tolist() == [[196, 197, 198, 199], [0, 1, 2, 3]]
    assert entry.read() == numpy.arange(200, dtype="float32").tobytes()
    volume.close()
    with nvme_gpu.catalog(f"{drive}:{MODEL}") as catalog:
        assert catalog.format == "safetensors" and len(catalog) == 2 * LAYERS + 1
        entry = catalog["m.layers.1.w"]
        assert len(entry.pieces) > 2
        assert numpy.frombuffer(entry.read(), "float32").tolist() == [10_000 + at for at in range(ROWS * WIDTH)]
        assert is_right(1, entry.as_table()[:].tolist())
        store = catalog.store
    assert store.closed


def test_a_path_of_this_machine_is_a_catalog(tmp_path):
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "a.npy", numpy.arange(12, dtype="int32").reshape(3, 4))
    with nvme_gpu.catalog(tmp_path / "a.npy", queues=2) as catalog:
        assert catalog["array"].as_table()[2].tolist() == [8, 9, 10, 11]
        assert catalog["array"].read() == numpy.arange(12, dtype="int32").tobytes()
        store = catalog.store
    assert store.closed
    with pytest.raises(nvme_gpu.NotFound):
        nvme_gpu.catalog(tmp_path / "none.npy")
    (tmp_path / "bad").write_bytes(bytes(100))
    with pytest.raises(nvme_gpu.Usage):
        nvme_gpu.catalog(tmp_path / "bad")


def test_layers_of_a_file_in_pieces_are_loaded(drive):
    with nvme_gpu.catalog(f"{drive}:{MODEL}") as catalog:
        loader = nvme_gpu.LayerLoader(catalog, "cpu", slots=2)
        assert loader.names == tuple(f"m.layers.{one}." for one in range(LAYERS))
        for index in [*range(LAYERS)] * 2:
            with loader.layer(index) as layer:
                assert is_right(index, layer["w"].tolist())
                assert len(layer["b"]) == 3 and layer.nbytes >= ROWS * WIDTH * 4
        loader.check()
    with pytest.raises(nvme_gpu.Usage):
        loader.layer(0).__enter__()


def test_layers_of_a_file_in_pieces_are_loaded_to_a_gpu(drive):
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA: LD_LIBRARY_PATH with its libcuda.so.1")
    # Without torch, which would ask for a GPU of its own.
    out = python(
        f"""
        import ctypes
        import nvme_gpu
        with nvme_gpu.catalog("{drive}?{SIM_GPU.split("&", 1)[1]}:{MODEL}", gpu=0) as catalog:
            loader = nvme_gpu.LayerLoader(catalog, "cuda", slots=2)
            for index in [*range({LAYERS})] * 2:
                with loader.layer(index) as layer:
                    layer.check()
                    found = layer["w"].__cuda_array_interface__
                    assert found["shape"] == ({ROWS}, {WIDTH})
                    memory = (ctypes.c_float * {ROWS * WIDTH}).from_address(found["data"][0])
                    assert list(memory) == [index * 10_000 + at for at in range({ROWS * WIDTH})]
            loader.check()
            print(loader.path["mover"])
        """
    ).stdout
    assert "warps of the GPU" in out


def test_a_layer_with_a_hole_is_refused(tmp_path):
    (tmp_path / "holes.img").write_bytes(image("fragments"))
    with nvme_gpu.Volume(f"file:{tmp_path}/holes.img") as volume:
        extents = volume.extents("/f")
        assert [one.written for one in extents] == [True] * 9 + [False]
        assert volume.read("/f", 1024, 10) == bytes(10)
        with volume.open("/f") as file, pytest.raises(nvme_gpu.Usage, match="do not all lie"):
            file.pieces(0, 2048)


def test_a_partition_is_named_by_its_number(tmp_path):
    blocks = image("plain")
    disk = tmp_path / "disk.img"
    disk.write_bytes(parted(blocks))
    for volume in (
        nvme_gpu.Volume(f"sim:{disk}?part=2&block=512"),
        nvme_gpu.Volume(f"file:{disk}", 2),
        nvme_gpu.Volume(f"sim:{disk}?block=512", part=2, queues=1),
    ):
        with volume:
            assert volume.read("/far") == b"data" * 10
            place = volume.extents("/f")[0].place
            assert volume.store.read(40, place) == b"data" * 10 and place >= 40 * 512
    with nvme_gpu.open(f"sim:{disk}?block=512", read_only=True) as store:
        with pytest.raises(nvme_gpu.Usage, match="no partition 3"):
            nvme_gpu.Volume(store, 3)
        with pytest.raises(nvme_gpu.NvmeGpuError, match="no ext4"):
            nvme_gpu.Volume(store)
        with pytest.raises(TypeError, match="open already"):
            nvme_gpu.Volume(store, 2, queues=1)
        assert nvme_gpu.Volume(store, 2).exists("/l") and not store.closed
    with pytest.raises(nvme_gpu.Usage, match="twice"):
        nvme_gpu.Volume(f"sim:{disk}?part=2&block=512", 2)


def parted(blocks):
    """A GPT of 512-byte blocks whose second partition, from block 40 on, holds ``blocks``."""
    import struct
    import uuid
    import zlib

    size = 40 * 512 + len(blocks) + 40 * 512
    disk = bytearray(size)
    last = size // 512 - 1
    entries = bytearray(128 * 128)
    for number, (first, end) in enumerate([(34, 39), (40, 39 + len(blocks) // 512)]):
        entry = uuid.UUID(int=7).bytes_le + uuid.UUID(int=number + 1).bytes_le + struct.pack("<QQQ", first, end, 0)
        entries[number * 128 : number * 128 + len(entry)] = entry
    # From block 34 on there is room for data: the entries have 32 blocks.
    for own, other, at in ((1, last, 2), (last, 1, last - 32)):
        disk[at * 512 : at * 512 + len(entries)] = entries
        head = struct.pack("<8s4I4Q16sQ3I", b"EFI PART", 0x10000, 92, 0, 0, own, other, 34, last - 33, bytes(16), at, 128, 128, zlib.crc32(entries))
        head = head[:16] + zlib.crc32(head).to_bytes(4, "little") + head[20:]
        disk[own * 512 : own * 512 + len(head)] = head
    disk[510:512] = b"\x55\xaa"
    disk[446 + 4] = 0xEE
    disk[40 * 512 : 40 * 512 + len(blocks)] = blocks
    return bytes(disk)


def test_what_is_not_there_or_not_read_is_refused(volume, drive, tmp_path):
    cases = (
        (FileNotFoundError, lambda: volume.stat("/none")),
        (nvme_gpu.NotFound, lambda: volume.open("/models/none")),
        (nvme_gpu.NotFound, lambda: volume.listdir("/models/outside")),
        (nvme_gpu.NotFound, lambda: volume.stat("/a\0b")),
        (nvme_gpu.Usage, lambda: volume.stat("/models/rows.npy/x")),
        (nvme_gpu.Usage, lambda: volume.listdir("/models/rows.npy")),
        (nvme_gpu.Usage, lambda: volume.open("/models")),
        (nvme_gpu.Usage, lambda: volume.open("/models/pipe")),
        (nvme_gpu.Usage, lambda: volume.readlink("/models")),
        (nvme_gpu.Usage, lambda: volume.read("/models/rows.npy", -1)),
        (nvme_gpu.Usage, lambda: volume.open("/models/rows.npy").seek(-1)),
        (nvme_gpu.Usage, lambda: volume.open("/models/rows.npy").seek(0, 9)),
        (nvme_gpu.Usage, lambda: nvme_gpu.catalog(volume.open("/models/deep/odd"))),
        (nvme_gpu.Usage, lambda: nvme_gpu.catalog(volume.open("/models/rows.npy"), 8)),
        (nvme_gpu.NotFound, lambda: nvme_gpu.catalog("sim:none.img:/x")),
        (nvme_gpu.Usage, lambda: nvme_gpu.Volume("drive.img")),
        (nvme_gpu.Usage, lambda: nvme_gpu.Volume(drive, 0)),
        (nvme_gpu.Usage, lambda: nvme_gpu.Volume(f"{drive}?part=x")),
        (TypeError, lambda: volume.stat(5)),
        (TypeError, lambda: nvme_gpu.catalog(5)),
        (TypeError, lambda: nvme_gpu.catalog(volume.open(MODEL), queues=1)),
        (TypeError, lambda: nvme_gpu.Volume(None)),
        (nvme_gpu.Usage, lambda: volume.open("/models/rows.npy").readinto(b"read-only")),
    )
    for number, (kind, call) in enumerate(cases):
        with pytest.raises(kind):
            call()
            pytest.fail(f"case {number}")
    with pytest.raises(nvme_gpu.NotFound) as caught:
        volume.stat("/none")
    assert (caught.value.code, caught.value.errno) == ("file", 2) and caught.value.remedy and "/none" in caught.value.cause
    for one in (volume, volume.open(MODEL), nvme_gpu.catalog(volume.open(MODEL))):
        with pytest.raises(nvme_gpu.Usage, match="spawn"):
            pickle.dumps(one)
    broken = bytearray(image("checksums"))
    broken[1024 + 0x78] ^= 1
    (tmp_path / "broken.img").write_bytes(broken)
    with pytest.raises(nvme_gpu.NvmeGpuError, match="checksum") as caught:
        nvme_gpu.Volume(f"sim:{tmp_path}/broken.img")
    assert caught.value.code == "device" and "e2fsck" in caught.value.remedy
    # The store that was opened for it is closed.
    nvme_gpu.open(f"sim:{tmp_path}/broken.img").close()


def test_small_files_in_their_inode_have_no_extents(tmp_path):
    (tmp_path / "inline.img").write_bytes(image("inline"))
    with nvme_gpu.Volume(f"sim:{tmp_path}/inline.img") as volume:
        assert volume.read("/f") == b"i" * 100 and "inline_data" in volume.stat("/f").flags
        with pytest.raises(nvme_gpu.Usage, match="inode"):
            volume.extents("/f")


def test_a_store_that_is_closed_closes_what_lies_on_it(tmp_path, drive):
    store = nvme_gpu.open(drive, read_only=True)
    volume = nvme_gpu.Volume(store)
    file = volume.open(MODEL)
    catalog = nvme_gpu.catalog(file)
    store.close()
    for call in (
        volume.listdir,
        lambda: volume.open(MODEL),
        lambda: volume.info,
        file.check_unchanged,
        file.read,
        lambda: catalog["embed"].pieces,
        lambda: nvme_gpu.LayerLoader(catalog),
    ):
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            call()
    # The device is free: a drive has one store.
    with nvme_gpu.Volume(drive) as again:
        kept = nvme_gpu.catalog(again.open(MODEL))
        again_file = again.open("/models/rows.npy")
        again.close()
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            again_file.read()
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        kept["embed"].read()
    nvme_gpu.open(drive).close()


def test_a_file_that_changes_is_found(drive):
    with nvme_gpu.open(drive) as store:
        volume = nvme_gpu.Volume(store)
        file = volume.open("/models/rows.npy")
        file.check_unchanged()
        whole = store.read(store.nbytes, 0)
        size = (928).to_bytes(4, "little")
        at = next(at for at in range(0, len(whole) - 4, 4) if whole[at : at + 4] == size and at % 128 == 4)
        store.write((929).to_bytes(4, "little"), at)
        with pytest.raises(nvme_gpu.NvmeGpuError) as caught:
            file.check_unchanged()
        assert caught.value.code == "mismatch"


def test_names_that_are_no_text_are_escaped(tmp_path):
    blocks = bytearray(image("pieces"))
    at = blocks.index(b"rows.npy")
    blocks[at] = 0xFF
    (tmp_path / "odd.img").write_bytes(blocks)
    with nvme_gpu.Volume(f"sim:{tmp_path}/odd.img") as volume:
        name = os.fsdecode(b"\xffows.npy")
        assert name in volume.listdir("/models") and volume.stat(f"/models/{name}").st_size == 928
        assert volume.open(b"/models/\xffows.npy").nbytes == 928


def test_an_error_of_the_drive_is_raised_and_the_volume_goes_on(tmp_path, drive):
    path = drive.removeprefix("sim:")
    met = 0
    for nth in range(1, 40):
        try:
            with nvme_gpu.Volume(f"sim:{path}?fault=status:0x281@op=read,nth={nth}") as volume:
                try:
                    volume.read(MODEL)
                except nvme_gpu.Status as error:
                    assert (error.sct, error.sc) == (2, 0x81)
                    assert len(volume.read(MODEL)) == 13_360
                    met += 1
        except nvme_gpu.Status as error:
            assert nth <= 2 and error.sc == 0x81
    assert met > 5


def test_a_child_of_a_fork_leaves_the_volume_alone(drive):
    python(
        f"""
        import os, nvme_gpu
        with nvme_gpu.Volume({drive!r}) as volume:
            file = volume.open("/models/rows.npy")
            child = os.fork()
            if not child:
                for call in (volume.listdir, file.read, lambda: volume.info):
                    try:
                        call()
                    except nvme_gpu.Usage as error:
                        assert "fork" in error.cause
                    else:
                        os._exit(1)
                del file, volume
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert len(file.read()) == 928
        """
    )
