"""Speed of lookups as models use them: decoding beside a step, batches, prefill beside the drive, misaligned rows."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Callable

import torch

import nvme_gpu

DRIVE = "sim:mem?size=1GiB&block={block}&queues=64&threads=12"
LAYERS = 40
"""Layers of a step; rows are needed before the second and the fifteenth one."""
ROWS_OF_TOKEN, COLUMNS, BEGIN = 48, 256, 8
"""Rows of both tables for a token, and their elements. Rows of files begin at a multiple of 8."""

Result = dict[str, object]


class Tables:
    """A table of E4M3 rows with E8M0 scales in GPU memory, and its rows as torch has them."""

    def __init__(self, block: int, rows: int, begin: int = BEGIN) -> None:
        made = torch.Generator().manual_seed(1)
        self.stored = torch.randint(0, 256, (rows, COLUMNS), dtype=torch.uint8, generator=made)
        self.stored[(self.stored & 0x7F) == 0x7F] = 0
        powers = torch.randint(110, 136, (rows, COLUMNS // 32), dtype=torch.uint8, generator=made)
        self.powers, self.rows = powers, rows
        self.store = nvme_gpu.open(DRIVE.format(block=block), gpu=0)
        self.store.write(self.stored, begin)
        words = {"dtype": "float8_e4m3fn", "to": "bfloat16", "scales": powers.cuda()}
        self.table = self.store.table(begin, shape=(rows, COLUMNS), **words)

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.store.close()

    def wanted(self, ids: torch.Tensor) -> torch.Tensor:
        scales = torch.exp2(self.powers[ids].float() - 127).repeat_interleave(32, dim=1)
        return (self.stored[ids].view(torch.float8_e4m3fn).float() * scales).bfloat16()

    def check(self, out: torch.Tensor, ids: torch.Tensor) -> None:
        assert torch.equal(out.cpu().view(torch.int16), self.wanted(ids).view(torch.int16)), "rows differ"

    def ids(self, count: int, seed: int) -> torch.Tensor:
        return torch.randint(0, self.rows, (count,), generator=torch.Generator().manual_seed(seed))


def quantiles(took: list[float]) -> dict[str, float]:
    took = sorted(took)
    return {"p50_us": round(statistics.median(took), 1), "p99_us": round(took[len(took) * 99 // 100], 1)}


def timed(graph: torch.cuda.CUDAGraph) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e6


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def layer(step_ms: float) -> Callable[[], None]:
    """Products of matrices that take a layer's share of a step."""
    size = 2048
    left, right, out = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    torch.mm(left, right, out=out)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    graph = captured(lambda: products(50))
    one = statistics.median(timed(graph) for _ in range(9)) / 50
    return lambda: products(max(1, round(step_ms * 1000 / LAYERS / one)))


def decode(block: int, times: int, step_ms: float = 10.0) -> Result:
    """The rows of a token are begun when it is known, and finished before layers 1 and 14 of a step."""
    with Tables(block, 1 << 20) as tables:
        layers = layer(step_ms)
        half = ROWS_OF_TOKEN // 2
        ids = [torch.zeros(half, dtype=torch.int64, device="cuda") for _ in range(2)]
        outs = [torch.zeros(half, COLUMNS, dtype=torch.bfloat16, device="cuda") for _ in range(2)]

        def alone() -> None:
            for _ in range(LAYERS):
                layers()

        def beside() -> None:
            begun = [tables.table.prefetch(some) for some in ids]
            for number in range(LAYERS):
                for before, handle, out in zip((1, 14), begun, outs):
                    if number == before:
                        handle.result(out)
                layers()

        def before() -> None:
            for some, out in zip(ids, outs):
                tables.table.gather(some, out=out)
            alone()

        graphs = {"step": captured(alone), "begun_at_the_token": captured(beside), "gathered_before": captured(before)}
        took: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(times):
            chosen = [tables.ids(half, 2 * number + which) for which in range(2)]
            for to, some in zip(ids, chosen):
                to.copy_(some)
            for name, graph in graphs.items():
                took[name].append(timed(graph))
                if name != "step":
                    for out, some in zip(outs, chosen):
                        tables.check(out, some)
        found = {name: quantiles(one) for name, one in took.items()}
        added = found["begun_at_the_token"]["p50_us"] - found["step"]["p50_us"]
        return {**found, "added_us": round(added, 1), "late_rows": tables.store.stats()["late_rows"]}


