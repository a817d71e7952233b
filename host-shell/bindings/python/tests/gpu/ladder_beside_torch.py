"""The rungs of attention and of linear layers beside PyTorch, in one process.

    python ladder_beside_torch.py FOLDER [attention] [decode] [linear]

FOLDER has attention.ptx and linear.ptx, as nvme-gpu-kernel/compute/ptx does. Kernels are loaded and launched by the driver's
library (ctypes): the script needs torch with CUDA and nothing of this project. Each line is one JSON object: medians of 5
runs in turns, in seconds, with the same operation by torch: scaled_dot_product_attention with its FLASH back end, and
F.linear with F.gelu and its gradients, in float32 (TF32 off), in TF32 and in bfloat16. Results are compared before.

Plot: python plot_ladder.py LINES.jsonl OUT.svg.
"""

import ctypes
import json
import statistics
import struct
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CUDA = ctypes.CDLL("libcuda.so.1")
RUNS = 5
MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
GELU = 3


def checked(status, what):
    if status:
        raise RuntimeError(f"{what}: CUDA error {status}")


def div_up(a, b):
    return -(-a // b)


class Module:
    """A file of PTX in torch's context."""

    def __init__(self, path):
        self.module, self.functions = ctypes.c_void_p(), {}
        with open(path, "rb") as file:
            image = file.read() + b"\0"
        checked(CUDA.cuModuleLoadData(ctypes.byref(self.module), image), path)

    def launch(self, name, blocks, threads, shared, argument):
        if name not in self.functions:
            function = ctypes.c_void_p()
            checked(CUDA.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()), name)
            if shared > 48 << 10:
                checked(CUDA.cuFuncSetAttribute(function, MAX_SHARED, shared), name)
            self.functions[name] = function
        buffer = ctypes.create_string_buffer(argument, len(argument))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        function = self.functions[name]
        checked(
            CUDA.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, stream, parameters, None), name
        )


def medians(ways):
    """Seconds of each way: medians of runs in turns, after two that do not count."""
    repeats = {}
    for name, way in ways.items():
        way()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        way()
        torch.cuda.synchronize()
        repeats[name] = max(1, min(50, int(0.006 / max(time.perf_counter() - begin, 1e-6))))
    seconds = {name: [] for name in ways}
    for _ in range(RUNS):
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats[name]):
                way()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / repeats[name] * 1e-3)
    return {name: statistics.median(runs) for name, runs in seconds.items()}


def report(kind, shape, seconds, amount, unit, apart):
    rates = {name: round(amount / each / 1e12, 3) for name, each in seconds.items()}
    line = {"kind": kind, "shape": shape, "seconds": seconds, unit: rates, "apart": apart}
    print(json.dumps(line), flush=True)


def random(*shape, dtype=torch.bfloat16, seed=1, size=1.0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=generator) * size).to(dtype)


def flash_argument(q, k, v, y, causal, workspace, splits):
    """The words of `Flash` (nvme-gpu-kernel/compute/src/flash/mod.rs), of [sequence, head, token, element]."""
    vectors = b"".join(struct.pack("<4Q", t.data_ptr(), *t.stride()[:3]) for t in (q, k, v, y))
    sequences, heads, queries, elements = q.shape
    sizes = (sequences, heads, k.shape[1], queries, k.shape[2], elements)
    of_kind = (int(causal), int(q.dtype == torch.bfloat16), splits)
    address = 0 if workspace is None else workspace.data_ptr()
    return vectors + struct.pack("<2Q9If", 0, address, *sizes, *of_kind, elements**-0.5)


