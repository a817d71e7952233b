"""``python -m nvme_gpu demo|doctor``."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
import tempfile
import time
from array import array
from typing import Any, Callable

from . import Array, NvmeGpuError, __version__, _native, _store, open

ROW_WORDS = 64
"""8-byte words of a row: 512 bytes."""


def doctor(as_json: bool) -> int:
    """What this machine can do, and the remedy for what it cannot."""
    report = json.loads(_native.doctor())
    gpu, remedy = "none", ""
    try:
        gpu = _native.gpu(0)
    except NvmeGpuError as error:
        gpu, remedy = error.cause, error.remedy
    if as_json:
        print(json.dumps({"version": __version__, "gpu": gpu, **report}))
        return 0
    print(f"nvme_gpu {__version__}, Python {sys.version.split()[0]}")
    print(f"GPU 0: {gpu}{': ' + remedy if remedy else ''}")
    for one in report["findings"]:
        line = f"{one['status']:8} {one['subject']}: {one['text']}"
        print(line + (f": {one['remedy']}" if one.get("remedy") else ""))
    return 0


def _best(call: Callable[[], Any], seconds: float) -> tuple[float, Any]:
    """The shortest of several runs, and what it gave."""
    best, found, begin = float("inf"), None, time.perf_counter()
    while time.perf_counter() - begin < seconds or found is None:
        before = time.perf_counter()
        found = call()
        best = min(best, time.perf_counter() - before)
    return best, found


def _fill(path: str, rows: int) -> None:
    """Row ``i``: the words ``i * 64``, ``i * 64 + 1`` and so on."""
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        for first in range(0, rows, 4096):
            last = min(first + 4096, rows)
            file.write(array("q", range(first * ROW_WORDS, last * ROW_WORDS)).tobytes())
        file.flush()
        os.replace(file.name, path)


def _right(data: bytes, ids: array[int]) -> bool:
    """Whether every word of every row is right."""
    words = memoryview(data).cast("q")
    for index, row in enumerate(ids):
        begin = row * ROW_WORDS
        if words[index * ROW_WORDS : (index + 1) * ROW_WORDS].tolist() != list(range(begin, begin + ROW_WORDS)):
            return False
    return len(words) == len(ids) * ROW_WORDS


def demo(rows: int, count: int, seconds: float, use_gpu: bool, as_json: bool) -> int:
    """A table in a file behind the simulated drive: rows by ids, every word checked, beside other ways."""
    ids = array("q", (random.Random(1).randrange(rows) for _ in range(count)))
    results: list[dict[str, Any]] = []

    def add(name: str, call: Callable[[], bytes], note: str = "") -> None:
        best, data = _best(call, seconds)
        results.append({"way": name, "rows_per_s": round(count / best), "right": _right(data, ids), "note": note})

    why = ""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "table.img")
        _fill(path, rows)
        shape = (rows, ROW_WORDS)
        if use_gpu:
            try:
                with open(f"sim:{path}?queues=32&threads=2", gpu=0) as store:
                    # The ids come from the drive, too: no library of arrays is needed.
                    table = store.table(0, shape=shape, dtype="int64")
                    on_gpu = _ids_on_gpu(store, ids)
                    add("table[ids] by the GPU", lambda: table.gather(on_gpu, check="now").tobytes(), store.path["why"])
            except NvmeGpuError as error:
                why = str(error)
        else:
            why = "--cpu was given"
        with open(f"sim:{path}", read_only=True) as store:
            table = store.table(0, shape=shape, dtype="int64")
            out = bytearray(count * ROW_WORDS * 8)
            add("table[ids] by CPU threads", lambda: bytes(table.gather(ids, out=out)), "simulated drive")
        with open(path, read_only=True) as store:
            table = store.table(0, shape=shape, dtype="int64")
            add("table[ids] of the file", lambda: bytes(table.gather(ids, out=out)), store.path["path"])
        size = ROW_WORDS * 8
        with _reading(path) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            add("mmap and slices", lambda: b"".join([mapped[one * size : (one + 1) * size] for one in ids]), "page cache")
            number = file.fileno()
            add("os.pread", lambda: b"".join([os.pread(number, size, one * size) for one in ids]), "page cache")
            try:
                import numpy
            except ImportError:
                pass
            else:
                words = numpy.frombuffer(mapped, dtype=numpy.int64).reshape(shape)
                index = numpy.frombuffer(ids, dtype=numpy.int64)
                add("numpy.memmap[ids]", lambda: words[index].tobytes(), "page cache")
                del words
    all_right = all(one["right"] for one in results)
    if as_json:
        print(json.dumps({"rows": rows, "ids": count, "no_gpu": why or None, "verified": all_right, "ways": results}))
        return 0 if all_right else 3
    print(f"{count} of {rows} rows of {size} bytes by random ids, best of {seconds} s each")
    if why:
        print(f"by CPU threads, without a GPU: {why}")
    for one in results:
        word = "every word right" if one["right"] else "WRONG"
        print(f"{one['way']:28} {one['rows_per_s']:>12,} rows/s  {word}  {one['note']}")
    return 0 if all_right else 3


def _reading(path: str) -> Any:
    import builtins

    return builtins.open(path, "rb")


def _ids_on_gpu(store: _store.Store, ids: array[int]) -> Array:
    with open("sim:mem?size=64MiB&queues=32", gpu=store.gpu) as other:
        other.write(ids)
        made = Array((len(ids),), "int64", 8, store._native)
        other.read_into(made).result()
        return made


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m nvme_gpu", description="Rows of a table on NVMe by ids.")
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("demo", help="gather rows of a real table, check every word, compare")
    shown.add_argument("--rows", type=int, default=65_536, help="rows of 512 bytes in the table")
    shown.add_argument("--ids", type=int, default=20_000, help="ids of a gather")
    shown.add_argument("--seconds", type=float, default=0.5, help="how long each way runs")
    shown.add_argument("--cpu", action="store_true", help="use no GPU")
    shown.add_argument("--json", action="store_true", help="one JSON object")
    looked = commands.add_parser("doctor", help="what this machine can do")
    looked.add_argument("--json", action="store_true", help="one JSON object")
    words = parser.parse_args()
    try:
        if words.command == "doctor":
            return doctor(words.json)
        if min(words.rows, words.ids) < 1:
            parser.error("--rows and --ids are 1 at least")
        return demo(words.rows, words.ids, words.seconds, not words.cpu, words.json)
    except NvmeGpuError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
