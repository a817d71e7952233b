"""LayerLoader and DataLoader on a machine with a GPU and torch 2: one JSON line for each case, then `N passed, N failed`.

    python loaders_on_gpu.py [--layers 16] [--mib 64] [--slots 3] [--blocks 32] [CASE ...]

Needs the wheel and torch. `overlap` prints, for products of matrices that take 0.5, 1 and 2 times as long as the reads:
seconds of reads alone, of products alone, of both, and both divided by the longer of the two. Exit status 0: nothing
failed; figures fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback

WIDTH = 4096
CASES = []


def case(call):
    CASES.append(call)
    return call


def device_of(options, extra=""):
    size = options.layers * options.mib + 64
    return f"sim:mem?size={size}MiB&block=4096&queues=64&threads=8{extra}"


class Model:
    """Layers of one float16 matrix each, in a store and in memory of the GPU."""

    def __init__(self, options, extra="", layers=None, mib=None, device=None, **words):
        import torch

        import nvme_gpu

        self.count, mib = layers or options.layers, mib or options.mib
        self.rows = mib * (1 << 20) // (2 * WIDTH)
        self.store = nvme_gpu.open(device or device_of(options, extra), gpu=0, gpu_blocks=options.blocks)
        torch.manual_seed(3)
        header, at = {}, 0
        nbytes = self.rows * WIDTH * 2
        for layer in range(self.count):
            header[f"blk.{layer}.w"] = {"dtype": "F16", "shape": [self.rows, WIDTH], "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % 4096)
        self.store.write(len(text).to_bytes(8, "little") + text)
        self.weights = []
        for layer in range(self.count):
            weight = (torch.randn(self.rows, WIDTH, device="cuda") / WIDTH**0.5).half()
            self.store.write(weight.cpu(), 8 + len(text) + layer * nbytes)
            self.weights.append(weight)
        all_bytes = 8 + len(text) + nbytes * self.count
        self.loader = nvme_gpu.LayerLoader(nvme_gpu.catalog(self.store, nbytes=all_bytes), "cuda", **words)
        self.nbytes = nbytes * self.count

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.close()

    def sums(self):
        """A sum over each layer of a pass, exact: of bits, as whole numbers."""
        import torch

        found = []
        for index in range(self.count):
            with self.loader.layer(index) as w:
                found.append(w["w"].view(torch.int16).to(torch.int64).sum())
        return found

    def want(self):
        import torch

        return [weight.view(torch.int16).to(torch.int64).sum() for weight in self.weights]


def same(found, want):
    import torch

    torch.cuda.synchronize()
    wrong = [index for index, (a, b) in enumerate(zip(found, want)) if a.item() != b.item()]
    assert len(found) == len(want) and not wrong, f"layers {wrong} are wrong"


@case
def layers_are_whole(options):
    """Every layer of five passes, by few slots and many, beside the weights in memory."""
    paths = []
    for words in ({}, {"slots": 3}, {"slots": 2, "resident": [0, 1]}, {"slots": 1}, {"order": "learned"}):
        with Model(options, layers=7, mib=8, **words) as model:
            want = model.want()
            for _ in range(5):
                found = model.sums()
                model.loader.check(20)
                same(found, want)
            paths.append((words, model.loader.stats()))
            path = model.loader.path
    return {"path": path, "stats": paths}


@case
def files_and_stripes(options):
    """The same from a file, whose rows a host thread moves, and from two drives."""
    movers = []
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        file.truncate(96 << 20)
        stripe = "stripe:sim:mem?size=64MiB&queues=32&threads=2|sim:mem?size=64MiB&queues=32&threads=2?stripe=128KiB"
        for device in (f"file:{file.name}", stripe):
            with Model(options, layers=5, mib=8, device=device) as model:
                for _ in range(3):
                    found = model.sums()
                    model.loader.check(20)
                    same(found, model.want())
                movers.append(model.loader.path["mover"])
    return {"movers": movers}


@case
def the_host_does_not_wait(options):
    """The calls for a pass return before the GPU has done a part of it."""
    import torch

    with Model(options, layers=8, mib=8) as model:
        model.sums()
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        begin = time.perf_counter()
        found = model.sums()
        host = time.perf_counter() - begin
        is_ahead = not torch.cuda.current_stream().query()
        model.loader.check(20)
        same(found, model.want())
        whole = time.perf_counter() - begin
        assert is_ahead, f"{host} of {whole} s"
        return {"host_ms": host * 1e3, "all_ms": whole * 1e3}


@case
def other_calls_in_the_middle(options):
    """cudaFree, empty_cache and a first compile while layers are under way."""
    import torch

    with Model(options, layers=8, mib=8) as model:
        begin = time.perf_counter()
        for round in range(20):
            found = []
            for index in range(model.count):
                with model.loader.layer(index) as w:
                    found.append(w["w"].view(torch.int16).to(torch.int64).sum())
                    torch.empty(1 << 24, device="cuda")
                    torch.cuda.empty_cache()
                    if round == index == 3:
                        torch.special.bessel_j0(torch.ones(3, device="cuda"))
            model.loader.check(20)
            same(found, model.want())
        return {"seconds": time.perf_counter() - begin}


@case
def faults(options):
    """A refused read names its layer; the pass after it is right."""
    import nvme_gpu

    failed = []
    # Enough failures that the repeated parts of a failed command fail, too.
    extra = "&fault=status:0x281@op=read,nth=300-3000"
    with Model(options, extra, layers=7, mib=8) as model:
        want = model.want()
        for _ in range(8):
            try:
                found = model.sums()
                model.loader.check(20)
                same(found, want)
            except nvme_gpu.Status as error:
                assert "layer " in error.cause
                failed.append(error.cause)
        found = model.sums()
        model.loader.check(20)
        same(found, want)
    assert failed
    return {"failed": failed[:2]}


def timed(call, rounds=5):
    """The median of some runs in seconds, after one that does not count."""
    import torch

    taken = []
    for round in range(rounds + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


@case
def overlap(options):
    """Reads beside products of matrices: total against the longer of both."""
    import torch

    found = []
    with Model(options, slots=options.slots) as model:
        loader, count = model.loader, model.count

        def load():
            for index in range(count):
                with loader.layer(index):
                    pass

        alone = timed(load)
        loader.check(20)
        for ratio in (0.5, 1.0, 2.0):
            # As many columns as make the products that long.
            columns, times = 1024, 1
            x = torch.randn(WIDTH, columns, device="cuda").half()
            once = timed(lambda: [torch.matmul(weight, x) for weight in model.weights])
            times = max(1, round(ratio * alone / once))

            def products(weight):
                for _ in range(times):
                    torch.matmul(weight, x)

            compute = timed(lambda: [products(weight) for weight in model.weights])

            def both():
                for index in range(count):
                    with loader.layer(index) as w:
                        products(w["w"])

            total = timed(both)
            loader.check(20)
            found.append(
                {
                    "ratio": ratio,
                    "load_s": alone,
                    "compute_s": compute,
                    "total_s": total,
                    "of_longer": total / max(alone, compute),
                }
            )
        rate = model.nbytes / alone / 1e9
        return {"load_gb_s": rate, "slots": options.slots, "blocks": options.blocks, "path": loader.path, "cases": found}


@case
def batches(options):
    """Rows by both ways of staging, beside the table in memory; and their rate beside bare gathers."""
    import torch

    import nvme_gpu

    rows, width, size = 65_536, 1024, 8192
    with nvme_gpu.open("sim:mem?size=512MiB&queues=64&threads=8", gpu=0) as store:
        table = store.table(0, shape=(rows, width), dtype="float32")
        values = torch.randn(rows, width)
        store.write(values)
        values = values.cuda()
        for words in ({}, {"staging": "pinned"}, {"streams": 4, "prefetch_depth": 5}, {"prefetch_depth": 0}):
            loader = nvme_gpu.DataLoader(table, 5000, shuffle=True, seed=1, device="cuda", with_ids=True, **words)
            seen = 0
            for ids, found in loader:
                torch.cuda.synchronize()
                assert torch.equal(found, values[torch.tensor(ids, device="cuda")]), words
                seen += len(ids)
            assert seen == rows
        ids = torch.randperm(rows, device="cuda")

        def bare():
            for at in range(0, rows, size):
                table[ids[at : at + size]]

        rates = {"bare_gb_s": rows * width * 4 / timed(bare) / 1e9}
        for staging in ("gpu", "pinned"):
            loader = nvme_gpu.DataLoader(table, size, shuffle=True, device="cuda", staging=staging)
            rates[f"{staging}_gb_s"] = rows * width * 4 / timed(lambda: [None for _ in loader]) / 1e9
        return rates


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=32, help="blocks of the GPU that read")
    parser.add_argument("cases", nargs="*", help="words that names of cases contain")
    options = parser.parse_args()
    passed = failed = 0
    for call in CASES:
        if options.cases and not any(word in call.__name__ for word in options.cases):
            continue
        begin = time.perf_counter()
        line = {"case": call.__name__}
        try:
            line["result"] = call(options)
            passed += 1
        except Exception as error:
            failed += 1
            line["failed"] = f"{type(error).__name__}: {error}"
            line["trace"] = traceback.format_exc().splitlines()[-6:]
        line["seconds"] = round(time.perf_counter() - begin, 2)
        print(json.dumps(line), flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