def attend(module, rung, q, k, v, y, causal=False, workspace=None, splits=1):
    argument = flash_argument(q, k, v, y, causal, workspace, splits)
    sequences, heads, queries, elements = q.shape
    keys, vectors = k.shape[2], sequences * heads
    width = 64 if elements <= 64 else 128
    kind = f"{width}_{'bf16' if q.dtype == torch.bfloat16 else 'f16'}"
    if rung == "naive":
        for name in ("scores", "shares", "values"):
            module.launch(f"nvme_attention_{name}", 2048, 256, 0, argument)
    elif rung == "tiled":
        down = div_up(queries, 64) * vectors
        module.launch("nvme_attention_scores_tiled", div_up(keys, 64) * down, 256, 8704, argument)
        module.launch("nvme_attention_shares", 2048, 256, 0, argument)
        module.launch("nvme_attention_values_tiled", div_up(elements, 64) * down, 256, 8704, argument)
    elif rung == "flash":
        module.launch("nvme_attention_flash", div_up(queries, 64) * vectors, 256, 32768, argument)
    elif rung == "flash2":
        name = f"nvme_attention_flash2_{kind}"
        module.launch(name, div_up(queries, 128) * vectors, 128, width * 768, argument)
    else:
        rows = heads // k.shape[1] * queries
        blocks = sequences * k.shape[1] * div_up(rows, 64 if rows > 16 else 16) * splits
        module.launch(f"nvme_multi_query_attention_{kind}", blocks, 128, width * 896, argument)
        if splits > 1:
            module.launch("nvme_multi_query_join", min(div_up(vectors * queries, 8), 2048), 256, 0, argument)


