"""One table over many tensors by a GPU: every row compared, and times beside a table that lies in one range."""

from __future__ import annotations

import json
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

import torch

import nvme_gpu
from nvme_gpu._scales import RowConversion

DEVICE = "sim:mem?size=512MiB&block=512&queues=64&threads=12"
SHARDS, FILES, SHARD_ROWS = 128, 10, 4000
NAME = "ple.shard_{}.weight"


def rows_of(count: int, row_bytes: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8, generator=made)


def checkpoint(folder: Path, rows: torch.Tensor, pad: int) -> list[Path]:
    """The rows as 128 tensors in 10 safetensors files, not in their order, whose data begin ``pad`` bytes past 16."""
    shards = rows.view(SHARDS, SHARD_ROWS, -1)
    order = torch.randperm(SHARDS, generator=torch.Generator().manual_seed(1)).tolist()
    paths = []
    for file in range(FILES):
        header, data = {}, b""
        for number in order[file::FILES]:
            part = shards[number].numpy().tobytes()
            place = [len(data), len(data) + len(part)]
            header[NAME.format(number)] = {"dtype": "U8", "shape": list(shards[number].shape), "data_offsets": place}
            data += part
        text = json.dumps(header).encode()
        text += b" " * ((-len(text) - 8) % 16 + pad)
        paths.append(folder / f"model-{file}.safetensors")
        paths[-1].write_bytes(struct.pack("<Q", len(text)) + text + data)
    return paths


def table_on_drive(store: nvme_gpu.Store, rows: torch.Tensor, pad: int) -> nvme_gpu.Table:
    catalogs, at = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for path in checkpoint(Path(folder), rows, pad):
            data = path.read_bytes()
            store.write(data, at)
            catalogs.append(nvme_gpu.catalog(store, at, nbytes=len(data)))
            at += (len(data) + 4095) // 4096 * 4096 + 4096
    return nvme_gpu.lookup_table(catalogs, NAME, shape=tuple(rows.shape))


def in_extents(store: nvme_gpu.Store, rows: torch.Tensor, extent_bytes: int) -> nvme_gpu.Table:
    """The rows in extents of whole blocks in any order, from byte 16 of the first one on: some lie in two."""
    data, pieces, at = rows.numpy().tobytes(), [], 0
    count = len(data) // extent_bytes + 2
    places = torch.randperm(count, generator=torch.Generator().manual_seed(2)).tolist()
    for number in places:
        skip = 16 if not pieces else 0
        part = data[at : at + extent_bytes - skip]
        if not part:
            break
        place = number * (extent_bytes + 4096) + skip
        store.write(part, place)
        pieces.append((place, len(part)))
        at += len(part)
    return nvme_gpu.Table(store, 0, tuple(rows.shape), "uint8", RowConversion(), pieces)


def every_row(table: nvme_gpu.Table, rows: torch.Tensor) -> int:
    """All rows in any order by the shared queues, and some by few at a time and by halves."""
    made = torch.Generator().manual_seed(3)
    order = torch.randperm(len(rows), generator=made)
    assert torch.equal(table.gather(order.cuda()).cpu(), rows[order])
    for count in (1, 24, 48, 384):
        for _ in range(50):
            ids = torch.randint(0, len(rows), (count,), generator=made)
            assert torch.equal(table.gather(ids.cuda()).cpu(), rows[ids])
            assert torch.equal(table.prefetch(ids.cuda()).result().cpu(), rows[ids])
    ids = torch.tensor([5, -1, len(rows), 1 << 40, -(1 << 62)], device="cuda")
    status = torch.full((5,), 9, dtype=torch.int32, device="cuda")
    out = table.gather(ids, status=status)
    torch.cuda.synchronize()
    try:
        table.check()
        raise AssertionError("ids out of range are reported")
    except nvme_gpu.Usage:
        pass
    assert status.tolist() == [0, -1, -1, -1, -1] and not out[1:].any() and torch.equal(out[0].cpu(), rows[5])
    return len(rows)


def equal(make: Callable[[nvme_gpu.Store, torch.Tensor], nvme_gpu.Table], row_bytes: int, **device: str) -> dict[str, object]:
    rows = rows_of(SHARDS * SHARD_ROWS, row_bytes)
    with nvme_gpu.open(device.get("name", DEVICE), gpu=0) as store:
        table = make(store, rows)
        found = every_row(table, rows)
        stats = store.stats()
        return {"rows": found, "owned": stats["owned_gathers"], "shared": stats["shared_gathers"], "halves": stats["begun_gathers"]}


