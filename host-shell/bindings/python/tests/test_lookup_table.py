"""One table over many tensors: shards in files, extents of an ext4, stripes and stores of several members."""

from __future__ import annotations

import json

import pytest

import nvme_gpu
from conftest import Device, python
from safetensors_file import file_bytes
from test_files import LAYERS, MODEL, ROWS, WIDTH, image

np = pytest.importorskip("numpy")

SHARDS, FILES, SHARD_ROWS, COLUMNS = 128, 10, 7, 160
NAME = "model.layers.1.ple.shard_{}.weight"
GPU = "queues=64&threads=2"
TYPES = {"F8_E4M3": "uint8", "F32": "float32", "U8": "uint8", "BF16": "uint16"}


def safetensors(path, tensors, pad=0):
    """A file of (name, type, array); its data begin ``pad`` bytes after a multiple of 8."""
    parts = [(name, dtype, values.shape, values.tobytes()) for name, dtype, values in tensors]
    path.write_bytes(file_bytes(parts, align=8, shift=pad))


def rows_of_shards(count=SHARDS, columns=COLUMNS):
    values = np.random.default_rng(7).integers(0, 256, (count * SHARD_ROWS, columns), "uint8")
    return values, np.split(values, count)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with the shards, not in their order, in ten files with other tensors between; their index; the rows."""
    folder = tmp_path_factory.mktemp("checkpoint")
    values, shards = rows_of_shards()
    order = np.random.default_rng(1).permutation(SHARDS)
    placed = {}
    for file, numbers in enumerate(np.array_split(order, FILES)):
        tensors = [(NAME.format(number), "F8_E4M3", shards[number]) for number in numbers]
        tensors.insert(1, (f"other.{file}", "F32", np.full(file, 0.5, "float32")))
        name = f"model-{file:05}-of-{FILES:05}.safetensors"
        safetensors(folder / name, tensors, pad=file % 2 * 3)
        placed |= {tensor: name for tensor, _, _ in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return index, values


def paths_of(checkpoint):
    return sorted(checkpoint[0].parent.glob("*.safetensors"))


def is_same(table, values, ids):
    found = table.gather(ids)
    assert found.tobytes() == values[np.asarray(ids)].tobytes()


IDS = [0, SHARDS * SHARD_ROWS - 1, 6, 7, 500, 3, 3, 13, 14, 889]


def test_a_checkpoint_is_one_table(checkpoint):
    index, values = checkpoint
    for source in (index, str(index), paths_of(checkpoint)):
        table = nvme_gpu.lookup_table(source, NAME, shape=values.shape, dtype="float8_e4m3fn", queues=2)
        assert table.shape == values.shape and table.dtype == "float8_e4m3fn" and table.row_bytes == COLUMNS
        before = table.store.stats()["bytes"]
        is_same(table, values, IDS)
        assert table.store.stats()["bytes"] - before < len(IDS) * 3 * 4096, "rows alone are read"
        is_same(table, values, list(range(len(values)))[::-1])
        table.store.close()


def test_names_say_the_order_of_the_rows(checkpoint):
    index, values = checkpoint
    names = [NAME.format(number) for number in (5, 0, 127)]
    table = nvme_gpu.lookup_table(index, names)
    wanted = np.concatenate([np.split(values, SHARDS)[number] for number in (5, 0, 127)])
    is_same(table, wanted, range(21))
    table.store.close()
    table = nvme_gpu.lookup_table(index, NAME.format(9), to="float32")
    single = nvme_gpu.catalog(next(path for path in paths_of(checkpoint) if NAME.format(9).encode() in path.read_bytes()))
    wanted = single[NAME.format(9)].as_table().gather(range(7), dtype="float32")
    assert table[range(7)].tobytes() == wanted.tobytes()
    single.close()
    table.store.close()


def test_ids_out_of_range_are_zeros_with_a_status(checkpoint):
    index, values = checkpoint
    table = nvme_gpu.lookup_table(index, NAME)
    ids = np.array([0, -1, len(values), 1 << 31, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1, 895], "int64")
    status, out = np.full(8, 9, "int32"), np.full((8, COLUMNS), 7, "uint8")
    with pytest.raises(nvme_gpu.Usage) as caught:
        table.gather(ids, out=out, status=status)
    assert caught.value.row == 1 and caught.value.id == -1
    assert status.tolist() == [0, -1, -1, -1, -1, -1, -1, 0]
    assert (out[[0, 7]] == values[[0, 895]]).all() and not out[1:7].any()
    table.store.close()


def test_bad_checkpoints_are_refused_before_a_row_is_read(checkpoint, tmp_path):
    _, shards = rows_of_shards(3)
    paths = []
    for at, shard in enumerate(shards):
        safetensors(tmp_path / f"{at}.safetensors", [(f"s{at}", "U8", shard)])
        paths.append(tmp_path / f"{at}.safetensors")

    def refused(match, source, names="s{}", **given):
        with pytest.raises(nvme_gpu.Usage, match=match):
            nvme_gpu.lookup_table(source, names, **given)

    refused(r"\(21, 160\), not \(20, 160\)", paths, shape=(20, COLUMNS))
    refused("dtype uint8, not float32", paths, dtype="float32")
    refused("no file has the tensor s1, and there is one with the number 2", paths[::2])
    refused("no file has the tensor 's2'", paths[:2], ["s0", "s1", "s2"])
    refused("no file has the tensor 'x0'", paths, "x{}")
    refused("named twice", paths, ["s0", "s1", "s0"])
    refused("names is empty", paths, [])
    refused("in two of the files", [*paths, paths[0]])
    refused("no files are named", [])
    safetensors(tmp_path / "wide", [("s3", "U8", np.zeros((7, 161), "uint8"))])
    refused(r"rows of 's3' have the shape \(161,\)", [*paths, tmp_path / "wide"])
    safetensors(tmp_path / "other", [("s3", "BF16", np.zeros((7, 160), "uint16"))])
    refused("'s3' is of the dtype bfloat16", [*paths, tmp_path / "other"])
    safetensors(tmp_path / "number", [("s3", "F32", np.zeros((), "float32"))])
    refused("single number", [*paths, tmp_path / "number"])
    whole = paths[1].read_bytes()
    for name, data in (("short", whole[:-1]), ("long", whole + b"x"), ("header", whole[:20]), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises((nvme_gpu.Usage, nvme_gpu.NvmeGpuError)):
            nvme_gpu.lookup_table([paths[0], tmp_path / name, paths[2]], "s{}")
    for text in ("{}", "[]", '{"weight_map": {"a": "../b"}}', '{"weight_map": {"a": 1}}', "x"):
        (tmp_path / "i.json").write_text(text)
        refused("no index", tmp_path / "i.json")
    with pytest.raises(nvme_gpu.NotFound):
        nvme_gpu.lookup_table([paths[0], tmp_path / "none"], "s{}")
    with pytest.raises(TypeError, match="options"):
        with nvme_gpu.open(f"file:{paths[0]}", read_only=True) as store:
            nvme_gpu.lookup_table(store, "s{}", queues=2)
    with pytest.raises(TypeError, match="a name is"):
        nvme_gpu.lookup_table(paths, ["s0", 1])


def test_tensors_in_extents_of_an_ext4_are_one_table(tmp_path):
    drive = tmp_path / "drive.img"
    drive.write_bytes(image("pieces"))
    names = [f"m.layers.{at}.w" for at in range(LAYERS)]
    values = np.concatenate([at * 10_000 + np.arange(ROWS * WIDTH, dtype="float32") for at in range(LAYERS)])
    values = values.reshape(-1, WIDTH)
    table = nvme_gpu.lookup_table(f"sim:{drive}:{MODEL}", names, shape=values.shape, dtype="float32")
    is_same(table, values, range(len(values)))
    table.store.close()
    with nvme_gpu.Volume(f"sim:{drive}") as volume:
        file = volume.open(MODEL)
        for source in (file, nvme_gpu.catalog(file), [file]):
            is_same(nvme_gpu.lookup_table(source, "m.layers.{}.w"), values, [95, 0, 24, 23, 50, 71, 72])


@pytest.fixture
def on_gpu(gpu_store):
    return gpu_store


def of_gpu(found, values, ids):
    return found.tobytes() == values[np.asarray(ids)].tobytes()


def twice_by_cache(store, table, values, ids):
    """Gathers rows through a cache: the second time all of them are in it, unless a write comes between."""
    cached, hits = table.cached(16 << 20), []
    for number in range(4):
        before = store.stats()["cache_hits"]
        assert of_gpu(cached[Device(ids)], values, ids)
        hits.append(store.stats()["cache_hits"] - before)
        if number == 1:
            store.write(store.read(512), 0)
    assert hits[1] == hits[3] == len(ids) and max(hits[0], hits[2]) < len(ids), hits


@pytest.mark.parametrize("ids", [IDS, list(range(SHARDS * SHARD_ROWS))])
def test_the_gpu_gathers_from_a_drive_by_one_launch(tmp_path, checkpoint, on_gpu, ids):
    """The files as they are, one after the other on a drive; those at odd places have rows of no unit."""
    paths = paths_of(checkpoint)
    with nvme_gpu.open(f"sim:mem?size=4MiB&block=512&{GPU}", gpu=0) as store:
        catalogs, at = [], 0
        for path in paths:
            data = path.read_bytes()
            store.write(data, at)
            catalogs.append(nvme_gpu.catalog(store, at, nbytes=len(data)))
            at += len(data) + 5000
        table = nvme_gpu.lookup_table(catalogs, NAME)
        before = store.stats()
        found = table[Device(ids)]
        assert of_gpu(found, checkpoint[1], ids)
        after = store.stats()
        assert after["shared_gathers"] + after["owned_gathers"] == before["shared_gathers"] + before["owned_gathers"] + 1
        assert after["commands"] == before["commands"], "the CPU's queues moved nothing"
        twice_by_cache(store, table, checkpoint[1], ids)
        status = Device([9] * 4, "<i4")
        out = table.gather(Device([len(checkpoint[1]), 1, -5, 1 << 40]), status=status)
        with pytest.raises(nvme_gpu.Usage):
            table.check()
        assert status.tolist() == [-1, 0, -1, -1] and out.tobytes()[COLUMNS : 2 * COLUMNS] == checkpoint[1][1].tobytes()


def test_rows_in_two_extents_go_by_queues_that_blocks_own(on_gpu):
    """Extents of whole blocks, as those of files: rows of 16-byte units lie in two, and in three of 512 bytes."""
    for block, rows in ((512, 96), (4096, 96)):
        with nvme_gpu.open(f"sim:mem?size=8MiB&block={block}&{GPU}", gpu=0) as store:
            values = np.random.default_rng(block).integers(0, 256, (rows, 1040), "uint8")
            data, at, pieces = values.tobytes(), 0, []
            places = np.random.default_rng(3).permutation(1000) * 2 * block
            while at < len(data):
                nbytes = min(block - (16 if not pieces else 0), len(data) - at)
                place = int(places[len(pieces)]) + (16 if not pieces else 0)
                store.write(data[at : at + nbytes], place)
                pieces.append((place, nbytes))
                at += nbytes
            table = nvme_gpu.Table(store, 0, values.shape, "uint8", ranges=pieces)
            for ids in (list(range(rows))[::-1], [0], [95, 3, 3, 1]):
                before = store.stats()
                assert of_gpu(table[Device(ids)], values, ids)
                assert store.stats()["owned_gathers"] == before["owned_gathers"] + 1
                begun = table.prefetch(Device(ids))
                assert of_gpu(begun.result(), values, ids)
                assert store.stats()["begun_gathers"] == before["begun_gathers"] + 1
            # A row in two ranges is read each time.
            cached = table.cached(1 << 20)
            for _ in range(2):
                assert of_gpu(cached[Device(range(rows))], values, range(rows))
            table.check()
            assert table[[5, 2]].tobytes() == values[[5, 2]].tobytes()


def test_rows_with_borders_inside_of_blocks_go_by_shared_queues(on_gpu):
    with nvme_gpu.open(f"sim:mem?size=1MiB&block=512&{GPU}", gpu=0) as store:
        values = np.random.default_rng(3).integers(0, 256, (64, 48), "uint8")
        data, pieces = values.tobytes(), []
        for number, at in enumerate(range(0, len(data), 16)):
            place = (191 - number) * 1024 + 48
            store.write(data[at : at + 16], place)
            pieces.append((place, 16))
        table = nvme_gpu.Table(store, 0, values.shape, "uint8", ranges=pieces)
        ids, before = list(range(63, -1, -1)), store.stats()
        assert of_gpu(table[Device(ids)], values, ids)
        assert store.stats()["shared_gathers"] == before["shared_gathers"] + 1
        begun = table.prefetch(Device(ids))
        assert of_gpu(begun.result(), values, ids)


@pytest.mark.parametrize("device", ["stripe:{}|{}|{}?stripe=1KiB", "joined:{}|{}|{}"])
def test_drives_together_have_one_table(on_gpu, device):
    member = f"sim:mem?size=1MiB&block=512&{GPU}"
    with nvme_gpu.open(device.format(member, member, member), gpu=0, gpu_queues=4) as store:
        assert store.path["data"] == "gpu"
        values, shards = rows_of_shards(30)
        pieces = [((29 - at) * 102_400 + 8 + 4 * at, one.nbytes) for at, one in enumerate(shards)]
        for (place, _), shard in zip(pieces, shards):
            store.write(shard.tobytes(), place)
        table = nvme_gpu.Table(store, 0, values.shape, "uint8", ranges=pieces)
        ids = np.random.default_rng(5).integers(0, len(values), 100).tolist()
        before = store.stats()
        assert of_gpu(table[Device(ids)], values, ids)
        now = store.stats()
        # Members that are joined hold whole shards; a stripe may end inside a row.
        kind = "owned_gathers" if device.startswith("joined") else "shared_gathers"
        assert now[kind] == before[kind] + 1
        is_same(table, values, ids)
        # Of many rows each distinct one is read once.
        many = np.random.default_rng(6).integers(0, len(values), 5000).tolist()
        assert of_gpu(table[Device(many)], values, many)
        assert store.stats()["unique_read"] == now["unique_read"] + len(set(many))


def test_a_host_thread_gathers_from_files_for_the_gpu(checkpoint, on_gpu):
    index, values = checkpoint
    table = nvme_gpu.lookup_table(index, NAME, gpu=0)
    assert table.store.gpu == 0
    assert of_gpu(table[Device(IDS)], values, IDS)
    begun = table.prefetch(Device(IDS))
    assert of_gpu(begun.result(), values, IDS)
    table.store.close()


def test_a_table_ends_with_its_store(checkpoint):
    table = nvme_gpu.lookup_table(checkpoint[0], NAME)
    table.store.close()
    with pytest.raises(ValueError, match="closed"):
        table[[0]]
    python(
        f"""
        import nvme_gpu
        table = nvme_gpu.lookup_table({str(checkpoint[0])!r}, {NAME!r})
        del table
        """
    )
