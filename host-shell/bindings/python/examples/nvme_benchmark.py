"""Blocks of a drive into memory of a GPU, or of the host: how fast, and whether they are right.

    python nvme_benchmark.py [DEVICE] [--size-mb 100] [--cpu]

The device is a simulated drive unless one is named: `vfio:BDF`, `file:PATH`, `sim:PATH`. Of the simulated one the
content is known and compared. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time

import nvme_gpu
from pycuda_nvme import NVMeGPU


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", nargs="?", default=None)
    parser.add_argument("--size-mb", type=float, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="into memory of the host")
    words = parser.parse_args()
    nbytes = int(words.size_mb * (1 << 20))
    device = words.device or f"sim:mem?size={max(nbytes, 1 << 20) + (1 << 20)}&queues=32&threads=2"
    gpu, note = None if words.cpu else 0, ""
    try:
        nvme = NVMeGPU(device, gpu)
    except nvme_gpu.NvmeGpuError as error:
        if gpu is None or error.code != "environment":
            raise
        nvme, gpu, note = NVMeGPU(device, None), None, f"without a GPU: {error.cause}"
    with nvme:
        want = None
        if words.device is None:
            piece = hashlib.shake_128(b"nvme_benchmark").digest(1 << 20)
            for begin in range(0, nbytes, len(piece)):
                nvme.store.write(piece[: nbytes - begin], begin)
            want = hashlib.sha256((piece * (nbytes // len(piece) + 1))[:nbytes]).hexdigest()
        seconds = []
        for _ in range(words.runs):
            begin = time.perf_counter()
            data = nvme.read_to_gpu(lba=0, size_mb=words.size_mb)
            seconds.append(time.perf_counter() - begin)
        print(f"Read {data.nbytes} bytes to {data.device}")
        found = hashlib.sha256(data.tobytes()).hexdigest()
        right = want is None or found == want
        answer = {
            "device": device,
            "to": data.device,
            "bytes": data.nbytes,
            "gb_per_s": round(nbytes / min(seconds) / 1e9, 3),
            "sha256": found,
            "checked": "right" if want and right else "WRONG" if want else "of unknown content",
            "path": nvme.store.path,
            "note": note,
        }
    print(json.dumps(answer))
    return 0 if right else 3


if __name__ == "__main__":
    sys.exit(main())
