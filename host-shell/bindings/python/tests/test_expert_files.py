"""The experts of published files: their bytes beside those of the packages safetensors and gguf, their numbers beside those of
torch, transformers, compressed-tensors and gguf."""

import json
import os
import shutil
import subprocess

import pytest

import nvme_gpu
from nvme_gpu import compute
from safetensors_file import file_bytes

np = pytest.importorskip("numpy")

WIDTH, HIDDEN, EXPERTS = 256, 128, 3
MATRICES = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
BANK = "model.layers.0.mlp.experts"


def refused(what, *match):
    with pytest.raises(nvme_gpu.Usage) as caught:
        what()
    for text in match:
        assert text in str(caught.value)


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8).view(dtype)


def safetensors(path, tensors):
    """Writes arrays by name, each with the name of its type in safetensors."""
    path.write_bytes(file_bytes((name, dtype, array.shape, array.tobytes()) for name, (array, dtype) in tensors.items()))
    return path


def of_deepseek_v3(prefix=BANK):
    """The tensors of a layer."""
    found = {}
    for expert in range(EXPERTS):
        for number, (matrix, (rows, columns)) in enumerate(MATRICES.items()):
            name = f"{prefix}.{expert}.{matrix}_proj.weight"
            seed = expert * 3 + number
            weight = random((rows, columns), np.uint8, seed)
            found[name] = weight, "F8_E4M3"
            scales = np.random.default_rng(seed).standard_normal((-(-rows // 128), -(-columns // 128))).astype(np.float32)
            found[f"{name}_scale_inv"] = scales, "F32"
    return found


def as_the_package_has_them(paths):
    package = pytest.importorskip("safetensors", reason="safetensors is not installed")
    found = {}
    for path in paths:
        found |= {name: bytes(about["data"]) for name, about in package.deserialize(path.read_bytes())}
    return found


def same_bytes(layout, wanted):
    """Whether the parts of all experts are the bytes of the tensors, each once."""
    seen = {}
    for expert in range(len(layout)):
        memory = memoryview(layout.read(expert))
        reads = layout.reads(expert)
        store = {read.at: layout.store.read(read.nbytes, read.offset) for read in reads}
        for part in layout.parts(expert):
            found = bytes(memory[part.at : part.at + part.nbytes])
            seen[part.tensor] = seen.get(part.tensor, b"") + found
            read = max((read for read in reads if read.at <= part.at), key=lambda one: one.at)
            begin = part.at - read.at
            in_one = store[read.at][begin : begin + part.nbytes]
            assert in_one == found[: len(in_one)]
    assert seen == {name: wanted[name] for name in seen} and len(seen) > 0


def test_experts_in_shards_are_the_bytes_of_the_package(tmp_path):
    tensors = of_deepseek_v3()
    names = list(tensors)
    halves = names[:7], names[7:]
    shards = [
        safetensors(tmp_path / f"{k}.safetensors", {name: tensors[name] for name in half}) for k, half in enumerate(halves)
    ]
    index = {"weight_map": {name: f"{k}.safetensors" for k, half in enumerate(halves) for name in half}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    wanted = as_the_package_has_them(shards)
    sources = [tmp_path / "model.safetensors.index.json", shards, [str(one) for one in reversed(shards)]]
    for source in sources:
        with compute.ExpertFiles(source) as files:
            assert files.layers == [0] and files.names == [BANK]
            layout = files.layout(0)
            assert (len(layout), layout.width, layout.hidden, layout.layer) == (EXPERTS, WIDTH, HIDDEN, 0)
            same_bytes(layout, wanted)
            assert {one.format for one in layout.matrices(2)} == {"float8_e4m3fn 128x128"}
            assert files.layout(BANK).parts(1) == layout.parts(1)
            refused(lambda: files.layout(1), "layer 1 has no experts", BANK)
            refused(lambda: layout.parts(EXPERTS), "no expert 3")
            refused(lambda: layout.read(0, bytearray(5)), "the memory has 5 bytes")
    with compute.expert_layout(shards, 0) as layout:
        assert layout.nbytes(0) == 3 * WIDTH * HIDDEN + 3 * 2 * 4
    refused(lambda: layout.read(0), "closed")
    refused(lambda: compute.expert_layout([shards[0]], 0), "expert 1 has no", "another one has")
    refused(lambda: compute.expert_layout([shards[0], shards[0]], 0), "is there twice")
    refused(lambda: compute.ExpertFiles([]), "no files")
    # Scales in a file that is not named: bytes are listed, and nothing computes with them.
    weights = {name: tensor for name, tensor in tensors.items() if name.endswith("weight")}
    with compute.expert_layout(safetensors(tmp_path / "weights.safetensors", weights), 0) as layout:
        assert layout.matrices(0)[0].format == "unknown: float8_e4m3fn without scales"
        refused(lambda: layout.unpack(0, "gate"), "without scales", "nothing here computes")
    with nvme_gpu.open("sim:mem?size=16MiB") as store:
        with pytest.raises(TypeError, match="open already: queues"):
            compute.ExpertFiles(store, queues=2)
        first = nvme_gpu.import_file(store, shards[0], 4096)
        second = nvme_gpu.import_file(store, shards[1], 1 << 20)
        refused(lambda: compute.expert_layout(first, 0), "has no")
        refused(lambda: compute.ExpertFiles([first, second]), "several sources")
        whole = nvme_gpu.import_file(store, tmp_path / "model.safetensors.index.json", 2 << 20)
        same_bytes(compute.expert_layout(whole, 0), wanted)


def test_experts_on_the_ext4_of_a_drive_and_on_a_stripe(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    tensors = of_deepseek_v3()
    path = safetensors(folder / "model.safetensors", tensors)
    wanted = as_the_package_has_them([path])
    names = [tmp_path / f"member{k}" for k in (0, 1)]
    for name in names:
        name.write_bytes(bytes(8 << 20))
    with nvme_gpu.open("stripe:" + "|".join(f"sim:{name}" for name in names) + "?stripe=4096", allow_write=True) as store:
        nvme_gpu.import_file(store, path)
        same_bytes(compute.expert_layout(store, 0), wanted)
    program = shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin")
    if program is None:
        pytest.skip("needs mke2fs, of e2fsprogs")
    image = tmp_path / "drive.img"
    subprocess.run([program, "-q", "-F", "-t", "ext4", "-d", folder, image, "16M"], check=True)
    with compute.expert_layout(f"sim:{image}:/model.safetensors", 0) as layout:
        same_bytes(layout, wanted)
    with nvme_gpu.Volume(f"sim:{image}") as volume:
        same_bytes(compute.expert_layout(volume.open("/model.safetensors"), 0), wanted)


def gguf_files(tmp_path, parts):
    """A model of two layers in parts of the package's writer."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kinds = [gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.Q4_0]
    writer_type, wanted = gguf.GGUFWriter, {}
    options = {} if parts == 1 else {"split_max_tensors": 2}
    writer = writer_type(tmp_path / "model.gguf", "llama", **options)
    for layer, kind in enumerate(kinds):
        for number, (matrix, (rows, columns)) in enumerate(MATRICES.items()):
            name = f"blk.{layer}.ffn_{matrix}_exps.weight"
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            data = random((EXPERTS, rows, columns // block * nbytes), np.uint8, layer * 3 + number)
            writer.add_tensor(name, data, raw_dtype=kind)
            wanted[name] = data.tobytes()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("*.gguf")), wanted


def test_experts_of_a_split_gguf_are_those_of_its_writer(tmp_path):
    paths, wanted = gguf_files(tmp_path, 3)
    assert len(paths) == 3
    for source in (paths[0], paths):
        with compute.ExpertFiles(source) as files:
            assert files.layers == [0, 1]
            for layer in (0, 1):
                same_bytes(files.layout(layer), wanted)
    with nvme_gpu.open("sim:mem?size=16MiB") as store:
        same_bytes(compute.expert_layout(nvme_gpu.import_file(store, paths[0]), 1), wanted)
    # A single path is completed by its name; the others are what they are.
    refused(lambda: compute.ExpertFiles(paths[1]), "part 2 of 3")
    refused(lambda: compute.ExpertFiles([paths[0], paths[2]]), "part")
    refused(lambda: compute.ExpertFiles([paths[1], paths[0], paths[2]]), "part 2 of 3")
    glued = tmp_path / "glued.gguf"
    glued.write_bytes(paths[0].read_bytes() + paths[1].read_bytes())
    refused(lambda: compute.ExpertFiles(glued), "its header describes")
    program = shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin")
    if program is not None:
        folder, image = tmp_path / "files", tmp_path / "drive.img"
        folder.mkdir()
        for path in paths:
            shutil.copy(path, folder)
        subprocess.run([program, "-q", "-F", "-t", "ext4", "-d", folder, image, "16M"], check=True)
        with compute.expert_layout(f"sim:{image}:/{paths[0].name}", 0) as layout:
            same_bytes(layout, wanted)
        refused(lambda: compute.ExpertFiles(f"sim:{image}:/{paths[1].name}"), "part 2 of 3")
    paths[2].unlink()
    refused(lambda: compute.ExpertFiles(paths[0]), "parts are missing", paths[2].name)


def layout_of(tmp_path, tensors):
    return compute.expert_layout(safetensors(tmp_path / "model.safetensors", tensors), 0)


def same_numbers(found, wanted):
    """Whether both have the same bits; of NaN any."""
    assert found.shape == wanted.shape
    nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view(np.uint32)[~nan], wanted.astype(np.float32).view(np.uint32)[~nan])


@pytest.mark.by_hand
@pytest.mark.parametrize(
    ("block", "kind"), [((128, 128), "F32"), ((128, 128), "BF16"), ((32, 32), "F8_E8M0"), ((1, 32), "F8_E8M0")]
)
def test_fp8_with_scales_of_blocks_is_torchs(tmp_path, block, kind):
    torch = pytest.importorskip("torch")
    shapes = {"gate": (200, 320), "up": (200, 320), "down": (320, 200)}
    size, name = {"F32": (4, "float32"), "BF16": (2, "bfloat16"), "F8_E8M0": (1, "float8_e8m0fnu")}[kind]
    end = "scale" if kind == "F8_E8M0" else "weight_scale_inv"
    tensors = {}
    for number, (matrix, (rows, columns)) in enumerate(shapes.items()):
        weight = random((rows, columns), np.uint8, number)
        lengths = -(-rows // block[0]), -(-columns // block[1])
        scales = random((*lengths, size), np.uint8, number + 10)
        if kind == "F8_E8M0":
            scales[0, 0], scales[0, 1] = 0, 255
        code = {4: np.uint32, 2: np.uint16, 1: np.uint8}[size]
        tensors[f"{BANK}.0.{matrix}_proj.weight"] = weight, "F8_E4M3"
        tensors[f"{BANK}.0.{matrix}_proj.{end}"] = scales.view(code)[..., 0], kind
    layout = layout_of(tmp_path, tensors)
    for matrix, (rows, columns) in shapes.items():
        weight = torch.from_numpy(tensors[f"{BANK}.0.{matrix}_proj.weight"][0]).view(torch.float8_e4m3fn).float()
        stored = torch.from_numpy(tensors[f"{BANK}.0.{matrix}_proj.{end}"][0].copy())
        scales = stored.view(getattr(torch, name)).float()
        spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        same_numbers(layout.unpack(0, matrix), (weight * spread).numpy())


def e2m1(bits):
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)[bits]


def unpacked(weight):
    """Two elements of each byte, the lower one first."""
    return np.stack([weight & 15, weight >> 4], -1).reshape(*weight.shape[:-1], -1)


def test_one_weight_in_both_layouts_of_mxfp4_has_the_same_numbers(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    tensors, blocks = {}, {}
    for number, (matrix, (rows, columns)) in enumerate(MATRICES.items()):
        weight = random((EXPERTS, rows, columns // 2), np.uint8, number)
        scales = random((EXPERTS, rows, columns // 32), np.uint8, number + 10)
        scales = np.clip(scales, 0, 254)
        scales[0, 0, :2] = 0, 1
        name = {"gate": "w1", "up": "w3", "down": "w2"}[matrix]
        for expert in range(EXPERTS):
            tensors[f"layers.0.ffn.experts.{expert}.{name}.weight"] = weight[expert], "I8"
            tensors[f"layers.0.ffn.experts.{expert}.{name}.scale"] = scales[expert], "F8_E8M0"
        codes = unpacked(weight).reshape(EXPERTS, rows, -1, 32)
        packed = codes[..., :16] | codes[..., 16:] << 4
        blocks[matrix] = np.concatenate([scales[..., None], packed], -1).reshape(EXPERTS, rows, -1)
    kind = gguf.GGMLQuantizationType.MXFP4
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for matrix, data in blocks.items():
        writer.add_tensor(f"blk.0.ffn_{matrix}_exps.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = layout_of(tmp_path, tensors), compute.expert_layout(tmp_path / "model.gguf", 0)
    assert {one.format for one in ours.matrices(0)} == {"mxfp4 (low nibble first)"}
    assert {one.format for one in theirs.matrices(0)} == {"mxfp4"}
    for matrix in MATRICES:
        for expert in range(EXPERTS):
            wanted = gguf.quants.dequantize(blocks[matrix][expert], kind)
            found = theirs.unpack(expert, matrix)
            same_numbers(found, wanted)
            # ggml's numbers have no negative zero, and are the same else.
            same_numbers(ours.unpack(expert, matrix) + 0.0, found)


@pytest.mark.by_hand
def test_gpt_oss_as_published_is_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    tensors, wanted = {}, {}
    for number, (name, rows, columns) in enumerate([("gate_up_proj", 2 * HIDDEN, WIDTH), ("down_proj", WIDTH, HIDDEN)]):
        blocks = random((EXPERTS, rows, columns // 32, 16), np.uint8, number)
        scales = np.random.default_rng(number).integers(100, 150, (EXPERTS, rows, columns // 32), np.uint8)
        bias = np.random.default_rng(number).standard_normal((EXPERTS, rows)).astype(np.float32)
        tensors[f"{BANK}.{name}_blocks"] = blocks, "U8"
        tensors[f"{BANK}.{name}_scales"] = scales, "U8"
        tensors[f"{BANK}.{name}_bias"] = bias, "F32"
        made = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
        # transformers multiplies from the other side: its rows are columns.
        wanted[name] = made.transpose(1, 2).contiguous().numpy()
    layout = layout_of(tmp_path, tensors)
    both, down = layout.matrices(0)
    assert both.is_interleaved and both.shape == (2 * HIDDEN, WIDTH) and not down.is_interleaved
    for expert in range(EXPERTS):
        memory = layout.read(expert)
        unpacked_ = {name: layout.unpack(expert, name, memory=memory) for name in ("gate", "up", "gate_up", "down")}
        same_numbers(unpacked_["gate_up"], wanted["gate_up_proj"][expert])
        same_numbers(unpacked_["gate"], wanted["gate_up_proj"][expert][0::2])
        same_numbers(unpacked_["up"], wanted["gate_up_proj"][expert][1::2])
        same_numbers(unpacked_["down"], wanted["down_proj"][expert])
    refused(lambda: layout.unpack(0, "side"), "side")


def nvfp4_of(prefix, convention, number):
    rows, columns = list(MATRICES.values())[number]
    weight = random((rows, columns // 2), np.uint8, number)
    scales = np.random.default_rng(number).integers(0, 0x7F, (rows, columns // 16), np.uint8)
    whole = np.float32([0.003, 0.07, 1900.0][number])
    name = f"{prefix}.{list(MATRICES)[number]}_proj"
    if convention == "modelopt":
        made = {f"{name}.weight": (weight, "U8"), f"{name}.weight_scale_2": (np.array(whole), "F32")}
    else:
        made = {f"{name}.weight_packed": (weight, "U8"), f"{name}.weight_global_scale": (np.array([whole]), "F32")}
    return {**made, f"{name}.weight_scale": (scales, "F8_E4M3")}, weight, scales, whole


@pytest.mark.by_hand
@pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
def test_both_conventions_of_nvfp4(tmp_path, convention):
    torch = pytest.importorskip("torch")
    tensors, given = {}, []
    for number in range(3):
        made, *rest = nvfp4_of(f"{BANK}.0", convention, number)
        tensors |= made
        given.append(rest)
    layout = layout_of(tmp_path, tensors)
    for matrix, (weight, scales, whole) in zip(MATRICES, given):
        stored = torch.from_numpy(scales).view(torch.float8_e4m3fn).float().numpy()
        scale = stored * whole if convention == "modelopt" else stored / whole
        wanted = e2m1(unpacked(weight)) * scale.repeat(16, -1)
        same_numbers(layout.unpack(0, matrix), wanted)
    # Scalars are kept in memory: they are no part of the reads of an expert.
    assert sum(part.is_scalar for part in layout.parts(0)) == 3
    streamed = layout.reads(0, scalars=False)
    assert sum(read.nbytes for read in streamed) < sum(read.nbytes for read in layout.reads(0))


@pytest.mark.by_hand
def test_nvfp4_and_int4_are_those_of_compressed_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    made, weight, scales, whole = nvfp4_of(f"{BANK}.0", "compressed-tensors", 0)
    codes = unpack_fp4_from_uint8(torch.from_numpy(weight), HIDDEN, WIDTH, dtype=torch.float32)
    tensors = made | nvfp4_of(f"{BANK}.0", "compressed-tensors", 1)[0] | nvfp4_of(f"{BANK}.0", "compressed-tensors", 2)[0]
    stored = torch.from_numpy(scales).view(torch.float8_e4m3fn).float() / float(whole)
    same_numbers(layout_of(tmp_path, tensors).unpack(0, "gate"), (codes * stored.repeat_interleave(16, -1)).numpy())
    tensors, given = {}, {}
    for number, (matrix, (rows, columns)) in enumerate(MATRICES.items()):
        words = random((rows, columns // 8, 4), np.uint8, number).view(np.int32)[..., 0]
        scales = torch.from_numpy(np.random.default_rng(number).standard_normal((rows, columns // 32))).bfloat16()
        name = f"{BANK}.0.{matrix}_proj.weight"
        tensors[f"{name}_packed"] = words, "I32"
        tensors[f"{name}_scale"] = scales.view(torch.int16).numpy(), "BF16"
        tensors[f"{name}_shape"] = np.array([rows, columns]), "I64"
        given[matrix] = words, scales
    layout = layout_of(tmp_path, tensors)
    assert {one.format for one in layout.matrices(0)} == {"int4 group 32"}
    for matrix, (words, scales) in given.items():
        shape = torch.Size(MATRICES[matrix])
        codes = unpack_from_int32(torch.from_numpy(words), 4, shape)
        wanted = codes.float() * scales.float().repeat_interleave(32, -1)
        same_numbers(layout.unpack(0, matrix), wanted.numpy())
    tensors[f"{BANK}.0.up_proj.weight_shape"] = np.array([HIDDEN, WIDTH + 1]), "I64"
    layout = layout_of(tmp_path, tensors)
    refused(lambda: layout.unpack(0, "up"), "up_proj.weight_shape says [128, 257]")


def test_formats_of_gguf_are_those_of_the_package(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kinds = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 NVFP4".split()
    listed = "Q5_0 Q5_1 IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M TQ1_0 TQ2_0".split()
    writer, blocks = gguf.GGUFWriter(tmp_path / "model.gguf", "llama"), {}
    for layer, name in enumerate(kinds + listed):
        kind = getattr(gguf.GGMLQuantizationType, name)
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        for matrix in MATRICES:
            data = random((2, 256, 256 // block * nbytes), np.uint8, layer)
            if name in ("F32", "F16", "BF16"):
                data &= 0x3F
            writer.add_tensor(f"blk.{layer}.ffn_{matrix}_exps.weight", data, raw_dtype=kind)
        blocks[layer] = kind, data
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with compute.ExpertFiles(tmp_path / "model.gguf") as files:
        for layer, name in enumerate(kinds + listed):
            kind, data = blocks[layer]
            layout = files.layout(layer)
            assert layout.matrices(1)[0].format == {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}.get(
                name, name.lower()
            )
            assert layout.nbytes(1) == 3 * data[1].nbytes
            if name in listed:
                refused(lambda: layout.unpack(1, "down"), name.lower(), "nothing here computes")
                continue
            with np.errstate(all="ignore"):
                wanted = gguf.quants.dequantize(data[1], kind)
            same_numbers(layout.unpack(1, "down"), wanted)


def test_a_fused_and_transposed_matrix_is_turned(tmp_path):
    both = np.random.default_rng(0).standard_normal((EXPERTS, WIDTH, 2 * HIDDEN)).astype(np.float32)
    down = np.random.default_rng(1).standard_normal((EXPERTS, HIDDEN, WIDTH)).astype(np.float32)
    tensors = {f"{BANK}.gate_up_proj": (both, "F32"), f"{BANK}.down_proj": (down, "F32")}
    layout = layout_of(tmp_path, tensors)
    assert all(one.is_transposed for one in layout.matrices(0))
    assert np.array_equal(layout.unpack(1, "gate"), both[1].T[:HIDDEN])
    assert np.array_equal(layout.unpack(1, "up"), both[1].T[HIDDEN:])
    assert np.array_equal(layout.unpack(1, "down"), down[1].T)
