"""``python -m nvme_gpu demo|lookup-demo|bench|doctor``."""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import json
import mmap
import os
import random
import sys
import tempfile
import time
from array import array
from typing import Any, Callable

from . import Array, Catalog, Entry, NvmeGpuError, Table, Usage, __version__, catalog, import_file, open
from . import _bench, _buffers, _lookup_demo, _native, _store
from .kv import _areas

GENERATED = (32_000, 512)
"""Rows of a table that is made up, and bytes of a row."""


def doctor(as_json: bool, with_engines: bool) -> int:
    """What this machine can do, and the remedy for what it cannot."""
    report = json.loads(_native.doctor())
    if with_engines:
        report["findings"] += _areas.engines()
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
        line = f"{one['status']:8} {one['subject']}: {one['check']}: {one['text']}"
        print(line + (f": {one['remedy']}" if one.get("remedy") else ""))
    for one in report["tiers"]:
        print(f"{one['controller']}: {one['text']}")
    return 0


def _best(call: Callable[[], Any], seconds: float) -> tuple[float, Any]:
    """The shortest of several runs, and what it gave."""
    best, found, begin = float("inf"), None, time.perf_counter()
    while time.perf_counter() - begin < seconds or found is None:
        before = time.perf_counter()
        found = call()
        best = min(best, time.perf_counter() - before)
    return best, found


def _generated(path: str, rows: int) -> str:
    """A file of .npy with random rows."""
    head = f"{{'descr': '<f2', 'fortran_order': False, 'shape': ({rows}, {GENERATED[1] // 2}), }}\n".encode()
    generator = random.Random(1)
    with builtins.open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
        for first in range(0, rows, 4096):
            file.write(generator.randbytes(min(4096, rows - first) * GENERATED[1]))
    return path


def _source(folder: str, rows: int | None, file: str | None) -> tuple[str, str, dict[str, int]]:
    """A file of tensors, what it is, and the rows of words, where they are known."""
    if file is not None:
        return file, file, {}
    path = os.path.join(folder, "generated.npy")
    if rows is not None:
        return _generated(path, rows), "a table that was generated: --rows was given", {}
    found = importlib.util.find_spec("wordllama")
    package = os.path.dirname(found.origin) if found is not None and found.origin is not None else ""
    weights = os.path.join(package, "weights", "l2_supercat_256.safetensors")
    words_of = os.path.join(package, "tokenizers", "l2_supercat_tokenizer_config.json")
    if not package or not os.path.exists(weights):
        return _generated(path, GENERATED[0]), "a table that was generated: wordllama is not installed", {}
    words: dict[str, int] = {}
    if os.path.exists(words_of):
        with builtins.open(words_of, encoding="utf-8") as text:
            words = json.load(text)["model"]["vocab"]
    return weights, "word vectors of the package wordllama", words


def _nearest(table: Table, words: dict[str, int], word: str) -> list[str]:
    """The words whose rows are most like that of ``word``."""
    numpy = _buffers.numpy()
    start = words.get("\u2581" + word)
    if numpy is None or start is None:
        return []
    # Whole words of some length: the others are parts of words.
    known = {one[1:].lower(): row for one, row in words.items() if one[:1] == "\u2581" and one[1:].isalpha() and len(one) > 4}
    rows = table[list(known.values())].astype(numpy.float32)
    own = table[start].astype(numpy.float32)
    likeness = rows @ own / (numpy.linalg.norm(rows, axis=1) * numpy.linalg.norm(own))
    names = list(known)
    best = [names[place] for place in numpy.argsort(-likeness)[:12]]
    return [one for one in best if not one.startswith(word)][:5]


def _largest(found: Catalog) -> Entry:
    """The largest tensor that has rows."""
    with_rows = [one for one in found.values() if len(one.shape) > 1 and one.nbytes]
    if not with_rows:
        raise Usage("the file has no tensor with rows", "name one with a matrix")
    return max(with_rows, key=lambda one: one.nbytes)


