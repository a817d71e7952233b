"""Pages of keys and values between a simulated drive and tensors of a GPU, beside a read of the same bytes from a file and
one copy: one JSON line.

    python kv_pages_on_gpu.py [--pages 512] [--runs 5] [--threads 12]

Pages of 64 KiB (Llama-3-8B) and 72 KiB (MLA) in the layouts of engines: layer first, block first, MLA. Every page is
compared with torch once, and one that is spoilt on the drive has to be lost. Medians of runs in turns, from the call to
the end on the GPU, in MB/s. "pread and one copy" reads the pages of a file in the page cache into pinned memory, and
copies them once. Ends with 1 where a byte is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

LAYOUTS = {
    # Layout: shape with "blocks" where the block's number stands, and the axis of it; K and V of one layer.
    "layer first, 64 KiB": (("kv", "blocks", 16, 8, 128), 1),
    "block first, 64 KiB": (("blocks", "kv", 16, 8, 128), 0),
    "mla, 72 KiB": (("blocks", 64, 576), 0),
}


def main() -> int:
    import torch

    import nvme_gpu

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=12, help="of the simulated drive")
    words = parser.parse_args()
    answer: dict[str, object] = {"gpu": torch.cuda.get_device_name(0), "pages": words.pages}
    wrong = 0
    for name, (shape, axis) in LAYOUTS.items():
        sizes = [{"kv": 2, "blocks": words.pages}.get(length, length) for length in shape]
        values = torch.randint(-30_000, 30_000, sizes, dtype=torch.int16, device="cuda")
        page_bytes = values.numel() // words.pages * 2
        size = words.pages * (page_bytes + 8192) * 2 + (64 << 20)
        device = f"sim:mem?size={-(-size // 4096) * 4096}&queues=32&threads={words.threads}"
        with nvme_gpu.open(device, gpu=0) as store, tempfile.TemporaryDirectory() as folder:
            kv = nvme_gpu.PageStore(store, page_bytes=page_bytes, model="measured")
            assert kv.path["pages"] == "gpu", kv.path
            cache = torch.zeros_like(values)
            blocks = [cache.select(axis, block) for block in range(words.pages)]
            given = [values.select(axis, block) for block in range(words.pages)]
            keys = kv.keys([b"block %d" % block for block in range(words.pages)])
            path = os.path.join(folder, "pages")
            with open(path, "wb") as file:
                file.writelines(block.contiguous().cpu().numpy().tobytes() for block in given)
            pinned = torch.empty(words.pages * page_bytes, dtype=torch.uint8, pin_memory=True)
            flat = torch.empty_like(pinned, device="cuda")
            host = pinned.numpy()
            every = nvme_gpu.PageBlocks(cache, range(words.pages), axis)
            every_given = nvme_gpu.PageBlocks(values, range(words.pages), axis)
            seconds: dict[str, list[float]] = {}

            def timed(way: str, call) -> object:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                found = call()
                torch.cuda.synchronize()
                seconds.setdefault(way, []).append(time.perf_counter() - begin)
                return found

            def pread() -> None:
                with open(path, "rb", buffering=0) as file:
                    view = memoryview(host)
                    for block in range(words.pages):
                        file.readinto(view[block * page_bytes : (block + 1) * page_bytes])
                flat.copy_(pinned, non_blocking=True)

            def by_cpu() -> None:
                views = [memoryview(host)[at * page_bytes : (at + 1) * page_bytes] for at in range(words.pages)]
                assert kv.get(keys, views) == [page_bytes] * words.pages
                flat.copy_(pinned, non_blocking=True)

            def there_and_back(of: str, pages, rooms) -> int:
                kv.clear()
                stored = timed(f"store {of}by the GPU", lambda: kv.put(keys, pages))
                assert stored == ["stored"] * words.pages, stored
                cache.zero_()
                loaded = timed(f"load {of}by the GPU", lambda: kv.get(keys, rooms))
                assert loaded == [page_bytes] * words.pages, loaded
                return 0 if torch.equal(cache, values) else 1

            for _ in range(words.runs + 1):
                wrong += there_and_back("", given, blocks)
                wrong += there_and_back("of blocks ", every_given, every)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                under_way = kv.load_async(keys, every)
                seconds.setdefault("until a load of blocks is submitted", []).append(time.perf_counter() - begin)
                assert under_way.result() == [page_bytes] * words.pages
                timed("load by the CPU, one copy", by_cpu)
                timed("pread and one copy", pread)
            # A load into the stream, and work behind it that needs no wait of the host.
            cache.zero_()
            pending = kv.load_async(keys, blocks)
            doubled = cache.to(torch.int32) * 2
            assert pending.result() == [page_bytes] * words.pages
            wrong += 0 if torch.equal(doubled, values.to(torch.int32) * 2) else 1
            # Bytes inside every second slot are spoilt: those pages are lost and zero, and the others are as before.
            slot = 4096 + -(-page_bytes // 4096) * 4096
            first = kv.nbytes - kv.stats()["capacity"] * slot + 4096 + page_bytes // 2 // 4096 * 4096
            for number in range(0, kv.stats()["capacity"], 2):
                store.write(bytes(64), first + number * slot)
            outcomes = kv.get(keys, blocks)
            lost = [at for at, one in enumerate(outcomes) if isinstance(one, nvme_gpu.PageMiss)]
            whole = [at for at, one in enumerate(outcomes) if one == page_bytes]
            right = len(lost) + len(whole) == words.pages and 0 < len(lost) == kv.stats()["lost"]
            right = right and not any(blocks[at].any() for at in lost)
            wrong += 0 if right and all(torch.equal(blocks[at], given[at]) for at in whole) else 1
            total = words.pages * page_bytes
            answer[name] = {way: round(total / statistics.median(times[1:]) / 1e6) for way, times in seconds.items()}
    answer["wrong"] = wrong
    print(json.dumps(answer))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
