"""Rows of about 4 KiB whose elements come out wider, by `table[ids]` on a GPU: one JSON line a format.

    python wide_rows.py [--rows 65536] [--runs 7]

Random ids of 64 bits, from the call to the end, medians in turns. The bytes of the tables are random: which numbers come
out is checked by the tests (`gpu-test wide`).
"""

import argparse
import json
import statistics
import time

import nvme_gpu
import torch

#: name of the table, elements of a row, type of what comes out
FORMATS = [
    ("uint8", 4096, None),
    ("bfloat16", 2048, "float32"),
    ("q8_0", 3840, "float16"),
    ("q4_0", 7264, "float16"),
]
SIZE = 1 << 30


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    device = f"sim:mem?size={SIZE}&block=4096&queues=64&threads=12"
    with nvme_gpu.open(device, gpu=0, gpu_queues=32, gpu_blocks=32) as store:
        for at in range(0, SIZE, 64 << 20):
            store.write(torch.randint(0, 256, (64 << 20,), dtype=torch.uint8), at)
        tables = []
        for name, elements, to in FORMATS:
            nbytes = {"q8_0": elements // 32 * 34, "q4_0": elements // 32 * 18}.get(name)
            nbytes = nbytes or elements * (1 if name == "uint8" else 2)
            shape = (SIZE // nbytes, elements)
            words = {} if to is None else {"to": to}
            tables.append((name, to, nbytes, store.table(0, shape=shape, dtype=name, **words)))
        seconds = {name: [] for name, *_ in tables}
        few = {name: [] for name, *_ in tables}
        for run in range(options.runs + 1):
            for name, _, nbytes, table in tables:
                for into, rows in ((seconds, options.rows), (few, 32)):
                    ids = torch.randint(0, SIZE // nbytes, (rows,), device="cuda")
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    out = table[ids]
                    torch.cuda.synchronize()
                    if run:
                        into[name].append(time.perf_counter() - begin)
                    del out
        for name, to, nbytes, table in tables:
            table.check()
            rate = options.rows / statistics.median(seconds[name])
            line = {"from": name, "to": to, "row_bytes": nbytes, "million_rows_per_s": rate / 1e6}
            print(json.dumps({**line, "us_32_rows": statistics.median(few[name]) * 1e6, "seconds": seconds[name]}))


if __name__ == "__main__":
    main()
