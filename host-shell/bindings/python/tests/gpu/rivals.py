"""DiskEmbedding and `table[ids]` beside what else trains or gathers from a GPU: one JSON line.

    python rivals.py [--rows 1000000] [--width 64] [--batch 16384] [--steps 100]

Ways to train one embedding by SGD, which all see the same ids and gradients:

- `DiskEmbedding`: rows on a simulated drive;
- `nn.Embedding`: rows in GPU memory, sparse gradients;
- `UVA`: rows in pinned host memory, read and written by the GPU (a tensor over `cudaHostGetDevicePointer`);
- `CPU`: rows in host memory, looked up by the CPU and copied;
- `FBGEMM SSD`: `SSDTableBatchedEmbeddingBags` of fbgemm_gpu, where it is installed.

And to gather rows by ids that lie on the GPU: `kvikio`, one pread each by its threads, where it is installed. A way that
cannot run says why. Rows are compared with those of nn.Embedding after the last step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import time
import traceback

import torch

import nvme_gpu
from nvme_gpu.torch import DiskEmbedding, DiskSGD

RATE = 0.1


def ids_of(words):
    generator = torch.Generator(device="cuda").manual_seed(3)
    for _ in range(words.steps):
        # Some rows are asked for often.
        drawn = torch.rand(words.batch, device="cuda", generator=generator).pow(2)
        yield (drawn * words.rows).long().clamp(max=words.rows - 1)


def timed(words, step):
    """Seconds of all steps but the first ten."""
    begin = 0.0
    for number, ids in enumerate(ids_of(words)):
        if number == 10:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        step(ids)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def loss_of(rows):
    return rows.pow(2).sum() * 0.5


def in_gpu_memory(words, weights):
    embedding = torch.nn.Embedding(words.rows, words.width, sparse=True, _weight=weights.cuda())
    optimizer = torch.optim.SGD(embedding.parameters(), lr=RATE)

    def step(ids):
        optimizer.zero_grad()
        loss_of(embedding(ids)).backward()
        optimizer.step()

    seconds = timed(words, step)
    return seconds, embedding.weight.detach().cpu()


def on_disk(words, weights):
    device = f"sim:mem?size={weights.numel() * 4 + (1 << 20)}&block=512&queues=32&threads={words.threads}"
    with nvme_gpu.open(device, 0) as store:
        store.write_from(weights).result()
        table = store.table(0, shape=tuple(weights.shape), dtype="float32")
        embedding = DiskEmbedding(table)
        optimizer = DiskSGD(embedding.parameters(), lr=RATE)

        def step(ids):
            optimizer.zero_grad()
            loss_of(embedding(ids)).backward()
            optimizer.step()

        seconds = timed(words, step)
        table.check()
        return seconds, table[torch.arange(words.rows)]


class OnGpu:
    """Pinned host memory as an array of the GPU: both have one address."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "strides": None,
        }


def uva(words, weights):
    pinned = weights.clone().pin_memory()
    reached = torch.as_tensor(OnGpu(pinned), device="cuda")
    if not reached.is_cuda or reached.data_ptr() != pinned.data_ptr():
        raise RuntimeError("this torch copies pinned memory")

    def step(ids):
        rows = reached[ids]
        reached.index_add_(0, ids, rows, alpha=-RATE)

    return timed(words, step), pinned


def by_the_cpu(words, weights):
    memory = weights.clone()

    def step(ids):
        at = ids.cpu()
        rows = memory[at].cuda()
        memory.index_add_(0, at, (rows * -RATE).cpu())

    return timed(words, step), memory


