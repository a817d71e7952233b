"""The package on a machine with a GPU and torch 2: one JSON line for each case, then `N passed, N failed`.

    python torch_on_gpu.py [--seconds 2] [CASE ...]

Needs the wheel and torch. A case that cannot run here says why (`skipped`). Exit status 0: nothing failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback

try:
    import triton
    from triton import language
except ImportError:
    triton = None

ROWS, WIDTH = 16_384, 128
CASES = []


class Skip(Exception):
    """Why a case cannot run here."""


def case(call):
    CASES.append(call)
    return call


def opened(extra=""):
    import nvme_gpu

    return nvme_gpu.open(f"sim:mem?size=64MiB&queues=32&threads=4{extra}", gpu=0)


def filled(store, dtype="float32", offset=0):
    import torch

    torch.manual_seed(1)
    values = torch.randn(ROWS, WIDTH).to(getattr(torch, dtype))
    table = store.table(offset, shape=(ROWS, WIDTH), dtype=dtype)
    table.scatter(torch.arange(ROWS), values)
    return table, values.cuda()


def equal(found, want, what=""):
    import torch

    torch.cuda.synchronize()
    if not torch.equal(found, want):
        wrong = (found != want).any(-1).sum().item() if found.shape == want.shape else "another shape"
        raise AssertionError(f"{what}: {wrong} of {want.shape} rows differ")


@case
def environment(_):
    import torch

    import nvme_gpu

    with opened() as store:
        return {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": sys.version.split()[0],
            "gpu": torch.cuda.get_device_name(0),
            "nvme_gpu": nvme_gpu.__version__,
            "path": store.path,
        }


@case
def gathers_of_every_shape(_):
    import torch

    with opened() as store:
        for dtype in ("float32", "float16", "bfloat16"):
            table, values = filled(store, dtype, offset=96)
            for shape in ((1,), (33,), (4, 8), (0,), (5000,)):
                for kind in (torch.int32, torch.int64):
                    ids = torch.randint(0, ROWS, shape, device="cuda")
                    equal(table[ids.to(kind)], values[ids], f"{dtype} {shape} {kind}")
            out = torch.empty(7, WIDTH, dtype=values.dtype, device="cuda")
            ids = torch.arange(7, device="cuda")
            assert table.gather(ids, out=out) is out
            equal(out, values[:7], "out=")
            table.check()
        return {"dtypes": 3}


@case
def first_launch_of_another_kernel_right_after(_):
    """What a lazy load of a kernel does beside a gather that waits for the drive."""
    import torch

    with opened("&fault=delay:20ms@op=read,every=50") as store:
        table, values = filled(store)
        ids = torch.randint(0, ROWS, (1000,), device="cuda")
        weight = torch.randn(WIDTH, 17, device="cuda")
        begin = time.perf_counter()
        found = table[ids] @ weight
        torch.erfinv(found.sigmoid()).sum().item()
        spare = torch.empty(1 << 20, device="cuda")
        del spare
        torch.cuda.empty_cache()
        table.check()
        equal(table[ids], values[ids])
        return {"seconds": round(time.perf_counter() - begin, 3)}


def add_number(address, number: "language.constexpr"):
    at = language.arange(0, 32)
    language.store(address + at, language.load(address + at) + number)


def beside(rounds, call):
    """`call(turn)` while a gather waits for a slow drive, `rounds` times: the longest round in milliseconds.

    No round takes as long as the time-out of the drive's commands, 5 s: no call waits for a gather that waits for it.
    """
    import torch

    worst = 0.0
    with opened("&fault=delay:5ms@op=read,every=50") as store:
        table, values = filled(store)
        for turn in range(rounds):
            ids = torch.randint(0, ROWS, (512,), device="cuda")
            begin = time.perf_counter()
            found = table[ids]
            call(turn)
            torch.cuda.synchronize()
            took = time.perf_counter() - begin
            table.check()
            equal(found, values[ids], f"round {turn}")
            assert took < 4.5, f"round {turn} took {took:.3f} s"
            worst = max(worst, took)
    return {"rounds": rounds, "worst_ms": round(worst * 1e3, 1)}


@case
def beside_empty_cache(seconds):
    """torch gives its memory back by cudaFree, which waits for the GPU, while a gather is under way."""
    import torch

    def call(_):
        spare = torch.empty(1 << 20, device="cuda")
        del spare
        torch.cuda.empty_cache()

    return beside(int(seconds * 500), call)


@case
def beside_a_compile_of_triton(seconds):
    """A kernel of Triton is compiled, loaded and launched while a gather is under way: another one in each round."""
    import torch

    if triton is None:
        raise Skip("triton is not installed")
    kernel = triton.jit(add_number)
    data = torch.zeros(32, dtype=torch.int64, device="cuda")
    # A number that no cache on the disk has a kernel for.
    first = time.time_ns() % 1_000_003
    rounds = max(5, int(seconds * 10))
    result = beside(rounds, lambda turn: kernel[(1,)](data, number=first + turn))
    assert data[0].item() == sum(first + turn for turn in range(rounds))
    return result


@case
def streams_and_interfaces(_):
    import torch

    with opened() as store:
        table, values = filled(store)
        ids = torch.randint(0, ROWS, (300,), device="cuda")
        side = torch.cuda.Stream()
        found = table.gather(ids, stream=side)
        torch.cuda.current_stream().wait_stream(side)
        equal(found, values[ids], "another stream")
        with torch.cuda.stream(side):
            found = table[ids]
        side.synchronize()
        equal(found, values[ids], "current stream")

        class Foreign:
            def __init__(self, tensor):
                self.tensor = tensor
                self.__cuda_array_interface__ = tensor.__cuda_array_interface__

        made = table[Foreign(ids)]
        equal(torch.from_dlpack(made), values[ids], "DLPack out")
        equal(torch.as_tensor(table[Foreign(ids)], device="cuda"), values[ids], "__cuda_array_interface__ out")
        return {"device": made.device}


@case
def bad_ids_are_found_later(_):
    import torch

    import nvme_gpu

    with opened() as store:
        table, values = filled(store)
        ids = torch.tensor([1, -1, ROWS, 5], device="cuda")
        status = torch.empty(4, dtype=torch.int32, device="cuda")
        found = table.gather(ids, status=status)
        try:
            table.check()
        except nvme_gpu.Usage as error:
            assert error.row == 1, error
        else:
            raise AssertionError("no error")
        assert status.tolist() == [0, -1, -1, 0], status
        equal(found[[0, 3]], values[[1, 5]])
        assert not found[1:3].any()
        try:
            table.gather(ids, check="now")
        except nvme_gpu.Usage:
            return {}
        raise AssertionError("no error of check='now'")


@case
def scatters_and_bytes(_):
    import torch

    with opened() as store:
        table, values = filled(store)
        ids = torch.randperm(ROWS, device="cuda")[:500]
        rows = torch.randn(500, WIDTH, device="cuda")
        table.scatter(ids, rows)
        equal(table[ids], rows, "scatter")
        table.scatter_add(ids, torch.ones_like(rows))
        equal(table[ids], rows + 1, "scatter_add")
        data = torch.randint(0, 255, (3_000_001,), dtype=torch.uint8, device="cuda")
        store.write_from(data, 33_000_001).result(60)
        back = torch.zeros_like(data)
        store.read_into(back, 33_000_001)
        equal(back, data, "bytes")
        table.check()
        return {}


@case
def no_synchronisation_by_capture(_):
    """A gather, and forward and backward of the embedding in a graph: whatever waits for the GPU ends a capture."""
    import torch

    from nvme_gpu.torch import DiskEmbedding, DiskSGD

    with opened() as store:
        table, values = filled(store)
        ids = torch.randint(0, ROWS, (64,), device="cuda")
        out = torch.empty(64, WIDTH, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            table.gather(ids, out=out)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.gather(ids, out=out)
            double = out * 2
        replays = 50
        before = store.stats()
        for _ in range(replays):
            ids.copy_(torch.randint(0, ROWS, (64,), device="cuda"))
            graph.replay()
            equal(double, values[ids] * 2, "replay with other ids")
        assert store.stats() == before, "a replay called the library, or a thread of it sent a command"
        table.check()
        ids.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        try:
            table.check()
        except ValueError:
            pass
        else:
            raise AssertionError("a replay with bad ids passed the check")
        disk = DiskEmbedding(table).cuda()
        optimizer = DiskSGD(disk.parameters(), lr=0.5)
        ids = torch.randint(0, ROWS, (64,), device="cuda")
        disk(ids).sum().backward()
        optimizer.step()
        disk.weight.grad = None
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            disk(ids).sum().backward()
        before = table[ids].clone()
        graph.replay()
        optimizer.step()
        assert not torch.equal(table[ids], before), "a step behind a replayed backward changed nothing"
        return {"replays": replays}


@case
def no_synchronisation_in_eager_mode(_):
    import torch

    from nvme_gpu.torch import DiskEmbedding

    with opened() as store:
        table, _ = filled(store)
        disk = DiskEmbedding(table).cuda()
        ids = torch.randint(0, ROWS, (64,), device="cuda")
        disk(ids).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                disk(ids).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        table.check()
        return {}


@case
def opcheck(_):
    import torch

    import nvme_gpu.torch

    if not hasattr(torch.library, "opcheck"):
        raise Skip("this torch has no opcheck")
    with opened() as store:
        table, values = filled(store)
        answers = {}
        for device in ("cpu", "cuda"):
            state = nvme_gpu.torch.state(table, device)
            ids = torch.randint(0, ROWS, (8,), device=device)
            rows = torch.randn(8, WIDTH, device=device)
            out = torch.empty(8, WIDTH, device=device)
            name = f"sim:mem?size=1MiB&serial={device.upper()}"
            for op, words in (
                ("gather", (state, ids)),
                ("gather_out", (state, ids, out)),
                ("scatter", (state, ids, rows)),
                ("scatter_add", (state, ids, rows)),
                ("read_tensor", (name, 0, [4, 4], torch.float32, torch.device("cpu"))),
            ):
                found = torch.library.opcheck(getattr(torch.ops.nvme_ops, op).default, words, raise_exception=False)
                answers[f"{op} {device}"] = {key: str(value) for key, value in found.items()}
        bad = {key: value for key, value in answers.items() if any(one != "SUCCESS" for one in value.values())}
        if bad:
            raise AssertionError(json.dumps(bad))
        return {"operations": len(answers)}


@case
def compile_keeps_and_orders(_):
    """Eager and compiled do the same reads and writes, in the same order."""
    import torch

    import nvme_gpu.torch

    ops = torch.ops.nvme_ops

    def step(state, ids, rows):
        before = ops.gather(state, ids)
        ops.scatter(state, ids, rows)
        after = ops.gather(state, ids)
        ops.scatter(state, ids, rows + 1)
        return before + 0, after + 0

    answers = {}
    with opened() as store:
        for backend in ("eager", "aot_eager", "inductor"):
            for device in ("cpu", "cuda"):
                table, values = filled(store)
                state = nvme_gpu.torch.state(table, device)
                ids = torch.arange(10, 26, device=device)
                rows = torch.randn(16, WIDTH, device=device)
                torch._dynamo.reset()
                run = torch.compile(step, backend=backend, fullgraph=True)
                try:
                    before, after = run(state, ids, rows)
                except Exception as error:
                    if backend == "inductor" and "compiler" in str(error).lower():
                        answers[f"{backend} {device}"] = f"skipped: {error}"[:200]
                        continue
                    raise
                equal(before, values[10:26].to(device), f"{backend} {device}: before the first scatter")
                equal(after, rows, f"{backend} {device}: between the scatters")
                equal(table[ids], rows + 1, f"{backend} {device}: after the second scatter")
                answers[f"{backend} {device}"] = "same"
        return answers


@case
def compile_of_table_indexing(_):
    """`table[ids]` inside of a compiled function: a graph break, and the right rows."""
    import torch

    with opened() as store:
        table, values = filled(store)
        torch._dynamo.reset()
        ids = torch.randint(0, ROWS, (32,), device="cuda")
        run = torch.compile(lambda ids: table[ids] * 2, backend="aot_eager")
        equal(run(ids), values[ids] * 2)
        return {}


@case
def embedding_under_compile(_):
    """DiskEmbedding in a compiled module: rows, gradients, and two uses in one function, as without."""
    import torch

    from nvme_gpu.torch import DiskAdagrad, DiskEmbedding, DiskSGD

    class Model(torch.nn.Module):
        def __init__(self, table):
            super().__init__()
            self.rows = DiskEmbedding(table)
            torch.manual_seed(4)
            self.head = torch.nn.Linear(WIDTH, 3)

        def forward(self, ids, others):
            return self.head(self.rows(ids) * 2 + self.rows(others)).pow(2).mean()

    answers = {}
    with opened() as store:
        for kind in (DiskSGD, DiskAdagrad):
            for backend in ("eager", "aot_eager", "inductor"):
                found = []
                for compiled in (False, True):
                    table, values = filled(store)
                    model = Model(table).cuda()
                    optimizer = kind(model.rows.parameters(), lr=0.05)
                    torch._dynamo.reset()
                    run = torch.compile(model, backend=backend) if compiled else model
                    torch.manual_seed(5)
                    losses = []
                    try:
                        for _ in range(6):
                            ids, others = torch.randint(0, ROWS, (2, 64), device="cuda")
                            loss = run(ids, others)
                            optimizer.zero_grad()
                            loss.backward()
                            optimizer.step()
                            losses.append(loss.detach())
                    except Exception as error:
                        if backend == "inductor" and "compiler" in str(error).lower():
                            answers[f"{kind.__name__} {backend}"] = f"skipped: {error}"[:200]
                            break
                        raise
                    table.check()
                    found.append((torch.stack(losses), table[torch.arange(ROWS, device="cuda")].clone()))
                if len(found) == 2:
                    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
                    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)
                    assert not torch.equal(found[1][1], values), "the step changed nothing"
                    answers[f"{kind.__name__} {backend}"] = "same"
        return answers


@case
def exchange_by_c(seconds):
    """What a tensor's attributes cost that a gather reads: the most that DLPack's exchange in C could save of it."""
    import torch

    has = [name for name in ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__") if hasattr(torch.Tensor, name)]
    ids = torch.randint(0, ROWS, (32,), device="cuda")
    out = torch.empty(32, WIDTH, device="cuda")

    def attributes():
        return (ids.dtype, ids.is_contiguous(), ids.is_cuda, ids.device.index, ids.numel(), ids.data_ptr(), out.data_ptr())

    with opened() as store:
        table, _ = filled(store)
        whole, read, empty = (p50(call, seconds) for call in (lambda: table[ids], attributes, lambda: None))
        table.check()
    return {"torch": torch.__version__, "names": has, "attributes_us": round(read - empty, 2), "table[ids]_us": round(whole, 2)}


@case
def embedding_beside_torch(_):
    import torch

    from nvme_gpu.torch import DiskEmbedding, DiskSGD

    with opened() as store:
        table, values = filled(store)
        dense = torch.nn.Embedding(ROWS, WIDTH, _weight=values.clone())
        step = torch.optim.SGD(dense.parameters(), lr=0.01)
        disk = DiskEmbedding(table)
        of_disk = DiskSGD(disk.parameters(), lr=0.01)
        weight = torch.randn(WIDTH, device="cuda")
        torch.manual_seed(2)
        for _ in range(20):
            ids = torch.randint(0, ROWS, (256,), device="cuda")
            step.zero_grad()
            (dense(ids) * weight).pow(2).sum().backward()
            step.step()
            of_disk.zero_grad()
            (disk(ids) * weight).pow(2).sum().backward()
            of_disk.step()
        table.check()
        torch.testing.assert_close(table[torch.arange(ROWS, device="cuda")], dense.weight.detach(), rtol=1e-4, atol=1e-4)
        return {}


def p50(call, seconds):
    """Median of the host's time of a call, in microseconds; the GPU is drained between groups."""
    import torch

    call()
    torch.cuda.synchronize()
    times = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for _ in range(50):
            before = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - before)
        torch.cuda.synchronize()
    return statistics.median(times) / 1000


