"""Row ids of Qwen3.8-Flash-Next's table by a GPU: equal to the host's, and inside of a CUDA graph with the gather."""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

import nvme_gpu
from nvme_gpu import lookup

TRUE = {"ple_layer_ids": [2], "vocab_size": 248320, "hidden_size": 2560, "eos_token_id": 248046}
SMALL = {**TRUE, "ngram_vocab_size_base": 50_000}
COLUMNS = 80


def text(count: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 248320, (count,), generator=made)
    tokens[torch.rand(count, generator=made) < 0.05] = 248046
    return tokens


def equal_ids() -> dict[str, object]:
    """Every id of a long text, whole and in steps with histories."""
    tables = lookup.qwen_ple(TRUE)
    tokens = text(200_000)
    wanted = torch.from_numpy(tables.row_ids(1, tokens.numpy()))
    assert torch.equal(tables.row_ids(1, tokens.cuda()).cpu(), wanted)
    assert torch.equal(tables.row_ids(1, tokens.int().cuda()).cpu(), wanted)
    histories = tables.histories(1, 64, device="cuda")
    lengths = torch.randint(0, 5, (64, 100), generator=torch.Generator().manual_seed(1))
    texts = tokens[: 64 * 500].view(64, 500)
    seen = [0] * 64
    for step in range(100):
        counts = lengths[:, step].tolist()
        parts = [one[at : at + count] for one, at, count in zip(texts, seen, counts)]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        some = torch.cat(parts).cuda()
        found = tables.row_ids(1, some, histories=histories, starts=starts).cpu()
        each = [tables.row_ids(1, part.numpy(), before=one[:at].numpy()) for one, at, part in zip(texts, seen, parts)]
        assert torch.equal(found, torch.cat([torch.from_numpy(ids) for ids in each]))
        tables.commit(1, some, histories, starts=starts)
        seen = [at + count for at, count in zip(seen, counts)]
    return {"ids": wanted.numel(), "sequences": 64}


def replays(batch: int, count: int = 1000) -> dict[str, object]:
    """Decoding: a graph of hash, commit and gather, for a token of each sequence; every row compared."""
    tables = lookup.qwen_ple(SMALL)
    with nvme_gpu.open("sim:mem?size=256MiB&block=512&queues=64&threads=12", gpu=0) as store:
        table = store.table(0, shape=(tables.rows(1), COLUMNS), dtype="int32")
        rows = torch.arange(tables.rows(1), dtype=torch.int32)[:, None].repeat(1, COLUMNS)
        store.write(rows)
        tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        histories = tables.histories(1, batch, device="cuda")
        ids = torch.zeros(batch, 16, dtype=torch.int64, device="cuda")
        out = torch.zeros(batch, 16, COLUMNS, dtype=torch.int32, device="cuda")

        def step() -> None:
            tables.row_ids(1, tokens, histories=histories, starts=starts, out=ids)
            tables.commit(1, tokens, histories, starts=starts)
            table.gather(ids, out=out)

        def hashes() -> None:
            tables.row_ids(1, tokens, histories=histories, starts=starts, out=ids)

        graphs = []
        for what in (step, lambda: table.gather(ids, out=out), hashes):
            what()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                what()
            graphs.append(graph)
        histories.fill_(TRUE["eos_token_id"])
        known = text(batch * count, batch).view(count, batch)
        wanted = torch.stack([torch.from_numpy(tables.row_ids(1, known[:, one].numpy().copy())) for one in range(batch)], 1)
        times: list[list[float]] = [[], [], []]
        for number in range(count):
            tokens.copy_(known[number])
            for graph, took in zip(graphs, times):
                torch.cuda.synchronize()
                began = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                took.append((time.perf_counter() - began) * 1e6)
                if graph is graphs[0]:
                    assert torch.equal(ids.cpu(), wanted[number]), number
                    assert torch.equal(out.cpu(), wanted[number].int()[..., None].expand(-1, -1, COLUMNS)), number
        of = [statistics.median(took) for took in times]
        return {"batch": batch, "replays": count, "rows": batch * 16, "us": dict(zip(("step", "gather", "hash"), of))}


def main() -> int:
    # Idle threads of torch spin, and the simulated drive waits for their cores.
    torch.set_num_threads(1)
    passed = failed = 0
    for name, case in {
        "ids": equal_ids,
        "graph-1": lambda: replays(1),
        "graph-16": lambda: replays(16),
        "graph-64": lambda: replays(64, 300),
    }.items():
        try:
            line = {"case": name, "gpu": torch.cuda.get_device_name(), **case()}
            passed += 1
        except Exception as error:
            line = {"case": name, "error": f"{type(error).__name__}: {error}"}
            failed += 1
        print(json.dumps(line), flush=True)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
