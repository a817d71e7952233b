"""Experts of published files that are chosen, read and computed as a step: by threads of the host, and by kernels on the
stand-in of CUDA. What they are is decoded here by numpy, by the formulas of the formats; GGUF's by the package gguf."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

import nvme_gpu
from conftest import drain

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
from compute_numbers import close, softmax, to_bf16  # noqa: E402
from nvme_gpu import compute  # noqa: E402
from safetensors_file import file_bytes  # noqa: E402

F32 = np.float32
DRIVE = "sim:mem?size=32MiB&block=512&queues=32&threads=2"
BAD = "&fault=status:0x281@op=read"
WIDTH, HIDDEN, EXPERTS, CHOICES = 192, 128, 5, 2
SHAPES = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)


@pytest.fixture(params=["host", "gpu"])
def place(request, cuda):
    """Opens a store with a file, and makes tensors where its computations take place."""
    is_gpu = request.param == "gpu"

    class Place:
        gpu = is_gpu

        def files(self, data, extra=""):
            store = nvme_gpu.open(DRIVE + extra, gpu=0 if is_gpu else None)
            store.write(data, 0)
            return store, compute.ExpertFiles(store)

        def __call__(self, array):
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            return cuda(tensor) if is_gpu else tensor

    yield Place()
    drain()


def rng(*seed):
    return np.random.default_rng(seed)


def safetensors(tensors):
    """The bytes of a file, whose data begin at an odd multiple of 8."""
    parts = [(name, dtype, array.shape, array.tobytes()) for name, (array, dtype) in tensors.items()]
    return np.frombuffer(file_bytes(parts, align=16, shift=8), np.uint8)


def e2m1(packed):
    """Elements of bytes, the lower half first."""
    both = np.stack([packed & 0xF, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return np.where(both & 8, -E2M1[both & 7], E2M1[both & 7]).astype(F32)


def e4m3(bytes_):
    sign, exponent, low = bytes_ >> 7, (bytes_ >> 3 & 15).astype(int), (bytes_ & 7).astype(F32)
    sizes = np.where(exponent == 0, low / 8 * 2.0**-6, (1 + low / 8) * 2.0 ** (exponent - 7))
    return np.where(sign, -sizes, sizes).astype(F32)


def packed(seed, rows, columns):
    return rng(seed, 1).integers(0, 256, (rows, columns // 2), np.uint8)


def powers(seed, rows, columns, group=32):
    return rng(seed, 2).integers(112, 122, (rows, columns // group), np.uint8)


def spread(scales, group, columns):
    return np.repeat(scales, group, -1)[..., :columns]


def names(kind, layer, expert):
    w = {"gate": "w1", "up": "w3", "down": "w2"}[kind]
    return f"layers.{layer}.ffn.experts.{expert}.{w}", f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj"


def deepseek_v4(layer):
    """Six tensors of an expert, in another order than the experts'."""
    tensors, numbers = {}, {kind: [] for kind in SHAPES}
    for expert in range(EXPERTS):
        for at, (kind, (rows, columns)) in enumerate(SHAPES.items()):
            seed = layer * 100 + expert * 3 + at
            name, weight, scale = names(kind, layer, expert)[0], packed(seed, rows, columns), powers(seed, rows, columns)
            tensors[name + ".scale"], tensors[name + ".weight"] = (scale, "F8_E8M0"), (weight.view(np.int8), "I8")
            numbers[kind].append(e2m1(weight) * spread(2.0 ** (scale.astype(F32) - 127), 32, columns))
    order = sorted(tensors, key=lambda name: hash_of(name))
    return {name: tensors[name] for name in order}, numbers, {}, {"limit": 10.0}


def hash_of(name):
    return sum((at + 7) * ord(letter) for at, letter in enumerate(name)) % 101, name


