"""One large read by this package, by the C interface and by the tool, of the same file as the same device: a line of JSON.

    python large_reads.py --tool nvme-gpu [--library libnvme_gpu.so.1] [--gpu] [--size 268435456] [--rounds 5]

The rounds are in turns. Ends with 1 where Python or C reaches less than 95 % of the tool.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time

import nvme_gpu
from nvme_gpu import _bench
from nvme_gpu._native import Array

LEAST = 0.95


def of_tool(words: argparse.Namespace, path: str) -> tuple[str, float]:
    """The device that the tool reads, and GB/s of one read of all of it."""
    command = [words.tool, "bench", "--paths", path, "--sizes", str(words.size), "--runs", "3", "--json"]
    done = subprocess.run([*command, *(["--gpu", "0"] if words.gpu else [])], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    way = "gpu-direct" if words.gpu else "direct"
    cases = [case for case in report["cases"] if case["way"] == way and case["read_bytes"] == words.size]
    assert len(cases) == 1 and cases[0]["checked"], report
    return report["device"], cases[0]["gb_per_s"]


def timed(call, words: argparse.Namespace) -> float:
    """GB/s of the median of three calls."""
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return words.size / statistics.median(seconds[1:]) / 1e9


def of_python(words: argparse.Namespace, device: str, content: bytes) -> float:
    with nvme_gpu.open(device, 0 if words.gpu else None, read_only=True) as store:
        call, found = _bench._ours(store)(words.size)
        rate = timed(lambda: call(0), words)
        assert found() == content
        return rate


def of_c(words: argparse.Namespace, device: str, content: bytes) -> float:
    library = ctypes.CDLL(os.path.abspath(words.library))
    library.nvme_gpu_last_error.restype = ctypes.c_char_p
    library.nvme_gpu_pread.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64]
    library.nvme_gpu_close.argtypes = [ctypes.c_void_p]
    store = ctypes.c_void_p()

    def call(status: int) -> None:
        assert status == 0, library.nvme_gpu_last_error().decode()

    call(library.nvme_gpu_open(device.encode(), 0 if words.gpu else -1, None, ctypes.byref(store)))
    # Memory alone comes from this store.
    with nvme_gpu.open("sim:mem?size=1MiB&queues=32", 0 if words.gpu else None) as other:
        memory = Array((words.size,), "uint8", 1, other._native if words.gpu else None)
        rate = timed(lambda: call(library.nvme_gpu_pread(store, memory.address, words.size, 0)), words)
        assert memory.tobytes() == content
    library.nvme_gpu_close(store)
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", required=True)
    parser.add_argument("--library", help="the shared library of the C interface")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--size", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    found: dict[str, list[float]] = {"tool": [], "python": []}
    with tempfile.TemporaryDirectory() as folder:
        path = _bench._made(os.path.join(folder, "file"), words.size)
        with open(path, "rb") as file:
            content = file.read()
        for _ in range(words.rounds):
            device, rate = of_tool(words, path)
            found["tool"].append(rate)
            found["python"].append(of_python(words, device, content))
            if words.library:
                found.setdefault("c", []).append(of_c(words, device, content))
    answer: dict[str, object] = {"device": device, "size": words.size, "gpu": words.gpu}
    answer |= {f"{name}_gb_per_s": round(statistics.median(rates), 3) for name, rates in found.items()}
    shares = {name: statistics.median(rates) / statistics.median(found["tool"]) for name, rates in found.items()}
    answer |= {f"{name}_of_tool": round(share, 3) for name, share in shares.items() if name != "tool"}
    print(json.dumps(answer))
    return 1 if min(shares.values()) < LEAST else 0


if __name__ == "__main__":
    raise SystemExit(main())