def demo(rows: int | None, file: str | None, count: int, seconds: float, use_gpu: bool, as_json: bool) -> int:
    """Rows of a table by ids, every byte checked against the file, beside other ways."""
    results: list[dict[str, Any]] = []
    near: list[str] = []
    why = "" if use_gpu else "--cpu was given"
    with tempfile.TemporaryDirectory() as folder:
        path, what, words = _source(folder, rows, file)
        with open(path, read_only=True) as store:
            entry = _largest(catalog(store))
        shape, begin = entry.shape, entry.offset
        size = entry.nbytes // shape[0]
        ids = array("q", (random.Random(1).randrange(shape[0]) for _ in range(count)))
        with _reading(path) as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            number = opened.fileno()

            def slices() -> bytes:
                return b"".join([mapped[begin + one * size : begin + (one + 1) * size] for one in ids])

            want = slices()

            def add(name: str, call: Callable[[], bytes], note: str = "") -> None:
                best, data = _best(call, seconds)
                results.append({"way": name, "rows_per_s": round(count / best), "right": data == want, "note": note})

            nbytes = (os.path.getsize(path) + (2 << 20)) >> 20 << 20
            device = f"sim:mem?size={nbytes}"
            if use_gpu:
                try:
                    with open(device + "&queues=32&threads=2", gpu=0) as store:
                        table = _largest(import_file(store, path)).as_table()
                        # The ids come from a drive, too: no library of arrays is needed.
                        on_gpu = _ids_on_gpu(store, ids)
                        add("table[ids] by the GPU", lambda: table.gather(on_gpu, check="now").tobytes(), store.path["why"])
                except NvmeGpuError as error:
                    why = str(error)
            out = bytearray(count * size)
            with open(device) as store:
                table = _largest(import_file(store, path, progress=_progress if sys.stderr.isatty() else None)).as_table()
                near = _nearest(table, words, "king")
                add("table[ids] by CPU threads", lambda: bytes(table.gather(ids, out=out)), "simulated drive")
            with open(path, read_only=True) as store:
                table = _largest(catalog(store)).as_table()
                add("table[ids] of the file", lambda: bytes(table.gather(ids, out=out)), store.path["path"])
            add("mmap and slices", slices, "page cache")
            add("os.pread", lambda: b"".join([os.pread(number, size, begin + one * size) for one in ids]), "page cache")
            numpy = _buffers.numpy()
            if numpy is not None:
                data = numpy.frombuffer(mapped, dtype=numpy.uint8, count=entry.nbytes, offset=begin)
                index = numpy.frombuffer(ids, dtype=numpy.int64)
                add("numpy.memmap[ids]", lambda: data.reshape(shape[0], size)[index].tobytes(), "page cache")
                del data
    all_right = all(one["right"] for one in results)
    if as_json:
        answer = {"table": what, "rows": shape[0], "row_bytes": size, "offset": begin, "ids": count}
        answer |= {"nearest_to_king": near, "no_gpu": why or None, "verified": all_right, "ways": results}
        print(json.dumps(answer))
        return 0 if all_right else 3
    print(f"{what}: {shape[0]} rows of {size} bytes that begin at byte {begin}, imported and compared")
    if near:
        print(f'rows most like that of "king": {", ".join(near)}')
    print(f"{count} rows by random ids, best of {seconds} s each")
    if why:
        print(f"by CPU threads, without a GPU: {why}")
    for one in results:
        word = "every byte right" if one["right"] else "WRONG"
        print(f"{one['way']:28} {one['rows_per_s']:>12,} rows/s  {word}  {one['note']}")
    return 0 if all_right else 3