def gpt_oss(layer):
    """Slabs of all experts; rows of gate and up take turns; biases."""
    tensors, bank = {}, f"model.layers.{layer}.mlp.experts"
    numbers, biases = {}, {}
    for at, (name, rows, columns) in enumerate((("gate_up_proj", 2 * HIDDEN, WIDTH), ("down_proj", WIDTH, HIDDEN))):
        seed = layer * 100 + at
        weight = packed(seed, EXPERTS * rows, columns).reshape(EXPERTS, rows, columns // 32, 16)
        scale = powers(seed, EXPERTS * rows, columns).reshape(EXPERTS, rows, -1)
        bias = to_bf16(rng(seed, 3).standard_normal((EXPERTS, rows)).astype(F32))
        tensors[f"{bank}.{name}_blocks"], tensors[f"{bank}.{name}_scales"] = (weight, "U8"), (scale, "U8")
        tensors[f"{bank}.{name}_bias"] = bias, "BF16"
        values = e2m1(weight.reshape(EXPERTS, rows, -1)) * spread(2.0 ** (scale.astype(F32) - 127), 32, columns)
        wide = (bias.astype(np.uint32) << 16).view(F32)
        if at == 0:
            numbers |= {"gate": values[:, ::2], "up": values[:, 1::2]}
            biases |= {"gate": wide[:, ::2], "up": wide[:, 1::2]}
        else:
            numbers["down"], biases["down"] = values, wide
    return tensors, numbers, biases, {"limit": 7.0, "alpha": 1.702}


def deepseek_v3(layer):
    """E4M3 with a float32 for each block of 128 x 128, of which the last ones are partial."""
    tensors, numbers = {}, {kind: [] for kind in SHAPES}
    for expert in range(EXPERTS):
        for at, (kind, (rows, columns)) in enumerate(SHAPES.items()):
            random = rng(layer, expert, at)
            weight = random.integers(0, 127, (rows, columns), np.uint8) | random.integers(0, 2, (rows, columns), np.uint8) << 7
            scale = (random.random((-(-rows // 128), -(-columns // 128))) / 2000 + 1e-4).astype(F32)
            name = names(kind, layer, expert)[1]
            tensors[name + ".weight"], tensors[name + ".weight_scale_inv"] = (weight, "F8_E4M3"), (scale, "F32")
            blocks = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :columns]
            numbers[kind].append(e4m3(weight) * blocks)
    return tensors, numbers, {}, {}


def nvfp4(end, divides):
    """E2M1, an E4M3 for 16 elements, and a float32 for the matrix."""

    def make(layer):
        tensors, numbers = {}, {kind: [] for kind in SHAPES}
        for expert in range(EXPERTS):
            for at, (kind, (rows, columns)) in enumerate(SHAPES.items()):
                random, weight = rng(layer, expert, at), packed(layer * 100 + expert * 3 + at, rows, columns)
                scale = random.integers(40, 70, (rows, columns // 16), np.uint8)
                factor = F32(random.random() / 8 + 0.01)
                factor = F32(1) / factor if divides else factor
                name = names(kind, layer, expert)[1]
                tensors[name + (".weight_packed" if divides else ".weight")] = weight, "U8"
                tensors[name + ".weight_scale"] = scale, "F8_E4M3"
                tensors[name + end] = (np.array([factor]) if divides else np.array(factor)), "F32"
                stored = e4m3(scale)
                both = stored / factor if divides else stored * factor
                numbers[kind].append(e2m1(weight) * spread(both, 16, columns))
        return tensors, numbers, {}, {"beta": 4.0, "linear_beta": 25.0}

    return make


def kimi_k2(layer):
    """INT4 of compressed-tensors: eight numbers in a word, a bfloat16 for 32 of them."""
    tensors, numbers = {}, {kind: [] for kind in SHAPES}
    for expert in range(EXPERTS):
        for at, (kind, (rows, columns)) in enumerate(SHAPES.items()):
            random = rng(layer, expert, at)
            values = random.integers(0, 16, (rows, columns), np.uint32)
            words = sum(values[:, one::8] << np.uint32(4 * one) for one in range(8)).astype(np.uint32)
            scale = to_bf16((random.random((rows, columns // 32)) / 50).astype(F32))
            name = names(kind, layer, expert)[1]
            tensors[name + ".weight_packed"] = words.view(np.int32), "I32"
            tensors[name + ".weight_scale"] = scale, "BF16"
            tensors[name + ".weight_shape"] = np.array([rows, columns], np.int64), "I64"
            wide = (scale.astype(np.uint32) << 16).view(F32)
            numbers[kind].append((values.astype(F32) - 8) * spread(wide, 32, columns))
    return tensors, numbers, {}, {}


def llama4(layer):
    """bfloat16, whose rows are the columns of the matrix; gate before up."""
    bank, numbers = f"model.layers.{layer}.mlp.experts", {}
    both = to_bf16(rng(layer, 8).standard_normal((EXPERTS, WIDTH, 2 * HIDDEN)).astype(F32))
    down = to_bf16(rng(layer, 9).standard_normal((EXPERTS, HIDDEN, WIDTH)).astype(F32))
    wide = [(one.astype(np.uint32) << 16).view(F32).transpose(0, 2, 1) for one in (both, down)]
    numbers = {"gate": wide[0][:, :HIDDEN], "up": wide[0][:, HIDDEN:], "down": wide[1]}
    return {f"{bank}.gate_up_proj": (both, "BF16"), f"{bank}.down_proj": (down, "BF16")}, numbers, {}, {}


def mixtral(layer):
    """bfloat16, a tensor for each matrix of an expert."""
    tensors, numbers = {}, {kind: [] for kind in SHAPES}
    for expert in range(EXPERTS):
        for at, (kind, shape) in enumerate(SHAPES.items()):
            halves = to_bf16(rng(layer, expert, at).standard_normal(shape).astype(F32))
            tensors[names(kind, layer, expert)[1] + ".weight"] = halves, "BF16"
            numbers[kind].append((halves.astype(np.uint32) << 16).view(F32))
    return tensors, numbers, {}, {}


MODELS = {
    "deepseek-v4": deepseek_v4, "gpt-oss": gpt_oss, "deepseek-v3": deepseek_v3, "kimi-k2": kimi_k2, "llama-4": llama4,
    "mixtral": mixtral, "modelopt": nvfp4(".weight_scale_2", False),
    "compressed-tensors": nvfp4(".weight_global_scale", True),
}  # fmt: skip


def activated(gate, up, limit=None, alpha=None, beta=None, linear_beta=None):
    """The formulas in float64."""
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    if beta is not None:
        return beta * np.tanh(gate / beta) * sigmoid(gate) * (linear_beta * np.tanh(up / linear_beta))
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate * sigmoid(alpha * gate) if alpha is not None else gate * sigmoid(gate) * up


def computed(x, chosen, weights, matrices, biases, numbers):
    """The result of each token in float64."""
    found = []
    for token, experts, shares in zip(x.astype(np.float64), chosen, weights):
        total = np.zeros(len(token))
        for expert, share in zip(experts, shares):
            def product(kind, vector):
                bias = biases[kind][expert] if biases else 0
                return np.asarray(matrices[kind][expert], np.float64) @ vector + bias

            total += share * product("down", activated(product("gate", token), product("up", token), **numbers))
        found.append(total)
    return np.array(found).reshape(x.shape)


def router(logits):
    order = np.argsort(-logits, -1, kind="stable")[:, :CHOICES]
    return order, softmax(np.take_along_axis(logits, order, -1).astype(np.float64))


def made(make, layers=2):
    tensors, each = {}, []
    for layer in range(layers):
        found, numbers, biases, words = make(layer)
        tensors |= found
        each.append((numbers, biases))
    return safetensors(tensors), each, words


def cache(place, **more):
    return {"cache_bytes": 8 << 20, "tokens": 3, **more} if place.gpu else {}


@pytest.mark.parametrize("model", MODELS)
def test_experts_of_a_model_as_published_are_chosen_read_and_computed(place, model):
    data, layers, words = made(MODELS[model])
    store, files = place.files(data)
    with store:
        more = {"pinned": [(1, 3), (0, 0)]} if place.gpu else {}
        experts = compute.Experts(files, choices=CHOICES, **words, **cache(place, **more))
        assert experts.layers == 2 and f"{CHOICES} of {EXPERTS} of {WIDTH} x {HIDDEN}" in repr(experts)
        for step, tokens in enumerate((1, 3, 0, 2, 3)):
            layer = step % 2
            matrices, biases = layers[layer]
            x = rng(step).standard_normal((tokens, WIDTH)).astype(F32) / 8
            logits = rng(step, 5).standard_normal((tokens, EXPERTS)).astype(F32)
            order, weights = router(logits)
            want = computed(x, order, weights, matrices, biases, words)
            size = np.abs(want).max() if tokens else 1
            found = experts.compute(layer, place(logits), place(x), check="now")
            close(found.cpu(), want, size * 10)
            given = place(order.astype(np.int32)), place((weights * 1.5).astype(F32))
            out = place(np.ones_like(x))
            assert experts.compute(layer, None, place(x), out, chosen=given, accumulate=True, check="now") is out
            close(out.cpu(), want * 1.5 + 1, size * 10)
        if place.gpu:
            counts = experts.counts()
            assert counts.hits + counts.misses == 2 * CHOICES * 9 and counts.misses > 0
            assert experts.memory_bytes >= experts.slots * experts.slot_bytes
        experts.close()


def test_one_weight_in_both_layouts_gives_equal_bits(place):
    """MXFP4 of safetensors and of GGUF differ by the order of halves of bytes alone."""
    tensors, _, _, _ = deepseek_v4(0)
    store, files = place.files(safetensors(tensors))
    stored, at, size = [], 8 << 20, {}
    for kind, (rows, columns) in SHAPES.items():
        blocks = []
        for expert in range(EXPERTS):
            name = names(kind, 0, expert)[0]
            halves = tensors[name + ".weight"][0].view(np.uint8).reshape(rows, columns // 32, 16)
            both = np.stack([halves & 0xF, halves >> 4], -1).reshape(rows, columns // 32, 32)
            scale = tensors[name + ".scale"][0][..., None]
            blocks.append(np.concatenate([scale, both[..., :16] | both[..., 16:] << 4], -1).astype(np.uint8))
        size[kind] = np.stack(blocks)
        stored.append((at, "mxfp4"))
        at += size[kind].nbytes + 64
    with store:
        for (offset, _), blocks in zip(stored, size.values()):
            store.write(blocks.ravel(), offset)
        x, logits = rng(1).standard_normal((3, WIDTH)).astype(F32), rng(2).standard_normal((3, EXPERTS)).astype(F32)
        sizes = {"width": WIDTH, "hidden": HIDDEN, "experts": EXPERTS}
        merged = compute.Experts(store, [stored], **sizes, choices=CHOICES, limit=10.0, **cache(place))
        apart = compute.Experts(files, choices=CHOICES, limit=10.0, **cache(place))
        found = [one.compute(0, place(logits), place(x), check="now").cpu() for one in (merged, apart)]
        if place.gpu:
            assert torch.equal(*found)
        close(found[0], found[1])


@pytest.mark.parametrize("kinds", [("Q2_K", "Q3_K", "Q5_K"), ("IQ4_XS", "IQ4_NL", "Q8_0"), ("Q4_0", "MXFP4", "Q6_K")])
@pytest.mark.parametrize("is_old", [False, True])
def test_experts_of_gguf_as_published(place, kinds, is_old, tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    path, side = tmp_path / "model.gguf", 256
    writer, numbers = gguf.GGUFWriter(path, "llama"), {}
    for at, (kind, quantised) in enumerate(zip(SHAPES, kinds)):
        type_ = gguf.GGMLQuantizationType[quantised]
        elements, nbytes = gguf.GGML_QUANT_SIZES[type_]
        blocks = rng(at, 4).integers(0, 256, (EXPERTS, side, side // elements, nbytes), np.uint8)
        quiet(blocks, quantised)
        blocks = blocks.reshape(EXPERTS, side, -1)
        numbers[kind] = np.stack([gguf.quants.dequantize(one, type_) for one in blocks])
        if is_old:
            for expert, one in enumerate(blocks):
                writer.add_tensor(f"blk.0.ffn_{kind}.{expert}.weight", one, raw_dtype=type_)
        else:
            writer.add_tensor(f"blk.0.ffn_{kind}_exps.weight", blocks, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store, files = place.files(np.frombuffer(path.read_bytes(), np.uint8))
    with store:
        experts = compute.Experts(files, [0], choices=CHOICES, **cache(place))
        x, logits = rng(6).standard_normal((2, side)).astype(F32) / 16, rng(7).standard_normal((2, EXPERTS)).astype(F32)
        order, weights = router(logits)
        want = computed(x, order, weights, numbers, {}, {})
        found = experts.compute(0, place(logits), place(x), check="now").cpu()
        close(found, want, np.abs(want).max() * 10)


def quiet(blocks, kind):
    """Makes the scales of random blocks small numbers."""
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}.get(kind, (0,))
    for at in scales:
        small = (rng(at).random(blocks.shape[:-1]) / 50).astype(np.float16)
        blocks[..., at : at + 2] = small[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 8 + 110


def test_a_failed_read_is_nan_and_is_read_again(place):
    if not place.gpu:
        data, _, words = made(deepseek_v4, 1)
        store, files = place.files(data, BAD + ",nth=40-4000")
        with store, pytest.raises(nvme_gpu.NvmeGpuError):
            experts = compute.Experts(files, choices=CHOICES, **words)
            for _ in range(80):
                experts.compute(0, place(np.zeros((1, EXPERTS), F32)), place(np.ones((1, WIDTH), F32)))
        return
    data, layers, words = made(deepseek_v4, 1)
    store, files = place.files(data, BAD + ",nth=60-90")
    with store:
        experts = compute.Experts(files, choices=CHOICES, **words, **cache(place, cache_bytes=120_000, tokens=1))
        lost = right = 0
        for step in range(24):
            x = rng(step).standard_normal((1, WIDTH)).astype(F32) / 8
            logits = rng(step, 5).standard_normal((1, EXPERTS)).astype(F32)
            order, weights = router(logits)
            want = computed(x, order, weights, *layers[0], words)
            # Each attempt that fails has sent one of the 31 reads that fail.
            for _ in range(32):
                out = place(np.zeros_like(x))
                try:
                    experts.compute(0, place(logits), place(x), out, check="now")
                except nvme_gpu.Status:
                    assert np.isnan(out.cpu().numpy()).all()
                    lost += 1
                    continue
                close(out.cpu(), want, np.abs(want).max() * 10)
                right += 1
                break
        assert lost > 0 and right == 24


def test_a_number_that_is_no_expert_is_nan_and_others_are_right(place):
    data, layers, words = made(gpt_oss, 1)
    store, files = place.files(data)
    with store:
        experts = compute.Experts(files, choices=CHOICES, **words, **cache(place))
        x = rng(3).standard_normal((3, WIDTH)).astype(F32) / 8
        order = np.array([[0, 4], [2, EXPERTS], [-1, 1]], np.int32)
        weights = np.full((3, CHOICES), 0.5, F32)
        call = lambda: experts.compute(0, None, place(x), chosen=(place(order), place(weights)), check="now")  # noqa: E731
        if not place.gpu:
            with pytest.raises(nvme_gpu.Usage, match=f"layer 0 has no expert {EXPERTS}"):
                call()
            # A refused call changes no sums.
            for adds in (True, False):
                sums = np.ones_like(x)
                with pytest.raises(nvme_gpu.Usage):
                    experts.compute(0, None, x, out=sums, accumulate=adds, chosen=(order, weights), check="now")
                assert (sums == 1).all()
            return
        found = call().cpu().numpy()
        want = computed(x[:1], order[:1], weights[:1], *layers[0], words)
        close(found[:1], want, np.abs(want).max() * 10)
        assert np.isnan(found[1:]).all()


def test_many_tokens_share_the_loads_of_their_experts(place):
    """Of tokens with numbers that are no expert, those before and behind them are right."""
    tensors, numbers, biases, words = gpt_oss(0)
    store, files = place.files(safetensors(tensors))
    tokens = 4 * EXPERTS + 3
    with store:
        experts = compute.Experts(files, choices=CHOICES, **words, **cache(place, tokens=tokens))
        x = rng(1).standard_normal((tokens, WIDTH)).astype(F32) / 8
        order = np.stack([rng(2, at).permutation(EXPERTS)[:CHOICES] for at in range(tokens)]).astype(np.int32)
        weights = rng(3).random((tokens, CHOICES)).astype(F32)
        want = computed(x, order, weights, numbers, biases, words)
        size = np.abs(want).max()
        found = experts.compute(0, None, place(x), chosen=(place(order), place(weights)), check="now").cpu()
        close(found, want, size * 10)
        if place.gpu:
            order[::5] = EXPERTS
            order[3::7, 1] = -1
            is_lost = ((order < 0) | (order >= EXPERTS)).any(-1)
            found = experts.compute(0, None, place(x), chosen=(place(order), place(weights)), check="now").cpu().numpy()
            assert np.isnan(found[is_lost]).all()
            close(found[~is_lost], want[~is_lost], size * 10)


def test_a_scale_that_is_nan_is_a_result_that_is_nan(place):
    """GGUF's blocks of MXFP4 have no such scale."""
    tensors, numbers, _, words = deepseek_v4(0)
    scale = tensors[names("up", 0, 2)[0] + ".scale"][0]
    scale[7, 3] = 255
    store, files = place.files(safetensors(tensors))
    with store:
        experts = compute.Experts(files, choices=CHOICES, **words, **cache(place))
        x, weights = np.ones((2, WIDTH), F32) / 8, np.full((2, CHOICES), 0.5, F32)
        order = np.array([[0, 2], [1, 3]], np.int32)
        want = computed(x[1:], order[1:], weights[1:], numbers, {}, words)
        for _ in range(2):
            found = experts.compute(0, None, place(x), chosen=(place(order), place(weights)), check="now").cpu().numpy()
            assert np.isnan(found[0]).all()
            close(found[1:], want, np.abs(want).max() * 10)


def test_a_small_cache_evicts_and_results_stay_right(place):
    if not place.gpu:
        with pytest.raises(nvme_gpu.Usage, match="no layers of experts"):
            compute.Experts([], choices=1)
        return
    data, layers, words = made(gpt_oss, 1)
    store, files = place.files(data)
    with store:
        small = {"cache_bytes": 120_000, "tokens": 1, "policy": "clock"}
        experts = compute.Experts(files, choices=CHOICES, **words, **small)
        for step in range(12):
            x = rng(step).standard_normal((1, WIDTH)).astype(F32) / 8
            logits = rng(step, 1).standard_normal((1, EXPERTS)).astype(F32)
            order, weights = router(logits)
            want = computed(x, order, weights, *layers[0], words)
            close(experts.compute(0, place(logits), place(x), check="now").cpu(), want, np.abs(want).max() * 10)
        assert experts.counts().evictions > 0


def test_experts_in_two_files_on_the_ext4_of_a_drive(place, tmp_path):
    folder, image = tmp_path / "files", tmp_path / "drive.img"
    folder.mkdir()
    layers, words, paths = [], {}, []
    for layer in (0, 1):
        tensors, numbers, biases, words = gpt_oss(layer)
        layers.append((numbers, biases))
        paths.append(folder / f"model-{layer}.safetensors")
        paths[-1].write_bytes(safetensors(tensors).tobytes())
    program = shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin")
    if program is None:
        pytest.skip("needs mke2fs, of e2fsprogs")
    subprocess.run([program, "-q", "-F", "-t", "ext4", "-d", folder, image, "16M"], check=True)
    words_of_gpu = {"gpu": 0} if place.gpu else {}
    with nvme_gpu.Volume(f"sim:{image}?queues=32&threads=2", **words_of_gpu) as volume:
        files = compute.ExpertFiles([volume.open(f"/{path.name}") for path in paths])
        experts = compute.Experts(files, [1, 0], choices=CHOICES, **words, **cache(place))
        x = rng(1).standard_normal((3, WIDTH)).astype(F32) / 8
        logits = rng(2).standard_normal((3, EXPERTS)).astype(F32)
        order, weights = router(logits)
        for at, of in enumerate((1, 0)):
            want = computed(x, order, weights, *layers[of], words)
            close(experts.compute(at, place(logits), place(x), check="now").cpu(), want, np.abs(want).max() * 10)


def test_what_cannot_be_is_refused_by_name(place, tmp_path):
    tensors, _, _, words = gpt_oss(0)
    more = cache(place)

    def refused(match, tensors=tensors, **given):
        store, files = place.files(safetensors(tensors))
        with store, pytest.raises(nvme_gpu.Usage, match=match):
            compute.Experts(files, **{"choices": CHOICES, **words, **more, **given})

    refused("sizes are given for published files", width=WIDTH)
    refused("chosen for a token", choices=EXPERTS + 1)
    refused("linear_beta is given without beta", limit=None, alpha=None, linear_beta=2.0)
    refused("a limit and beta are given", alpha=None, beta=2.0)
    mixed, _, _, _ = mixtral(0)
    other, _, _, _ = deepseek_v3(0)
    name = names("up", 0, 3)[1] + ".weight"
    half = {**mixed, name: (mixed[name][0].view(np.float16), "F16")}
    refused("up of expert 3 is stored in another form than that of expert 0", half)
    unknown = {key: (array, "F8_E5M2" if dtype == "F8_E4M3" else dtype) for key, (array, dtype) in other.items()}
    refused("stored as unknown", unknown)
    store, files = place.files(safetensors(tensors))
    with store:
        experts = compute.Experts(files, choices=CHOICES, **words, **more)
        x, logits = place(np.ones((1, WIDTH), F32)), place(np.ones((1, EXPERTS), F32))
        biases = tuple(place(np.ones((EXPERTS, rows), F32)) for rows in (HIDDEN, HIDDEN, WIDTH))
        with pytest.raises(nvme_gpu.Usage, match="files of the experts have their own"):
            experts.compute(0, logits, x, biases=biases)
        with pytest.raises(nvme_gpu.Usage, match="chosen is given with logits"):
            experts.compute(0, logits, x, chosen=(x, x))
        with pytest.raises(nvme_gpu.Usage, match="layers are given beside"):
            compute.Experts([files.layout(0)], [0], choices=1)
        if place.gpu:
            with pytest.raises(nvme_gpu.Usage, match="does not hold the experts of a step"):
                compute.Experts(files, choices=CHOICES, **{**more, "cache_bytes": 1000})
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(tensors).tobytes())
    if place.gpu:
        with compute.ExpertFiles(path, gpu=0) as on_file:
            with pytest.raises(nvme_gpu.Usage, match="from one drive alone"):
                compute.Experts(on_file, choices=CHOICES, **words, **more)
