"""Weights that are larger than the memory for them, by each way that PyTorch users have: one file, one JSON line a way.

    python large_rivals.py [--file /dev/shm/rivals.safetensors] [--gb 28] [--budget-gb 8] [--layers 40] [--passes 3] [WAY ...]

Writes a safetensors file of random layers, all distinct, unless it is there. Each way brings every layer to the GPU in
order, sums it there (exactly: 64-bit words as integers, so that a torn or stale layer is seen) and forgets it, for
`--passes` passes; the first pass is not counted. Ways:

    gpu          LayerLoader over the simulated drive: the GPU submits the reads
    file         LayerLoader over the same file: host threads read it
    mmap         numpy.memmap, a tensor over it, .cuda()
    pinned       readinto() a pinned buffer of a layer, copy_() to the GPU without blocking, two buffers in turns
    safetensors  safe_open(device="cuda"), get_tensor
    accelerate   dispatch_model with layers on "disk", over the safetensors file

Tokens/s of a dense model is passes/s: each weight is used once a token. `peak_gpu_gb` is what the GPU lost in free
memory. Exit status 0: every way that ran gave the same sums; a way whose package is missing says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time

WAYS = {}


def way(call):
    WAYS[call.__name__.rstrip("_")] = call
    return call


def write(options):
    import torch

    nbytes = int(options.gb * 1e9 / options.layers) // 4096 * 4096
    header, at = {}, 0
    for layer in range(options.layers):
        header[f"layers.{layer}.weight"] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 4096)
    size = 8 + len(text) + at
    if os.path.exists(options.file) and os.path.getsize(options.file) == size:
        return nbytes
    torch.manual_seed(5)
    with open(options.file, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(options.layers):
            layer = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
            file.write(memoryview(layer.cpu().numpy()))
    del layer
    return nbytes


def total(layer):
    """The sum of the layer's 64-bit words, modulo 2^64."""
    import torch

    return layer.view(torch.int64).sum()


def by_loader(options, device):
    import nvme_gpu

    with nvme_gpu.open(device, gpu=0, gpu_blocks=32, read_only=True) as store:
        slots = max(2, int(options.budget_gb * 1e9) // options.nbytes)
        loader = nvme_gpu.LayerLoader(nvme_gpu.catalog(store), "cuda", slots=slots)
        yield {"mover": loader.path["mover"], "slots": slots}
        while True:
            found = []
            for index in range(options.layers):
                with loader.layer(index) as w:
                    found.append(total(w["weight"]))
            loader.check(120)
            yield found


@way
def gpu(options):
    return by_loader(options, f"sim:{options.file}?block=4096&queues=64&threads=12")


@way
def file(options):
    return by_loader(options, f"file:{options.file}")


@way
def mmap(options):
    import numpy
    import torch

    image = numpy.memmap(options.file, mode="c", offset=options.begin)
    yield {}
    while True:
        found = []
        for index in range(options.layers):
            part = image[index * options.nbytes : (index + 1) * options.nbytes]
            found.append(total(torch.from_numpy(part).cuda()))
        yield found


@way
def pinned(options):
    import torch

    buffers = [torch.empty(options.nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(options.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    free = [torch.cuda.Event() for _ in range(2)]
    with open(options.file, "rb", buffering=0) as data:
        yield {}
        while True:
            data.seek(options.begin)
            found = []
            for index in range(options.layers):
                turn = index % 2
                free[turn].synchronize()
                into, done = memoryview(buffers[turn].numpy()), 0
                while done < options.nbytes:
                    done += data.readinto(into[done:])
                there[turn].copy_(buffers[turn], non_blocking=True)
                free[turn].record()
                found.append(total(there[turn]))
            yield found


@way
def safetensors(options):
    from safetensors import safe_open

    yield {}
    while True:
        found = []
        with safe_open(options.file, framework="pt", device="cuda") as data:
            for index in range(options.layers):
                found.append(total(data.get_tensor(f"layers.{index}.weight")))
        yield found


@way
def accelerate(options):
    import torch
    from accelerate import dispatch_model, init_empty_weights

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            empty = torch.empty(options.nbytes, dtype=torch.uint8)
            self.weight = torch.nn.Parameter(empty, requires_grad=False)

        def forward(self, x):
            return x + total(self.weight)

    with init_empty_weights():
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList(Layer() for _ in range(options.layers))
    names = [f"layers.{index}" for index in range(options.layers)]
    index = {
        f"{name}.weight": {"safetensors_file": options.file, "weight_name": f"{name}.weight", "dtype": "uint8"}
        for name in names
    }
    dispatch_model(
        model, {name: "disk" for name in names}, main_device=0, offload_index=index, offload_dir=None, force_hooks=True
    )
    yield {}
    zero = torch.zeros((), dtype=torch.int64, device="cuda")
    while True:
        yield [layer(zero) for layer in model.layers]


class Watch(threading.Thread):
    """The least free memory of the GPU while it runs."""

    def __init__(self):
        import torch

        super().__init__(daemon=True)
        self.before = self.least = torch.cuda.mem_get_info()[0]
        self.ended = threading.Event()

    def run(self):
        import torch

        while not self.ended.wait(0.02):
            self.least = min(self.least, torch.cuda.mem_get_info()[0])


def measure(options, name):
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    ways = WAYS[name](options)
    watch = Watch()
    watch.start()
    try:
        said = next(ways)
        seconds, sums = [], None
        for _ in range(options.passes + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            found = [int(one) for one in next(ways)]
            seconds.append(time.perf_counter() - begin)
            sums = sums or found
            if found != sums:
                raise AssertionError("two passes differ")
    finally:
        watch.ended.set()
        watch.join()
        ways.close()
    median = statistics.median(seconds[1:])
    return sums, {
        "way": name,
        "passes_per_s": 1 / median,
        "gb_per_s": options.nbytes * options.layers / median / 1e9,
        "seconds": seconds,
        "peak_gpu_gb": (watch.before - watch.least) / 1e9,
        **said,
    }


def main():
    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--file", default="/dev/shm/rivals.safetensors")
    parser.add_argument("--gb", type=float, default=28)
    parser.add_argument("--budget-gb", type=float, default=8)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("ways", nargs="*", default=[])
    options = parser.parse_args()
    options.nbytes = write(options)
    options.begin = os.path.getsize(options.file) - options.nbytes * options.layers
    torch.cuda.empty_cache()
    want, agree = None, True
    for name in options.ways or WAYS:
        try:
            sums, line = measure(options, name)
        except ImportError as error:
            print(json.dumps({"way": name, "skipped": str(error)}), flush=True)
            continue
        want = want or sums
        line["same_sums"] = sums == want
        agree &= line["same_sums"]
        print(json.dumps(line), flush=True)
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