def batch(sequences: int, block: int, times: int) -> Result:
    """The rows of a token of each sequence, in one captured gather, and in halves with nothing between them."""
    count = sequences * ROWS_OF_TOKEN
    with Tables(block, 1 << 20) as tables:
        ids = torch.zeros(count, dtype=torch.int64, device="cuda")
        out = torch.zeros(count, COLUMNS, dtype=torch.bfloat16, device="cuda")
        graphs = {
            "gather": captured(lambda: tables.table.gather(ids, out=out)),
            "halves": captured(lambda: tables.table.prefetch(ids).result(out)),
        }
        took: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(times):
            chosen = tables.ids(count, number)
            ids.copy_(chosen)
            for name, graph in graphs.items():
                took[name].append(timed(graph))
                if number % 10 == 0:
                    tables.check(out, chosen)
        found = {name: quantiles(one) for name, one in took.items()}
        rate = count / statistics.median(took["gather"])
        stats = tables.store.stats()
        names = ("owned_gathers", "shared_gathers", "begun_gathers", "unique_asked", "unique_read")
        return {"rows": count, **found, "million_rows_per_s": round(rate, 3), **{name: stats[name] for name in names}}


def prefill(block: int, times: int, tokens: int = 8192, unique: float = 0.67, begin: int = BEGIN) -> Result:
    """A chunk of a prompt, of whose rows some repeat, beside a gather of its distinct rows alone and beside all rows.

    The drive's own time is that of the distinct rows in the order of the drive, which is the least that it has to do.
    """
    count = tokens * ROWS_OF_TOKEN
    with Tables(block, 1 << 20, begin) as tables:
        made = torch.Generator().manual_seed(7)
        some = torch.randperm(tables.rows, generator=made)[: int(count * unique)]
        again = some[torch.randint(0, len(some), (count - len(some),), generator=made)]
        chosen = torch.cat([some, again])[torch.randperm(count, generator=made)]
        distinct = chosen.unique()
        took: dict[str, list[float]] = {"gather": [], "distinct_in_order": []}
        before = tables.store.stats()
        for name, wanted in (("gather", chosen), ("distinct_in_order", distinct)):
            ids = wanted.cuda()
            out = torch.zeros(len(wanted), COLUMNS, dtype=torch.bfloat16, device="cuda")
            for number in range(times + 1):
                torch.cuda.synchronize()
                began = time.perf_counter()
                tables.table.gather(ids, out=out)
                torch.cuda.synchronize()
                if number:
                    took[name].append((time.perf_counter() - began) * 1e6)
            tables.check(out[:4096], wanted[:4096])
            tables.check(out[-4096:], wanted[-4096:])
            if name == "gather":
                after = tables.store.stats()
                asked, read = (after[of] - before[of] for of in ("unique_asked", "unique_read"))
                assert (asked, read) == ((times + 1) * count, (times + 1) * len(distinct)), (asked, read)
        found = {name: quantiles(one) for name, one in took.items()}
        rate = statistics.median(took["distinct_in_order"]) / statistics.median(took["gather"])
        return {"rows": count, "distinct": len(distinct), **found, "share_of_the_drive": round(rate, 3)}


CASES: dict[str, Callable[[int, int], Result]] = {
    "decode-48": lambda block, times: decode(block, times),
    **{f"batch-{one}": (lambda block, times, one=one: batch(one, block, times)) for one in (1, 16, 64, 256)},
    "prefill-8192": lambda block, times: prefill(block, max(3, times // 50)),
    "prefill-8192-half-repeat": lambda block, times: prefill(block, max(3, times // 50), unique=0.5),
    "prefill-8192-none-repeats": lambda block, times: prefill(block, max(3, times // 50), unique=1.0),
    "prefill-8192-misaligned": lambda block, times: prefill(block, max(3, times // 50), begin=8 + 96 + 3),
    "misaligned-4": lambda block, times: misaligned(block, times, 4),
    "misaligned-3": lambda block, times: misaligned(block, times, 3),
    "aligned": lambda block, times: misaligned(block, times, 0),
}


def misaligned(block: int, times: int, begin: int) -> Result:
    """Rows of one token whose first byte is a multiple of ``begin`` alone, so that some lie in two blocks."""
    with Tables(block, 1 << 20, begin) as tables:
        ids = torch.zeros(ROWS_OF_TOKEN, dtype=torch.int64, device="cuda")
        out = torch.zeros(ROWS_OF_TOKEN, COLUMNS, dtype=torch.bfloat16, device="cuda")
        graph = captured(lambda: tables.table.gather(ids, out=out))
        took = []
        for number in range(times):
            chosen = tables.ids(ROWS_OF_TOKEN, number)
            ids.copy_(chosen)
            took.append(timed(graph))
            tables.check(out, chosen)
        return {"first_byte": begin, **quantiles(took), "owned_gathers": tables.store.stats()["owned_gathers"]}


def main() -> int:
    # Idle threads of torch spin, and the simulated drive waits for their cores.
    torch.set_num_threads(1)
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--block", type=int, default=512, help="bytes of a block of the simulated drive")
    words.add_argument("--times", type=int, default=500, help="launches of each case")
    words.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    words = words.parse_args()
    failed = 0
    for name in words.cases or CASES:
        try:
            line = {"case": name, "gpu": torch.cuda.get_device_name(), "block": words.block}
            line |= CASES[name](words.block, words.times)
        except Exception as error:
            line = {"case": name, "error": f"{type(error).__name__}: {error}"}
            failed += 1
        print(json.dumps(line), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
