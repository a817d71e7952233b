"""Few rows through a cache on a GPU: equal to the table, and timed in a graph beside `index_select` from GPU memory."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import nvme_gpu

ROWS = 400_000
DRIVE = "sim:mem?size=256MiB&block=512&queues=64&threads=12"


def median_of(replays: int, prepare: Callable[[int], None], graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
    """Returns p50 and p99 of a replay, in microseconds from its launch until the host knows its end."""
    took = []
    for number in range(replays):
        prepare(number)
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began) * 1e6)
    took.sort()
    return statistics.median(took), took[len(took) * 99 // 100]


def captured(what: Callable[[], object]) -> torch.cuda.CUDAGraph:
    what()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        what()
    return graph


def timed(count: int, hits: float, replays: int = 300) -> dict[str, object]:
    """`count` rows of 512 bytes, of which this share is in the cache, by new ids in each replay."""
    with nvme_gpu.open(DRIVE, gpu=0) as store:
        whole = torch.randint(-(2**31), 2**31 - 1, (ROWS, 128), dtype=torch.int32, generator=torch.Generator().manual_seed(5))
        store.write(whole)
        table = store.table(0, shape=(ROWS, 128), dtype="int32")
        cached = table.cached(64 << 20)
        made = torch.Generator().manual_seed(7)
        # The rows that are asked for again and again, and those that come once.
        hot = torch.randperm(ROWS // 4, generator=made)[: 20 * 1024]
        batches = hot[torch.randint(0, len(hot), (replays, count), generator=made)]
        cold = torch.rand(replays, count, generator=made) >= hits
        batches[cold] = torch.randint(ROWS // 4, ROWS, (int(cold.sum()),), generator=made)
        on_gpu = batches.cuda()
        ids = torch.zeros(count, dtype=torch.int64, device="cuda")
        out = torch.zeros(count, 128, dtype=torch.int32, device="cuda")
        memory = whole.cuda()
        for part in hot.split(1024):
            cached.gather(part.cuda(), out=torch.zeros(len(part), 128, dtype=torch.int32, device="cuda"))
        ways = {
            "cached": captured(lambda: cached.gather(ids, out=out)),
            "drive": captured(lambda: table.gather(ids, out=out)),
            "index_select": captured(lambda: torch.index_select(memory, 0, ids, out=out)),
            "nothing": captured(lambda: ids.add_(0)),
        }
        line: dict[str, object] = {"rows": count, "hits": hits}
        for name, graph in ways.items():
            wrong = 0

            def prepare(number: int) -> None:
                nonlocal wrong
                if number and name == "cached":
                    wrong += int((out.cpu() != whole[batches[number - 1]]).any())
                ids.copy_(on_gpu[number])

            p50, p99 = median_of(replays, prepare, graph)
            assert wrong == 0, f"{wrong} replays with a wrong row"
            line[name] = [round(p50, 1), round(p99, 1)]
        stats = store.stats()
        line["gathers"] = [stats["owned_gathers"], stats["shared_gathers"]] if "owned_gathers" in stats else str(stats)[:200]
        return line


def main() -> int:
    # Idle threads of torch spin, and the simulated drive waits for their cores.
    torch.set_num_threads(1)
    failed = 0
    for count in [32, 256, 1024, 4096]:
        for hits in [1.0, 0.95, 0.0]:
            try:
                line = {"gpu": torch.cuda.get_device_name(), **timed(count, hits)}
            except Exception as error:
                line = {"rows": count, "hits": hits, "error": f"{type(error).__name__}: {error}"}
                failed += 1
            print(json.dumps(line), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