def sdpa(q, k, v, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def exact(q, k, v, causal):
    """By the MATH back end in float64."""
    with sdpa_kernel(SDPBackend.MATH):
        wide = (q.double(), k.double(), v.double())
        return F.scaled_dot_product_attention(*wide, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def vectors(sequences, heads, tokens, elements, dtype, seed):
    return random(sequences, tokens, heads, elements, dtype=dtype, seed=seed).transpose(1, 2)


def attention(folder):
    module = Module(f"{folder}/attention.ptx")
    bf16, f16 = torch.bfloat16, torch.float16
    for sequences, heads, kv_heads, tokens, elements, causal, dtype in [
        (16, 16, 16, 512, 128, True, bf16),
        (8, 16, 16, 2048, 128, False, bf16),
        (8, 16, 16, 2048, 128, True, bf16),
        (4, 16, 16, 4096, 128, False, bf16),
        (4, 16, 16, 4096, 128, True, bf16),
        (4, 16, 16, 4096, 128, True, f16),
        (4, 32, 8, 4096, 128, True, bf16),
        (4, 32, 32, 4096, 64, False, bf16),
        (4, 32, 32, 4096, 64, True, bf16),
        (1, 16, 16, 16384, 128, True, bf16),
    ]:
        q = vectors(sequences, heads, tokens, elements, dtype, 1)
        k, v = (vectors(sequences, kv_heads, tokens, elements, dtype, seed) for seed in (2, 3))
        y = torch.empty_like(q)
        rungs = ["flash2"]
        if tokens <= 4096 and dtype == bf16:
            rungs.insert(0, "flash")
        workspace = None
        if tokens <= 2048:
            workspace = torch.empty(sequences * heads * tokens * tokens, device="cuda")
            rungs = ["naive", "tiled", *rungs]
        ways = {rung: lambda rung=rung: attend(module, rung, q, k, v, y, causal, workspace) for rung in rungs}
        # One sequence in float64: more would not fit.
        wanted, apart = exact(q[:1], k[:1], v[:1], causal) if tokens <= 4096 else None, {}
        for rung, way in ways.items():
            y.fill_(float("nan"))
            way()
            if wanted is not None:
                apart[rung] = (y[:1].double() - wanted).abs().max().item()
                assert apart[rung] < 0.05, (rung, apart)
        ways["sdpa_flash"] = lambda: sdpa(q, k, v, causal)
        if wanted is not None:
            apart["sdpa_flash"] = (sdpa(q, k, v, causal)[:1].double() - wanted).abs().max().item()
        operations = 4 * sequences * heads * tokens * tokens * elements / (2 if causal else 1)
        shape = [sequences, heads, kv_heads, tokens, elements, "causal" if causal else "full", str(dtype)[6:]]
        report("attention", shape, medians(ways), operations, "tflops", apart)


def decode(folder):
    module = Module(f"{folder}/attention.ptx")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = 2 * (1 << 30) / medians({"copy": lambda: target.copy_(source)})["copy"]
    print(json.dumps({"kind": "copy", "bytes_per_second": copy}), flush=True)
    del source, target
    for sequences, heads, kv_heads, keys, elements in [
        (16, 64, 8, 8192, 128),
        (64, 32, 8, 2048, 128),
        (8, 32, 32, 8192, 128),
        (1, 64, 8, 131072, 128),
        (16, 32, 8, 8192, 64),
        (128, 32, 1, 4096, 128),
        (64, 71, 1, 4096, 64),
    ]:
        q = vectors(sequences, heads, 1, elements, torch.bfloat16, 1)
        k, v = (vectors(sequences, kv_heads, keys, elements, torch.bfloat16, seed) for seed in (2, 3))
        y = torch.empty_like(q)
        workspace = torch.empty(sequences * heads * 64 * (elements + 2), device="cuda")
        blocks = sequences * kv_heads * div_up(heads // kv_heads, 64)
        splits = max(1, min(processors // blocks, 64))
        ways = {
            "multi_query": lambda: attend(module, "decode", q, k, v, y, False, workspace, splits),
            "sdpa_flash": lambda: sdpa(q, k, v, False),
        }
        ways["multi_query"]()
        apart = (y[:1].double() - exact(q[:1], k[:1], v[:1], False)).abs().max().item()
        assert apart < 0.01, apart
        seconds = medians(ways)
        shape = [sequences, heads, kv_heads, keys, elements, f"{splits} splits"]
        report("decode", shape, seconds, 4 * sequences * kv_heads * keys * elements, "tbps", apart)


def linear_words(tensors, x, weights):
    words = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return struct.pack(f"<{len(words)}Q4I", *words, *x.shape, weights.shape[0], GELU)


def forward(module, rung, x, weights, bias, y, sums=None):
    argument = linear_words((x, weights, bias, y, sums), x, weights)
    tokens, outputs = y.shape
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = div_up(tokens, 128) * div_up(outputs, 128)
    if rung == "naive":
        module.launch("nvme_linear_forward_naive", 2048, 256, 0, argument)
        module.launch("nvme_linear_activate", 2048, 256, 0, argument)
    elif rung != "persistent" and tiles <= processors // 2:
        tiles = div_up(tokens, 32) * div_up(outputs, 64)
        name = "nvme_linear_forward_few" + ("_bf16" if rung == "mixed" else "")
        module.launch(name, min(tiles, 2 * processors), 128, 36864, argument)
    else:
        name = f"nvme_linear_forward_{'mixed_bf16' if rung == 'mixed' else rung}"
        blocks = {"fused": tiles, "persistent": min(tiles, processors), "mixed": min(tiles, 2 * processors)}[rung]
        module.launch(name, blocks, 128 if rung == "mixed" else 256, 98304, argument)


def backward(module, rung, x, weights, sums, dy, rooms):
    argument = linear_words((x, weights, sums, dy, *rooms), x, weights)
    (tokens, inputs), outputs = x.shape, weights.shape[0]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    if rung == "naive":
        module.launch("nvme_linear_backward_clear", 2048, 256, 0, argument)
        module.launch("nvme_linear_backward_naive", 2048, 256, 0, argument)
        return
    module.launch("nvme_linear_backward_sums", div_up(outputs, 32), 256, 1024, argument)
    if rung == "warp_reduce":
        module.launch("nvme_linear_backward_warp_reduce", 2048, 256, 0, argument)
        return
    tiles = div_up(tokens, 128) * div_up(inputs, 128)
    if tiles <= processors // 2:
        tiles = div_up(tokens, 32) * div_up(inputs, 64)
        module.launch("nvme_linear_backward_inputs_few", min(tiles, 2 * processors), 128, 39936, argument)
    else:
        module.launch("nvme_linear_backward_inputs", min(tiles, processors), 256, 101376, argument)
    tiles = div_up(outputs, 128) * div_up(inputs, 128)
    module.launch("nvme_linear_backward_weights", min(tiles, processors), 256, 104448, argument)


def in_tf32(way):
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return way()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def linear(folder):
    module = Module(f"{folder}/linear.ptx")
    torch.backends.cuda.matmul.allow_tf32 = False
    for tokens, inputs, outputs in [
        (4096, 4096, 4096),
        (8192, 4096, 11008),
        (2048, 1024, 4096),
        (512, 4096, 4096),
        (128, 4096, 4096),
        (16, 4096, 4096),
    ]:
        x, bias = random(tokens, inputs, dtype=torch.float32), random(outputs, dtype=torch.float32, seed=3)
        weights = random(outputs, inputs, dtype=torch.float32, seed=2, size=inputs**-0.5)
        half = [t.bfloat16() for t in (x, weights, bias)]
        y, of_half = torch.empty(tokens, outputs, device="cuda"), torch.empty(tokens, outputs, device="cuda").bfloat16()

        def eager(x=x, weights=weights, bias=bias):
            return F.gelu(F.linear(x, weights, bias), approximate="tanh")

        ways = {rung: lambda rung=rung: forward(module, rung, x, weights, bias, y) for rung in ("fused", "persistent")}
        if tokens <= 512:
            ways = {"naive": lambda: forward(module, "naive", x, weights, bias, y), **ways}
        wanted = eager(x[:256].double(), weights.double(), bias.double())
        apart = {}
        for name, way in [*ways.items(), ("eager_f32", lambda: y.copy_(eager())), ("eager_tf32", lambda: y.copy_(in_tf32(eager)))]:
            y.fill_(float("nan"))
            way()
            apart[name] = (y[:256].double() - wanted).abs().max().item()
        ways["mixed"] = lambda: forward(module, "mixed", *half, of_half)
        ways["eager_f32"], ways["eager_tf32"] = eager, lambda: in_tf32(eager)
        ways["eager_bf16"] = lambda: eager(*half)
        ways["mixed"]()
        apart["mixed"] = (of_half[:256].double() - wanted).abs().max().item()
        assert all(apart[name] < 2e-4 for name in ("naive", "fused", "persistent") if name in apart), apart
        operations = 2 * tokens * inputs * outputs
        report("linear", [tokens, inputs, outputs], medians(ways), operations, "tflops", apart)
        gradients(module, x, weights, bias, 2 * operations)


def gradients(module, x, weights, bias, operations):
    sums = F.linear(x, weights, bias)
    dy = random(*sums.shape, dtype=torch.float32, seed=4)
    rooms = [torch.empty_like(t) for t in (sums, x, weights, bias)]
    rungs = ["atomic_free"] + (["naive", "warp_reduce"] if x.shape[0] <= 512 else [])
    ways = {rung: lambda rung=rung: backward(module, rung, x, weights, sums, dy, rooms) for rung in rungs}

    def eager():
        of_sums = torch.ops.aten.gelu_backward(dy, sums, approximate="tanh")
        return of_sums @ weights, of_sums.T @ x, of_sums.sum(0)

    wanted = [t.double() for t in eager()]
    apart = {}
    for name, way in ways.items():
        for room in rooms:
            room.fill_(float("nan"))
        way()
        apart[name] = max((a.double() - b).abs().max().item() for a, b in zip(rooms[1:], wanted))
        assert apart[name] < 5e-2, apart
    ways["eager_f32"] = eager
    report("backward", [*x.shape, weights.shape[0]], medians(ways), operations, "tflops", apart)


def main():
    folder, *chosen = sys.argv[1:] or ["."]
    torch.zeros(1, device="cuda")
    print(json.dumps({"kind": "machine", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for way in (attention, decode, linear):
        if not chosen or way.__name__ in chosen:
            way(folder)


if __name__ == "__main__":
    main()