def replays(count: int, row_bytes: int = 256, times: int = 1000) -> dict[str, object]:
    """Captured gathers with other ids each time: one range, 128 shards, and extents with rows in two of them, in turn."""
    rows = rows_of(SHARDS * SHARD_ROWS, row_bytes)
    took: dict[str, list[float]] = {}
    made = torch.Generator().manual_seed(count)
    ids = torch.zeros(count, dtype=torch.int64, device="cuda")
    out = torch.zeros(count, row_bytes, dtype=torch.uint8, device="cuda")
    with nvme_gpu.open(DEVICE, gpu=0) as one, nvme_gpu.open(DEVICE, gpu=0) as shards, nvme_gpu.open(DEVICE, gpu=0) as extents:
        one.write(rows)
        tables = {
            "one range": one.table(0, shape=tuple(rows.shape), dtype="uint8"),
            "shards": table_on_drive(shards, rows, 0),
            "extents": in_extents(extents, rows, 128 << 10),
        }
        graphs = {}
        for name, table in tables.items():
            table.gather(ids, out=out)
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                table.gather(ids, out=out)
        for _ in range(times):
            wanted = torch.randint(0, len(rows), (count,), generator=made)
            ids.copy_(wanted)
            for name, graph in graphs.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                took.setdefault(name, []).append((time.perf_counter() - began) * 1e6)
                assert torch.equal(out.cpu(), rows[wanted]), name
    return {"rows": count, "replays": times, "us": {name: statistics.median(one) for name, one in took.items()}}