def fbgemm(words, weights):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.tbe.ssd import SSDTableBatchedEmbeddingBags

    with tempfile.TemporaryDirectory() as folder:
        embedding = SSDTableBatchedEmbeddingBags(
            embedding_specs=[(words.rows, words.width)],
            feature_table_map=[0],
            ssd_storage_directory=folder,
            cache_sets=max(1, words.rows // 32 // 10),
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=RATE,
        ).cuda()
        offsets = torch.arange(words.batch + 1, device="cuda")
        seconds = timed(words, lambda ids: loss_of(embedding(ids, offsets)).backward())
        # Its optimizer is row-wise Adagrad: rows cannot be those of SGD.
        return seconds, None


def gathers(words, weights, gather):
    """Rows a second of ``gather``; the first is not counted, and no comparison of rows is."""
    seconds = 0.0
    for number, ids in enumerate(ids_of(words)):
        if number == 4:
            break
        ids = ids[: words.gather]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        rows = gather(ids)
        torch.cuda.synchronize()
        if number:
            seconds += time.perf_counter() - begin
        if not torch.equal(rows.cpu(), weights[ids.cpu()]):
            raise AssertionError("wrong rows")
    return round(3 * words.gather / seconds)


def kvikio_gathers(words, weights):
    import kvikio
    import kvikio.defaults

    with tempfile.NamedTemporaryFile() as file:
        weights.numpy().tofile(file.name)
        out = torch.empty(words.gather, words.width, device="cuda")
        row = words.width * 4
        opened = kvikio.CuFile(file.name, "r")

        def gather(ids):
            waits = [opened.pread(out[at], row, one * row) for at, one in enumerate(ids.tolist())]
            for one in waits:
                one.get()
            return out

        rate = gathers(words, weights, gather)
        return {"rows_per_s": rate, "compat": str(kvikio.defaults.get("compat_mode"))}


def our_gathers(words, weights):
    device = f"sim:mem?size={weights.numel() * 4 + (1 << 20)}&block=512&queues=32&threads={words.threads}"
    with nvme_gpu.open(device, 0) as store:
        store.write_from(weights).result()
        table = store.table(0, shape=tuple(weights.shape), dtype="float32")
        return {"rows_per_s": gathers(words, weights, lambda ids: table[ids])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--gather", type=int, default=4096, help="ids of a gather, at most those of a batch")
    parser.add_argument("--threads", type=int, default=12, help="of the simulated drive")
    words = parser.parse_args()
    words.gather = min(words.gather, words.batch)
    # What is preloaded of a library of the GPU machine is found by name.
    ctypes.CDLL("libcuda.so.1")
    torch.manual_seed(1)
    weights = torch.randn(words.rows, words.width)
    answers, failed = {}, 0
    want = None
    ways = {
        "nn.Embedding in GPU memory": in_gpu_memory,
        "DiskEmbedding": on_disk,
        "UVA": uva,
        "CPU": by_the_cpu,
        "FBGEMM SSD": fbgemm,
    }
    for name, way in ways.items():
        try:
            seconds, rows = way(words, weights)
        except (ImportError, OSError) as error:
            answers[name] = {"not here": f"{type(error).__name__}: {error}"[:200]}
            continue
        except Exception as error:
            answers[name] = {"failed": f"{type(error).__name__}: {error}"[:300], "where": traceback.format_exc()[-300:]}
            failed += name == "DiskEmbedding"
            continue
        if want is None:
            want = rows
        difference = None if rows is None else (rows - want).abs().max().item()
        if name == "DiskEmbedding" and difference > 1e-3:
            failed += 1
        steps = words.steps - 10
        answers[name] = {
            "ms_per_step": round(seconds / steps * 1e3, 3),
            "million_rows_per_s": round(steps * words.batch / seconds / 1e6, 3),
            "largest_difference": difference,
        }
    for name, way in (("kvikio preads", kvikio_gathers), ("table[ids]", our_gathers)):
        try:
            answers[name] = way(words, weights)
        except (ImportError, OSError) as error:
            answers[name] = {"not here": f"{type(error).__name__}: {error}"[:200]}
        except Exception as error:
            answers[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            failed += name == "table[ids]"
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cores": os.cpu_count()}
    print(json.dumps(about | {"rows": words.rows, "width": words.width, "batch": words.batch, "ways": answers}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
