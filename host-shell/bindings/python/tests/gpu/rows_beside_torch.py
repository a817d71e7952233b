"""Rows by ids that lie on the GPU, beside what a program of torch does without this package: one JSON line.

    python rows_beside_torch.py [--rows 65536] [--row-bytes 4096] [--table-bytes 1073741824] [--runs 5]

The same table lies on a simulated drive and in a file in the page cache. Each way gives rows in GPU memory, which are
compared once; medians of runs in turns, in seconds from the call to the end on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time


def main() -> int:
    import numpy
    import torch

    import nvme_gpu

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--row-bytes", type=int, default=4096)
    parser.add_argument("--table-bytes", type=int, default=1 << 30)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=12, help="of the simulated drive")
    words = parser.parse_args()

    count = words.table_bytes // words.row_bytes
    width = words.row_bytes // 4
    values = numpy.random.default_rng(7).standard_normal((count, width), dtype=numpy.float32)
    block = min(words.row_bytes, 4096)
    device = f"sim:mem?size={words.table_bytes}&block={block}&queues=32&threads={words.threads}"
    with tempfile.TemporaryDirectory() as folder, nvme_gpu.open(device, gpu=0) as store:
        path = os.path.join(folder, "table")
        values.tofile(path)
        store.write(memoryview(values).cast("B"), 0)
        table = store.table(0, shape=(count, width), dtype="float32")
        mapped = torch.from_numpy(numpy.memmap(path, dtype=numpy.float32, mode="c", shape=(count, width)))
        pinned = torch.empty((words.rows, width), pin_memory=True)

        def index_select(ids):
            torch.index_select(mapped, 0, ids.cpu(), out=pinned)
            return pinned.cuda(non_blocking=True)

        with nvme_gpu.open(f"file:{path}", gpu=0) as file:
            of_file = file.table(0, shape=(count, width), dtype="float32")
            ways = {
                "table[ids]": lambda ids: table[ids],
                "table[ids] of a file": lambda ids: of_file[ids],
                "mmap[ids.cpu()].cuda()": lambda ids: mapped[ids.cpu()].cuda(),
                "index_select into pinned memory, one copy": index_select,
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for run in range(words.runs + 1):
                ids = torch.randint(0, count, (words.rows,), device="cuda")
                want = mapped[ids.cpu()].cuda()
                for name, way in ways.items():
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    rows = way(ids)
                    torch.cuda.synchronize()
                    took = time.perf_counter() - begin
                    if not torch.equal(rows, want):
                        raise AssertionError(f"{name}: wrong rows")
                    if run > 0:
                        seconds[name].append(took)
    rates = {name: words.rows / statistics.median(took) / 1e6 for name, took in seconds.items()}
    ours = rates["table[ids]"]
    print(
        json.dumps(
            {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "cores": os.cpu_count(),
                "rows": words.rows,
                "row_bytes": words.row_bytes,
                "table_bytes": words.table_bytes,
                "million_rows_per_s": {name: round(rate, 3) for name, rate in rates.items()},
                "table_over": {name: round(ours / rate, 2) for name, rate in rates.items()},
                "seconds": seconds,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