def scaled(kind: str, begin: int = 8, rows: int = 400_000) -> dict[str, object]:
    """Rows with scales in GPU memory, by one call and in halves, against torch's own conversions of the same bytes."""
    made = torch.Generator().manual_seed(9)
    weights = torch.randint(0, 256, (rows, 256 if kind != "nvfp4" else 128), dtype=torch.uint8, generator=made)
    if kind == "e8m0":
        scales = torch.randint(110, 136, (rows, 8), dtype=torch.uint8, generator=made).view(torch.float8_e8m0fnu)
        wanted = weights.view(torch.float8_e4m3fn).float() * scales.float().repeat_interleave(32, dim=1)
        words = {"dtype": "float8_e4m3fn", "scales": scales.cuda()}
    elif kind == "number":
        wanted = weights.view(torch.float8_e4m3fn).float() * 0.037
        words = {"dtype": "float8_e4m3fn", "scales": 0.037}
    else:
        scales = torch.randint(0, 127, (rows, 16), dtype=torch.uint8, generator=made).view(torch.float8_e4m3fn)
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        elements = numbers[torch.stack([weights & 15, weights >> 4], dim=2).flatten(1).long()]
        wanted = elements * (scales.float() * 0.0021).repeat_interleave(16, dim=1)
        words = {"dtype": "float4_e2m1fn_x2", "scales": scales.cuda(), "factor": 0.0021}
    wanted = wanted.bfloat16()
    same = lambda found, ids: torch.testing.assert_close(found.cpu(), wanted[ids], rtol=0, atol=0, equal_nan=True)  # noqa: E731
    with nvme_gpu.open(DEVICE, gpu=0) as store:
        store.write(weights, begin)
        table = store.table(begin, shape=(rows, 256), to="bfloat16", **words)
        order = torch.randperm(rows, generator=made)
        same(table.gather(order.cuda()), order)
        for count in (1, 48, 384):
            for _ in range(100):
                ids = torch.randint(0, rows, (count,), generator=made)
                same(table.gather(ids.cuda()), ids)
                same(table.prefetch(ids.cuda()).result(), ids)
        ids = torch.zeros(48, dtype=torch.int64, device="cuda")
        out = torch.zeros(48, 256, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        graph, took = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            table.prefetch(ids).result(out)
        for _ in range(1000):
            some = torch.randint(0, rows, (48,), generator=made)
            ids.copy_(some)
            torch.cuda.synchronize()
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            took.append((time.perf_counter() - began) * 1e6)
            same(out, some)
        stats = store.stats()
        return {"rows": rows, "us": statistics.median(took), "owned": stats["owned_gathers"], "halves": stats["begun_gathers"]}


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
MANY: dict[str, dict[str, object]] = {
    "uint8": {},
    "float16": {"to": "float32"},
    "bfloat16": {"to": "float32"},
    "float8_e5m2": {"to": "bfloat16"},
    "float8_e4m3fn": {"to": "bfloat16"},
    "number": {"dtype": "float8_e4m3fn", "to": "bfloat16", "scales": 0.037},
    "e8m0": {"dtype": "float8_e4m3fn", "to": "bfloat16"},
    "nvfp4": {"dtype": "float4_e2m1fn_x2", "to": "float16", "factor": 0.0021},
}
"""Words of the table for rows of each kind."""


def many(kind: str, total: int = 10_000_000, part: int = 250_000) -> dict[str, object]:
    """Ten million rows with other ids each time, compared on the GPU with torch's conversions of a copy there."""
    words = {"dtype": kind, **MANY[kind]}
    stored, columns = 256, {"float16": 128, "bfloat16": 128, "nvfp4": 512}.get(kind, 256)
    count = 1_000_000
    made = torch.Generator(device="cuda").manual_seed(11)
    weights = torch.randint(0, 256, (count, stored), dtype=torch.uint8, device="cuda", generator=made)
    if kind in ("e8m0", "nvfp4"):
        scales = torch.randint(100, 127, (count, columns // (32 if kind == "e8m0" else 16)), dtype=torch.uint8, device="cuda")
        words["scales"] = scales.view(torch.float8_e8m0fnu if kind == "e8m0" else torch.float8_e4m3fn)
    numbers = torch.tensor(E2M1, device="cuda")

    def wanted(ids: torch.Tensor) -> torch.Tensor:
        rows = weights[ids]
        if kind == "nvfp4":
            elements = numbers[torch.stack([rows & 15, rows >> 4], dim=2).flatten(1).long()]
            scale = words["scales"].view(torch.uint8)[ids].view(torch.float8_e4m3fn).float() * torch.tensor(0.0021)
            return (elements * scale.repeat_interleave(16, dim=1)).half()
        if kind == "uint8":
            return rows
        found = rows.view(getattr(torch, str(words["dtype"]))).float()
        if kind == "e8m0":
            powers = words["scales"].view(torch.uint8)[ids].view(torch.float8_e8m0fnu).float()
            found = found * powers.repeat_interleave(32, dim=1)
        elif kind == "number":
            found = found * torch.tensor(0.037)
        return found.to(getattr(torch, str(words["to"])))

    with nvme_gpu.open(DEVICE, gpu=0) as store:
        store.write(weights.cpu(), 0)
        table = store.table(0, shape=(count, columns), **words)
        for _ in range(0, total, part):
            ids = torch.randint(0, count, (part,), device="cuda", generator=made)
            torch.testing.assert_close(table.gather(ids), wanted(ids), rtol=0, atol=0, equal_nan=True)
        return {"rows": total, "to": str(words.get("to", kind))}


def long_graph(times: int = 100_000, count: int = 48) -> dict[str, object]:
    """A graph of one token's rows in halves, launched again and again with other ids; each row is compared on the GPU."""
    rows = rows_of(SHARDS * SHARD_ROWS, 256)
    copy = rows.cuda()
    made = torch.Generator(device="cuda").manual_seed(12)
    all_ids = torch.randint(0, len(rows), (times, count), device="cuda", generator=made)
    ids, turn = all_ids[0].clone(), torch.zeros(1, dtype=torch.int64, device="cuda")
    out, wrong = torch.zeros(count, 256, dtype=torch.uint8, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    with nvme_gpu.open(DEVICE, gpu=0) as store:
        table = table_on_drive(store, rows, 0)

        def step() -> None:
            ids.copy_(all_ids.index_select(0, turn)[0])
            handle = table.prefetch(ids)
            expected = copy.index_select(0, ids)
            handle.result(out)
            wrong.add_((out != expected).sum())
            out.fill_(0xEE)
            turn.add_(1)

        step()
        torch.cuda.synchronize()
        turn.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        began = time.perf_counter()
        for launch in range(times):
            graph.replay()
            if launch % 100 == 99:
                torch.cuda.synchronize()
                table.check()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        assert turn.item() == times and wrong.item() == 0, f"{wrong.item()} bytes differ"
        return {"replays": times, "rows": times * count, "us_each": round(took * 1e6 / times, 1)}


CASES: dict[str, Callable[[], dict[str, object]]] = {
    "scaled-e8m0": lambda: scaled("e8m0"),
    "scaled-e8m0-odd": lambda: scaled("e8m0", 3, 100_000),
    "scaled-number": lambda: scaled("number"),
    "scaled-nvfp4": lambda: scaled("nvfp4", 12),
    "shards-256": lambda: equal(lambda store, rows: table_on_drive(store, rows, 0), 256),
    "shards-160-odd": lambda: equal(lambda store, rows: table_on_drive(store, rows, 3), 160),
    "extents-160": lambda: equal(lambda store, rows: in_extents(store, rows, 128 << 10), 160),
    "extents-blocks": lambda: equal(lambda store, rows: in_extents(store, rows, 4096), 272),
    "stripes": lambda: equal(
        lambda store, rows: table_on_drive(store, rows, 8),
        256,
        name="stripe:" + "|".join(["sim:mem?size=128MiB&block=512&queues=32&threads=4"] * 3) + "?stripe=128KiB",
    ),
    "graph-48": lambda: replays(48),
    "graph-384": lambda: replays(384),
    "graph-12288": lambda: replays(12_288, times=100),
    "graph-100000": long_graph,
    **{f"many-{kind}": lambda kind=kind: many(kind) for kind in MANY},
}


def main() -> int:
    # Idle threads of torch spin, and the simulated drive waits for their cores.
    torch.set_num_threads(1)
    passed = failed = 0
    for name in sys.argv[1:] or CASES:
        try:
            line = {"case": name, "gpu": torch.cuda.get_device_name(), **CASES[name]()}
            passed += 1
        except Exception as error:
            line = {"case": name, "error": f"{type(error).__name__}: {error}"}
            failed += 1
        print(json.dumps(line), flush=True)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