def bench(words: argparse.Namespace) -> int:
    """One file by each way of this package and of torch."""
    found = _bench.bench(words.file, words.size, words.sizes, words.runs, not words.cpu)
    all_right = all(one["right"] for one in found["ways"])
    if words.json:
        print(json.dumps(found | {"verified": all_right}))
        return 0 if all_right else 3
    print(f"{found['file']}: {found['bytes']} bytes, one read after the other, medians of {found['runs']} in turns")
    for name, why in found["missing"].items():
        print(f"{name}: not measured: {why}")
    for one in found["ways"]:
        word = "every byte right" if one["right"] else "WRONG"
        head = f"{one['pattern']:10} {one['read_bytes']:>9} {one['way']:38} to {one['to']:12}"
        print(f"{head}{one['gb_per_s']:8.2f} GB/s {one['iops']:>11,.0f}/s  {word}  {one['note']}")
    return 0 if all_right else 3


def lookup_demo(words: argparse.Namespace) -> int:
    """Rows of lookup tables that a text selects, every bit compared."""

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)

    found = _lookup_demo.run(words.true_rows, words.tokens, words.text, words.gpu, progress)
    print(json.dumps(found) if words.json else _lookup_demo.shown(found))
    return 0 if found["verified"] else 3


def _sizes(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _progress(done: int, total: int) -> None:
    print(f"\rimport: {done * 100 // total} %", end="" if done < total else "\n", file=sys.stderr)


def _reading(path: str) -> Any:
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
    shown.add_argument("--rows", type=int, help="a generated table of so many rows, in place of wordllama's")
    shown.add_argument("--file", help="a file of tensors: safetensors or .npy")
    shown.add_argument("--ids", type=int, default=20_000, help="ids of a gather")
    shown.add_argument("--seconds", type=float, default=0.5, help="how long each way runs")
    shown.add_argument("--cpu", action="store_true", help="use no GPU")
    shown.add_argument("--json", action="store_true", help="one JSON object")
    exits = "exit status: 0 every bit is right, 1 an error, 2 a wrong option, 3 some bit is not what it must be"
    looked_up = commands.add_parser(
        "lookup-demo",
        help="rows of Engram's and Qwen's lookup tables that a text selects, from files in their layout, every bit compared",
        epilog=exits,
    )
    looked_up.add_argument(
        "--true-rows", action="store_true", help="as many rows as published, which a simulated drive computes from their address"
    )
    looked_up.add_argument("--tokens", type=int, default=1000, help="tokens of the text, each of 24 and 16 rows")
    looked_up.add_argument("--text", help="a file of text, in place of Python's language reference")
    looked_up.add_argument("--gpu", type=int, help="the number of a GPU that gathers: 0; without it the CPU does")
    looked_up.add_argument("--json", action="store_true", help="one JSON object in one line")
    read = commands.add_parser("bench", help="one file into memory by this package and by torch, every byte compared")
    read.add_argument("file", nargs="?", help="a file is made when missing")
    read.add_argument("--size", type=int, default=64 << 20, help="bytes of a file that is made")
    read.add_argument("--sizes", type=_sizes, default=[4 << (10 + 2 * step) for step in range(8)], help="bytes of reads: 4096,65536")
    read.add_argument("--runs", type=int, default=5)
    read.add_argument("--cpu", action="store_true", help="use no GPU")
    read.add_argument("--json", action="store_true", help="one JSON object")
    looked = commands.add_parser("doctor", help="what this machine can do")
    looked.add_argument("--json", action="store_true", help="one JSON object")
    looked.add_argument("--engines", action="store_true", help="also whether engines' key and value caches can use a drive")
    words = parser.parse_args()
    try:
        if words.command == "doctor":
            return doctor(words.json, words.engines)
        if words.command == "bench":
            if words.runs < 1:
                parser.error("--runs is 1 at least")
            return bench(words)
        if words.command == "lookup-demo":
            if words.tokens < 1:
                parser.error("--tokens is 1 at least")
            return lookup_demo(words)
        if words.ids < 1 or words.rows is not None and words.rows < 1:
            parser.error("--rows and --ids are 1 at least")
        return demo(words.rows, words.file, words.ids, words.seconds, not words.cpu, words.json)
    except (NvmeGpuError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