@case
def overhead(seconds):
    """The host's time of `table[ids]` beside `tensor[ids]`: at most 4 us more."""
    import torch

    import nvme_gpu.torch

    with opened() as store:
        table, values = filled(store)
        state = nvme_gpu.torch.state(table, "cuda")
        ids = torch.randint(0, ROWS, (32,), device="cuda")
        out = torch.empty(32, WIDTH, device="cuda")
        found = {
            "tensor[ids]": p50(lambda: values[ids], seconds),
            "table[ids]": p50(lambda: table[ids], seconds),
            "table.gather(out=)": p50(lambda: table.gather(ids, out=out), seconds),
            "ops.gather": p50(lambda: torch.ops.nvme_ops.gather(state, ids), seconds),
            "torch.empty": p50(lambda: torch.empty(32, WIDTH, device="cuda"), seconds),
        }
        table.check()
        rounded = {name: round(value, 2) for name, value in found.items()}
        rounded["difference_us"] = round(found["table[ids]"] - found["tensor[ids]"], 2)
        if rounded["difference_us"] > 4:
            raise AssertionError(json.dumps(rounded))
        return rounded


@case
def rate(seconds):
    """Rows of 512 bytes and 4 KiB per second, by large gathers."""
    import torch

    import nvme_gpu

    answers = {}
    with nvme_gpu.open("sim:mem?size=1GiB&queues=64&threads=12", gpu=0, gpu_queues=48) as store:
        for row_bytes in (512, 4096):
            rows = store.nbytes // row_bytes
            table = store.table(0, shape=(rows, row_bytes), dtype="uint8")
            ids = torch.randint(0, rows, (65_536,), device="cuda")
            out = torch.empty(65_536, row_bytes, dtype=torch.uint8, device="cuda")
            table.gather(ids, out=out, check="now")
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < seconds:
                for _ in range(4):
                    table.gather(ids, out=out)
                torch.cuda.synchronize()
                count += 4 * 65_536
            answers[str(row_bytes)] = round(count / (time.perf_counter() - begin) / 1e6, 3)
            table.check()
    return {"million_rows_per_s": answers}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("cases", nargs="*")
    words = parser.parse_args()
    passed = failed = skipped = 0
    for one in CASES:
        if words.cases and one.__name__ not in words.cases:
            continue
        begin = time.perf_counter()
        line = {"case": one.__name__}
        try:
            line["result"] = "passed"
            line.update(one(words.seconds) or {})
            passed += 1
        except Skip as why:
            line.update(result="skipped", why=str(why))
            skipped += 1
        except BaseException as error:
            line.update(result="failed", error=f"{type(error).__name__}: {error}"[:2000])
            line["where"] = traceback.format_exc().splitlines()[-6:]
            failed += 1
            if isinstance(error, KeyboardInterrupt):
                break
        line["seconds"] = round(time.perf_counter() - begin, 3)
        print(json.dumps(line, default=str), flush=True)
    more = f", {skipped} skipped" if skipped else ""
    print(f"{passed} passed, {failed} failed{more}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
