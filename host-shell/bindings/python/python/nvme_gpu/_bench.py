"""``python -m nvme_gpu bench``: one file into memory by this package and by torch, in turns on the same bytes."""

from __future__ import annotations

import mmap
import os
import random
import statistics
import tempfile
import time
from builtins import open as open_file
from contextlib import ExitStack
from typing import Any, Callable

from . import NvmeGpuError, Usage, open
from ._native import Array

BLOCK = 4096
MOST = 1 << 30
"""Bytes of a file that are used."""

Call = Callable[[int], Any]
Way = Callable[[int], tuple[Call, Callable[[], bytes]]]
"""For reads of so many bytes: what reads from an offset on, and the bytes of the last read."""


def _made(path: str, nbytes: int) -> str:
    generator = random.Random(1)
    with open_file(path, "wb") as file:
        for first in range(0, nbytes, 1 << 20):
            file.write(generator.randbytes(min(1 << 20, nbytes - first)))
    return path


def _ours(store: Any) -> Way:
    """Reads of a store: into memory of its GPU, as a tensor where torch uses that."""

    def way(nbytes: int) -> tuple[Call, Callable[[], bytes]]:
        if store.gpu is None:
            memory = bytearray(nbytes)
            return lambda offset: store.read_into(memory, offset).result(), lambda: bytes(memory)
        torch = _torch_with_gpu()
        if torch is None:
            array = Array((nbytes,), "uint8", 1, store._native)
            return lambda offset: store.read_into(array, offset).result(), array.tobytes
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        return lambda offset: store.read_into(tensor, offset).result(), lambda: tensor.cpu().numpy().tobytes()

    return way


def _torch_with_gpu() -> Any:
    torch = _torch()
    return torch if torch is not None and torch.cuda.is_available() else None


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _from_file(torch: Any, path: str, total: int, gpu: bool) -> Way:
    mapped = torch.from_file(path, shared=False, size=total, dtype=torch.uint8)

    def way(nbytes: int) -> tuple[Call, Callable[[], bytes]]:
        last = [mapped[:0]]

        def call(offset: int) -> None:
            part = mapped[offset : offset + nbytes]
            last[0] = part.cuda() if gpu else part.clone()
            if gpu:
                torch.cuda.synchronize()

        return call, lambda: last[0].cpu().numpy().tobytes()

    return way


def _pinned(torch: Any, file: Any) -> Way:
    def way(nbytes: int) -> tuple[Call, Callable[[], bytes]]:
        staged = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

        def call(offset: int) -> None:
            os.preadv(file.fileno(), [staged.numpy()], offset)
            tensor.copy_(staged, non_blocking=True)
            torch.cuda.synchronize()

        return call, lambda: tensor.cpu().numpy().tobytes()

    return way


def _mapped(mapped: mmap.mmap) -> Way:
    def way(nbytes: int) -> tuple[Call, Callable[[], bytes]]:
        last = [b""]

        def call(offset: int) -> None:
            last[0] = mapped[offset : offset + nbytes]

        return call, lambda: last[0]

    return way


def _ways(kept: ExitStack, path: str, total: int, use_gpu: bool) -> tuple[list[tuple[str, str, str, Way]], dict[str, str]]:
    """Each way: name, where the bytes go, a note, and how; and why others do not run."""
    ways: list[tuple[str, str, str, Way]] = []
    missing: dict[str, str] = {}

    def add(name: str, device: str, gpu: int | None, **more: Any) -> None:
        try:
            store = kept.enter_context(open(device, gpu, read_only=True, **more))
        except NvmeGpuError as error:
            missing[name] = str(error)
            return
        found = store.path
        note = found["why"] if "was refused" in found["why"] else found["path"]
        ways.append((name, "host memory" if gpu is None else "GPU memory", note, _ours(store)))

    block = 4096 if os.path.getsize(path) % 4096 == 0 else 512
    sim = f"sim:{path}?block={block}&queues=32&threads={max(1, min(12, (os.cpu_count() or 1) - 2))}"
    if use_gpu:
        add("read_into by the GPU", sim, 0)
        add("read_into of the file, gds='auto'", f"file:{path}", 0, gds="auto")
    add("read_into by CPU threads", sim, None)
    torch = _torch()
    if torch is None:
        missing["torch.from_file"] = "torch is not installed"
    else:
        with_gpu = _torch_with_gpu() if use_gpu else None
        name = "torch.from_file and .cuda()" if with_gpu else "torch.from_file and .clone()"
        to = "GPU memory" if with_gpu else "host memory"
        ways.append((name, to, f"torch {torch.__version__}", _from_file(torch, path, total, bool(with_gpu))))
        if with_gpu:
            file = kept.enter_context(open_file(path, "rb", buffering=0))
            ways.append(("pread into pinned memory and .copy_()", to, f"torch {torch.__version__}", _pinned(torch, file)))
    whole = kept.enter_context(open_file(path, "rb"))
    mapped = kept.enter_context(mmap.mmap(whole.fileno(), total, prot=mmap.PROT_READ))
    ways.append(("mmap and slices", "host memory", "page cache", _mapped(mapped)))
    return ways, missing


def bench(path: str | None, nbytes: int, sizes: list[int], runs: int, use_gpu: bool) -> dict[str, Any]:
    """Reads of each of ``sizes`` from start to end of the whole, and reads of 4 KiB at random places, one after the other.

    Medians of ``runs`` runs in turns. Every byte of each read is compared with the file, outside of the timed part. The
    result holds a row for each way and size.
    """
    with ExitStack() as kept:
        if path is None:
            path = _made(os.path.join(kept.enter_context(tempfile.TemporaryDirectory()), "file"), nbytes)
        total = min(os.path.getsize(path), MOST) // BLOCK * BLOCK
        if total == 0 or any(size <= 0 or size % BLOCK for size in sizes):
            raise Usage(f"a file of {os.path.getsize(path)} bytes, reads of {sizes}", "use multiples of 4096 bytes")
        with open_file(path, "rb") as file:
            content = memoryview(file.read(total))
        ways, missing = _ways(kept, path, total, use_gpu)
        generator = random.Random(2)
        plans = [("sequential", size, list(range(0, total - size + 1, size))) for size in sizes if size <= total]
        plans.append(("random", BLOCK, [generator.randrange(total // BLOCK) * BLOCK for _ in range(min(2000, total // BLOCK))]))
        rows = []
        for pattern, size, offsets in plans:
            prepared = [way(size) for *_, way in ways]
            seconds: list[list[float]] = [[] for _ in ways]
            for _ in range(runs):
                for (call, _), taken in zip(prepared, seconds, strict=True):
                    begin = time.perf_counter()
                    for offset in offsets:
                        call(offset)
                    taken.append(time.perf_counter() - begin)
            for (name, to, note, _), (call, last), taken in zip(ways, prepared, seconds, strict=True):
                right = True
                for offset in offsets:
                    call(offset)
                    right = right and last() == content[offset : offset + size]
                median = statistics.median(taken)
                row = {"pattern": pattern, "read_bytes": size, "way": name, "to": to, "note": note, "reads": len(offsets)}
                row |= {"gb_per_s": len(offsets) * size / median / 1e9, "iops": len(offsets) / median, "right": right}
                rows.append(row | {"seconds": taken})
        content.release()
        return {"file": path, "bytes": total, "runs": runs, "missing": missing, "ways": rows}
