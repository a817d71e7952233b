"""nvme_gpu.compute over what lies on stores: by threads of the host, and by kernels on the stand-in of CUDA."""

from __future__ import annotations

import pickle

import pytest

import nvme_gpu
from conftest import SIM, SIM_GPU, drain

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
import compute_numbers as numbers  # noqa: E402
from compute_numbers import close  # noqa: E402
from nvme_gpu import compute  # noqa: E402

F32 = np.float32
DRIVE = "sim:mem?size=32MiB&block=512&queues=32&threads=2"
BAD = "&fault=status:0x281@op=read"


@pytest.fixture(params=["host", "gpu"])
def place(request, cuda):
    """Opens a store, and makes tensors where its computations take place."""
    is_gpu = request.param == "gpu"

    class Place:
        gpu = is_gpu

        def open(self, extra="", **more):
            return nvme_gpu.open(DRIVE + extra, gpu=0 if is_gpu else None, **more)

        def tensor(self, tensor):
            return cuda(tensor) if is_gpu else tensor

        def __call__(self, array):
            return self.tensor(torch.from_numpy(np.ascontiguousarray(array)))

    yield Place()
    drain()


def dice(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(F32)


@pytest.mark.parametrize("name,rows,columns,offset", [
    ("float32", 37, 96, 6), ("float16", 1, 32, 0), ("bfloat16", 200, 160, 1022), ("q8_0", 65, 64, 34),
    ("q4_0", 33, 352, 512), ("q4_1", 10, 32, 20), ("q4_k", 5, 512, 144), ("q6_k", 7, 256, 2), ("float32", 0, 32, 0),
])  # fmt: skip
def test_a_matrix_on_a_store_is_multiplied(place, name, rows, columns, offset):
    stored, values = numbers.weights(name, rows, columns)
    x = dice(columns)
    with place.open() as store:
        store.write(stored, offset)
        with compute.Matrix(store, offset, name, (rows, columns)) as matrix:
            assert (matrix.shape, matrix.format, matrix.nbytes) == ((rows, columns), name, stored.nbytes)
            assert matrix.store is store and name in repr(matrix)
            y = matrix.gemv(place(x), check="now")
            assert y.is_cuda == place.gpu
            close(y.cpu(), values.astype(np.float64) @ x, np.abs(values).astype(np.float64) @ np.abs(x))
            out = place(np.full(rows, np.nan, F32))
            assert matrix.gemv(place(x), out) is out
            matrix.check(10)
            assert torch.equal(out.cpu(), y.cpu()), "the same bits each time"
        with pytest.raises(nvme_gpu.Usage, match="the matrix, or its store, is closed"):
            matrix.gemv(place(x))


@pytest.mark.parametrize("name,rows,columns", [("float32", 37, 96), ("q8_0", 65, 64), ("q6_k", 9, 256)])
def test_rows_by_ids_are_multiplied(place, name, rows, columns):
    stored, values = numbers.weights(name, rows, columns)
    x = dice(columns)
    ids = np.random.default_rng(3).integers(0, rows, 50)
    with place.open() as store:
        store.write(stored, 1024)
        matrix = compute.Matrix(store, 1024, name, (rows, columns))
        out = place(np.full(50, np.nan, F32))
        assert matrix.gathered_gemv(place(ids), place(x), out, check="now") is out
        close(out.cpu(), values[ids].astype(np.float64) @ x, np.abs(values[ids]).astype(np.float64) @ np.abs(x))
        assert matrix.gathered_gemv(place(ids[:0]), place(x)).shape == (0,)
        if place.gpu:
            narrow = matrix.gathered_gemv(place(ids.astype(np.int32)), place(x))
            assert torch.equal(narrow.cpu(), out.cpu())
        else:
            with pytest.raises(nvme_gpu.Usage, match="ids is int32: use int64"):
                matrix.gathered_gemv(place(ids.astype(np.int32)), place(x))
        ids[7] = rows
        with pytest.raises(nvme_gpu.Usage):
            matrix.gathered_gemv(place(ids), place(x), out, check="now")
        assert out.cpu()[7].isnan()
        with pytest.raises(nvme_gpu.Usage, match="ids has the shape"):
            matrix.gathered_gemv(place(ids.reshape(5, 10)), place(x))


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("name,dtype", [("q8_0", "float16"), ("q4_k", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16")])
def test_many_vectors_are_multiplied(place, name, dtype, tokens):
    rows, columns = 70, 512
    stored, values = numbers.weights(name, rows, columns)
    kind = getattr(torch, dtype)
    x, rounded = torch.from_numpy(dice(tokens, columns)).to(kind), torch.from_numpy(values).to(kind).double()
    with place.open() as store:
        store.write(stored, 512)
        matrix = compute.Matrix(store, 512, name, (rows, columns))
        out = place(np.full((tokens, rows), np.nan, F32))
        assert matrix.gemm(place.tensor(x), out, check="now") is out
        close(out.cpu(), x.double() @ rounded.T, x.double().abs() @ rounded.abs().T)
        with pytest.raises(nvme_gpu.Usage, match="x is float32: use bfloat16 or float16"):
            matrix.gemm(place(dice(2, columns)))
        with pytest.raises(nvme_gpu.Usage, match="x has the shape"):
            matrix.gemm(place.tensor(x[:, :32].contiguous()))
        for wrong, half in (("f32", kind), ("f16", torch.bfloat16)):
            with pytest.raises(nvme_gpu.Usage):
                compute.Matrix(store, 512, wrong, (4, columns)).gemm(place.tensor(torch.zeros(1, columns).to(half)))


def test_rows_that_are_not_read_are_no_numbers(place):
    fault = f"{BAD},nth=1-1000"
    with place.open(fault) as store:
        matrix = compute.Matrix(store, 0, "f32", (64, 32))
        out = place(np.zeros(64, F32))
        with pytest.raises(nvme_gpu.Status) as caught:
            matrix.gemv(place(dice(32)), out, check="now")
        assert (caught.value.sct, caught.value.sc) == (2, 0x81)
        assert out.cpu().isnan().all()
        if place.gpu:
            assert caught.value.row == 0 and "of 64 rows" in caught.value.cause
            matrix.gemv(place(dice(32)), out)
            with pytest.raises(nvme_gpu.Status):
                matrix.check(10)
            matrix.check()


def test_what_cannot_be_a_matrix_is_named(place, cuda, monkeypatch):
    with place.open() as store:
        for words, cause in [
            ((1, "f32", (1, 32)), "odd|even offset"),
            ((0, "f32", (1, 33)), "multiple of 32"),
            ((0, "q6_k", (1, 96)), "multiple of 256"),
            ((store.nbytes, "f32", (1, 32)), "end|inside"),
            ((0, "f32", (1, 32, 1)), r"use \(rows, columns\)"),
            ((0, "int8", (1, 32)), "weights of the format 'int8'"),
        ]:
            with pytest.raises(nvme_gpu.Usage, match=cause):
                compute.Matrix(store, *words)
        with pytest.raises(TypeError, match="store is of the type str"):
            compute.Matrix("sim:mem", 0, "f32", (1, 32))
        matrix = compute.Matrix(store, 0, "f32", (2, 32))
        with pytest.raises(nvme_gpu.Usage, match="check is 'soon'"):
            matrix.gemv(place(dice(32)), check="soon")
        with pytest.raises(nvme_gpu.Usage, match="x has the shape"):
            matrix.gemv(place(dice(33)))
        other = torch.zeros(2) if place.gpu else cuda(torch.zeros(2))
        with pytest.raises(nvme_gpu.Usage, match="out lies in .*, the other arguments in"):
            matrix.gemv(place(dice(32)), other)
        if not place.gpu:
            with pytest.raises(nvme_gpu.Usage, match="opened without a GPU"):
                matrix.gemv(cuda(torch.zeros(32)))
        for one in (matrix, compute.KvPages(store, 0, 1, **SHAPE)):
            with pytest.raises(nvme_gpu.Usage, match="cannot be pickled"):
                pickle.dumps(one)
        late = type("Late", (), {"check": lambda *_: False})()
        for one in (matrix, compute.KvPages(store, 0, 1, **SHAPE), experts_of(store, [[(0, "f32")] * 3], False)):
            monkeypatch.setattr(type(one), "_native", late)
            with pytest.raises(nvme_gpu.Timeout) as caught:
                one.check(0)
            assert caught.value.code == "unfinished"


SHAPE = {"kv_heads": 2, "head_dim": 8, "page_tokens": 16}


def paged(store, dtype="float16", pages=6, offset=512, seed=1):
    """Pages with keys and values, and those as float32."""
    made = compute.KvPages(store, offset, pages, dtype=dtype, **SHAPE)
    values = dice(pages, 2, 2, 16, 8, seed=seed)
    halves = numbers.to_bf16(values) if dtype == "bfloat16" else values.astype(np.float16)
    store.write(halves, offset)
    return made, halves, numbers.of_bf16(halves) if dtype == "bfloat16" else halves.astype(F32)


def by_pages(queries, values, tables, scale, tails=None):
    """Attention by numpy: `tables` are page numbers of each sequence and head of keys."""
    found = np.zeros_like(queries, np.float64)
    group = queries.shape[1] // 2
    for sequence, heads in enumerate(tables):
        for head, ids in enumerate(heads):
            keys = [values[page][head, 0] for page in ids]
            rows = [values[page][head, 1] for page in ids]
            if tails is not None:
                page, tokens = tails[sequence]
                keys.append(page[head, 0][:tokens])
                rows.append(page[head, 1][:tokens])
            keys = np.concatenate([*keys, np.zeros((0, 8))])[:, None]
            rows = np.concatenate([*rows, np.zeros((0, 8))])[:, None]
            part = slice(head * group, (head + 1) * group)
            found[sequence, part] = numbers.attended(queries[sequence, part], keys, rows, scale)
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("per_head", [False, True])
def test_attention_over_pages_of_a_drive(place, dtype, per_head):
    queries = dice(3, 6, 8)
    lists = (3, 2) if per_head else (3,)
    table = np.random.default_rng(2).integers(0, 6, (*lists, 4)).astype(np.int32)
    counts = np.array([[4, 1], [0, 0], [2, 3]] if per_head else [4, 0, 3], np.int32)
    with place.open() as store:
        pages, _, values = paged(store, dtype)
        tables = [
            [table[(s, h) if per_head else s][: counts[(s, h) if per_head else s]] for h in range(2)] for s in range(3)
        ]
        found = compute.attention_paged(place(queries), pages, place(table), place(counts), check="now").cpu()
        close(found, by_pages(queries, values, tables, 8**-0.5), 10)
        assert found[1].abs().max() == 0, "a query without a token"
        tail = dice(3, 2, 2, 16, 8, seed=7)
        halves = torch.from_numpy(tail).to(getattr(torch, dtype))
        tokens = np.array([16, 5, 0], np.int32)
        out = place(np.full_like(queries, np.nan))
        words = {"tail": place.tensor(halves), "tail_counts": place(tokens), "scale": 0.25}
        assert compute.attention_paged(place(queries), pages, place(table), place(counts), out, **words) is out
        pages.check(10)
        close(out.cpu(), by_pages(queries, values, tables, 0.25, list(zip(halves.float().numpy(), tokens))), 10)


def test_heads_with_pages_that_are_not_there_are_no_numbers(place):
    queries, counts = dice(2, 2, 8), np.array([2, 2], np.int32)
    table = np.array([[1, 2], [0, 6]], np.int32)
    with place.open() as store:
        pages, _, values = paged(store)
        out = place(np.zeros_like(queries))
        with pytest.raises(nvme_gpu.Usage):
            compute.attention_paged(place(queries), pages, place(table), place(counts), out, check="now")
        found = out.cpu().numpy()
        assert np.isnan(found[1]).all()
        close(found[0], by_pages(queries[:1], values, [[[1, 2], [1, 2]]], 8**-0.5)[0], 10)
        with pytest.raises(nvme_gpu.Usage):
            compute.attention_paged(place(queries), pages, place(-table), place(counts), check="now")
    with place.open(f"{BAD},nth=1-1000") as store:
        pages = compute.KvPages(store, 0, 8, **SHAPE)
        out = place(np.zeros_like(queries))
        with pytest.raises(nvme_gpu.Status):
            compute.attention_paged(place(queries), pages, place(table), place(counts), out, check="now")
        assert out.cpu().isnan().all()


def test_pages_are_chosen_by_bounds_of_their_keys(place):
    queries = dice(2, 4, 8)
    with place.open() as store:
        pages, halves, values = paged(store, pages=12)
        summaries = pages.summaries()
        assert summaries.pages is pages
        summaries.read()
        read = summaries.tobytes()
        keys = values[:, :, 0]
        bounds = np.stack([keys.min(2), keys.max(2)], 2)
        assert np.array_equal(np.frombuffer(read, np.float16).reshape(12, 2, 2, 8).astype(F32), bounds)
        table = np.tile(np.arange(12, dtype=np.int32), (2, 1))
        counts = np.array([12, 7], np.int32)
        for keep in (compute.Keep(4), (5, 1, 2), (20, 0, 0)):
            keep = compute.Keep(*keep)
            chosen, number = pages.choose(place(queries), place(table), place(counts), summaries, keep)
            chosen, number = chosen.cpu().numpy(), number.cpu().numpy()
            assert chosen.shape == (2, 2, min(keep.pages, 12)) and number.shape == (2, 2)
            for sequence in range(2):
                for head in range(2):
                    count = counts[sequence]
                    mine = queries[sequence, head * 2 : head * 2 + 2]
                    products = np.maximum(mine[:, None] * bounds[:, head, 0], mine[:, None] * bounds[:, head, 1])
                    rank = products.sum(-1).max(0)[:count]
                    order = sorted(range(count), key=lambda at: (keep.first <= at < count - keep.last, -rank[at]))
                    want = sorted(order[: keep.pages])
                    assert number[sequence, head] == len(want)
                    assert chosen[sequence, head, : len(want)].tolist() == want
        every = pages.choose(place(queries), place(table), place(counts), summaries, (20, 0, 0))
        found = compute.attention_paged(place(queries), pages, *every, check="now")
        whole = compute.attention_paged(place(queries), pages, place(table), place(counts), check="now")
        assert torch.equal(found.cpu(), whole.cpu()), "all pages are those of the table"
        # New pages are written and summarised by numbers in tensors.
        ids = np.array([3, 9, 99, -1], np.int64)
        fresh = dice(4, 2, 2, 16, 8, seed=9).astype(np.float16)
        pages.table.scatter(torch.from_numpy(ids[:2]), torch.from_numpy(fresh[:2]))
        updated = pages.summaries()
        updated.read(0, 12)
        assert updated.tobytes() != read
        if store.gpu is None:
            for wrong in (ids, ids[[0, 1, 0, 3]]):
                with pytest.raises(nvme_gpu.Usage, match="there is no page (99|-1)"):
                    summaries.update(place(wrong), place(fresh))
            assert summaries.tobytes() == read, "all are judged before one is made"
            ids, fresh = ids[:2], fresh[:2]
        summaries.update(place(ids), place(fresh))
        assert summaries.tobytes() == updated.tobytes()


@pytest.mark.parametrize("count", [-1, 3, 2**31 - 1])
def test_counts_of_pages_and_tokens_that_are_none_are_refused(count):
    queries, table = dice(2, 2, 8), np.array([[1, 2], [0, 3]], np.int32)
    good, wrong = np.array([2, 2], np.int32), np.array([2, count], np.int32)
    with nvme_gpu.open(f"{SIM}&block=512") as store:
        pages, _, _ = paged(store)
        summaries = pages.summaries("cpu")
        summaries.read()
        tail = np.zeros((2, 2, 2, 16, 8), np.float16)
        tokens = np.array([0, count + 14 if count == 3 else count], np.int32)
        for call in (
            lambda: compute.attention_paged(queries, pages, table, wrong),
            lambda: compute.attention_paged(queries, pages, np.stack([table, table], 1), np.stack([good, wrong], 1)),
            lambda: compute.attention_paged(queries, pages, table, good, tail=tail, tail_counts=tokens),
            lambda: pages.choose(queries, table, wrong, summaries, (2, 0, 0)),
        ):
            with pytest.raises(nvme_gpu.Usage, match="counts"):
                call()
        assert np.isfinite(compute.attention_paged(queries, pages, table, good)).all()


def test_what_cannot_be_attended_to_is_named(place, cuda):
    q, table, counts = place(dice(1, 2, 8)), place(np.zeros((1, 2), np.int32)), place(np.zeros(1, np.int32))
    with place.open() as store:
        pages = compute.KvPages(store, 0, 4, **SHAPE)
        assert (pages.kv_heads, pages.head_dim, pages.page_tokens, pages.dtype, len(pages)) == (2, 8, 16, "float16", 4)
        assert pages.store is store and pages.table.shape == (4, 2, 2, 16, 8) and "float16" in repr(pages)
        calls = [
            (lambda: compute.KvPages(store, 0, 4, kv_heads=2, head_dim=12, page_tokens=16), "12 is no possible number of elements of a head"),
            (lambda: compute.KvPages(store, 0, 4, kv_heads=2, head_dim=8, page_tokens=3), "whole blocks"),
            (lambda: compute.KvPages(store, 0, 4, dtype="float32", **SHAPE), "keys and values of float32"),
            (lambda: compute.KvPages(store, 0, 1 << 20, **SHAPE), "inside|end"),
            (lambda: compute.attention_paged(place(dice(1, 3, 8)), pages, table, counts), "3 heads of queries over 2"),
            (lambda: compute.attention_paged(place(dice(1, 2, 9)), pages, table, counts), "queries has the shape"),
            (lambda: compute.attention_paged(q, pages, place(np.zeros((1, 2), np.int64)), counts), "table is int64"),
            (lambda: compute.attention_paged(q, pages, place(np.zeros((2, 2), np.int32)), counts), "table has the shape"),
            (lambda: compute.attention_paged(q, pages, table, place(np.zeros(2, np.int32))), "counts has the shape"),
            (lambda: compute.attention_paged(q, pages, table, counts, tail=q), "tail is float32"),
            (lambda: compute.attention_paged(q, pages, table, counts, tail_counts=counts), "tail without tail_counts"),
            (lambda: pages.choose(q, table, counts, pages.summaries(), (1, 1, 1)), "choose one page at least"),
            (lambda: pages.choose(q, table, counts, pages.summaries(), (0, 0, 0)), "choose one page at least"),
            (lambda: pages.choose(q, table, counts, None, (1, 0, 0)), "were not made by these pages"),
            (lambda: pages.summaries().read(3, 2), "the range of 2 pages from page 3 ends past the last page"),
            (lambda: pages.summaries("tpu"), "device is 'tpu'"),
            (lambda: pages.summaries().update(place(np.zeros(1, np.int64)), q), "pages is float32"),
        ]
        for call, cause in calls:
            with pytest.raises(nvme_gpu.Usage, match=cause):
                call()
        with pytest.raises(TypeError, match="pages is of the type Store"):
            compute.attention_paged(q, store, table, counts)
        ids, rows = np.zeros(1, np.int64), np.zeros((1, 2, 2, 16, 8), np.float16)
        if place.gpu:
            on_host = pages.summaries("cpu")
            with pytest.raises(nvme_gpu.Usage, match="the summaries lie in host memory"):
                pages.choose(q, table, counts, on_host, (1, 0, 0))
            with pytest.raises(nvme_gpu.Usage, match="summaries elsewhere"):
                on_host.update(place(ids), place(rows))
            with pytest.raises(nvme_gpu.Usage, match="the summaries lie in GPU memory"):
                pages.choose(*(one.cpu() for one in (q, table, counts)), pages.summaries(), (1, 0, 0))
        else:
            with pytest.raises(nvme_gpu.Usage, match="opened without a GPU"):
                pages.summaries("cuda")
        summaries = pages.summaries()
        with pytest.raises(nvme_gpu.Usage, match="cannot be pickled"):
            pickle.dumps(summaries)
        pages.close()
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            compute.attention_paged(q, pages, table, counts)
        with compute.KvPages(store, 0, 4, **SHAPE) as again:
            again.check()


WIDTH, HIDDEN, COUNT = 64, 96, 5


def layers(store, kinds):
    """Layers whose matrices have these formats, and their numbers."""
    at, placed, values = 1000, [], []
    for layer, names in enumerate(kinds):
        places, matrices = [], []
        for kind, name in enumerate(names):
            rows, columns = (WIDTH, HIDDEN) if kind == 2 else (HIDDEN, WIDTH)
            stored, found = numbers.weights(name, COUNT * rows, columns, seed=layer * 3 + kind)
            store.write(stored, at)
            places.append((at, name))
            matrices.append(found.reshape(COUNT, rows, columns))
            at += stored.nbytes + 6
        placed.append(places)
        values.append(matrices)
    return placed, values


def experts_of(store, placed, gpu, **more):
    words = {"width": WIDTH, "hidden": HIDDEN, "experts": COUNT, "choices": 2}
    cache = {"cache_bytes": 1 << 20, "tokens": 4} if gpu else {}
    return compute.Experts(store, placed, **{**words, **cache, **more})


@pytest.mark.parametrize("over_all", [False, True])
@pytest.mark.parametrize("policy", ["lru", "lfu", "clock"])
def test_experts_that_were_chosen_are_read_and_computed(place, over_all, policy):
    # The CPU has no cache: it ignores the policy.
    kinds = [("float16", "q8_0", "q4_0"), ("float32", "bfloat16", "q4_1")]
    with place.open() as store:
        placed, values = layers(store, kinds)
        words = {"policy": policy, "pinned": [(1, 3)]} if place.gpu else {}
        experts = experts_of(store, placed, place.gpu, over_all=over_all, **words)
        assert experts.store is store and experts.layers == 2 and "2 of 5" in repr(experts)
        assert experts.slot_bytes >= HIDDEN * WIDTH * 4 and (experts.slots > 0) == place.gpu == (experts.memory_bytes > 0)
        chosen = [[0] * COUNT, [0] * COUNT]
        for step, tokens in enumerate((1, 4, 0, 3)):
            layer = step % 2
            x, logits = dice(tokens, WIDTH, seed=step), dice(tokens, COUNT, seed=step + 50)
            want = numbers.experts_by_numpy(x, logits, values[layer], 2, over_all)
            probabilities = place(np.empty_like(logits))
            found = compute.moe_experts_compute(
                experts, layer, place(logits), place(x), check="now", probabilities=probabilities
            )
            size = np.abs(want).max() if tokens else 1
            close(found.cpu(), want, size * 10)
            close(probabilities.cpu(), numbers.softmax(logits.astype(np.float64)) if tokens else logits, 1)
            out = place(np.ones_like(x))
            assert experts.compute(layer, place(logits), place(x), out, accumulate=True) is out
            experts.check(10)
            close(out.cpu(), want + 1, size * 10)
            for one in np.argsort(-logits, -1, kind="stable")[:, :2].ravel():
                chosen[layer][one] += 2
        if place.gpu:
            counts = experts.counts()
            assert counts.chosen == chosen and counts.hits + counts.misses == sum(map(sum, chosen))
            assert counts.misses > 0 and counts.evictions >= 0
            assert compute.moe_load_balance(counts.chosen[0]).unused == chosen[0].count(0)
        else:
            with pytest.raises(nvme_gpu.Usage, match="no cache on a GPU"):
                experts.counts()


@pytest.mark.parametrize("limits", [{}, {"limit": 0.5}, {"limit": 7, "alpha": 1.702}])
def test_biases_and_the_activation_are_those_of_the_model(place, limits):
    with place.open() as store:
        placed, values = layers(store, [("mxfp4", "mxfp4", "q8_0")])
        experts = experts_of(store, placed, place.gpu, **limits)
        x, logits = dice(3, WIDTH, seed=1), dice(3, COUNT, seed=2)
        biases = [dice(COUNT, rows, seed=rows + at) for at, rows in enumerate((HIDDEN, HIDDEN, WIDTH))]
        found = experts.compute(0, place(logits), place(x), biases=[place(bias) for bias in biases], check="now")
        want = np.zeros((3, WIDTH))
        for token, vector in enumerate(x.astype(np.float64)):
            best = np.argsort(-logits[token], kind="stable")[:2]
            for expert, weight in zip(best, numbers.softmax(logits[token, best].astype(np.float64))):
                gate, up = (values[0][at][expert] @ vector + biases[at][expert] for at in (0, 1))
                if limits:
                    gate, up = np.minimum(gate, limits["limit"]), np.clip(up, -limits["limit"], limits["limit"])
                sigmoid = 1 / (1 + np.exp(-gate * limits.get("alpha", 1)))
                hidden = gate * sigmoid * (up + ("alpha" in limits))
                want[token] += weight * (values[0][2][expert] @ hidden + biases[2][expert])
        close(found.cpu(), want, np.abs(want).max() * 10)
        for wrong, cause in [(biases[:2], "2 biases are given"), ([biases[2]] * 3, "the bias of gate has the shape")]:
            with pytest.raises(nvme_gpu.Usage, match=cause):
                experts.compute(0, place(logits), place(x), biases=[place(bias) for bias in wrong])
        with pytest.raises(nvme_gpu.Usage, match="alpha is given without a limit"):
            experts_of(store, placed, False, alpha=1.0)
        with pytest.raises(nvme_gpu.Usage, match="limit is nan"):
            experts_of(store, placed, False, limit=float("nan"))


def test_tokens_whose_experts_are_not_read_are_no_numbers(place):
    with place.open(f"{BAD},nth=1-1000") as store:
        placed = [[(0, "float32")] * 3]
        experts = experts_of(store, placed, place.gpu)
        out = place(np.zeros((2, WIDTH), F32))
        with pytest.raises(nvme_gpu.Status):
            experts.compute(0, place(dice(2, COUNT)), place(dice(2, WIDTH)), out, check="now")
        assert out.cpu().isnan().all()


def test_what_cannot_be_experts_is_named(place, cuda):
    with place.open() as store:
        good = [[(0, "f32")] * 3]
        for words, cause in [
            (([], {}), "0 layers"),
            (([[(0, "f32")] * 2], {}), "layer 0 has 2 matrices"),
            ((good, {"choices": 6}), "5 experts with 6 chosen"),
            ((good, {"width": 33}), "multiples of"),
            ((good, {"choices": 0}), "choices is 0"),
            (([[(1, "f32")] * 3], {}), "even offsets"),
        ]:
            with pytest.raises(nvme_gpu.Usage, match=cause):
                experts_of(store, words[0], False, **words[1])
        if place.gpu:
            for words, cause in [
                ({"policy": "fifo"}, "policy is 'fifo'"),
                ({"cache_bytes": 100}, "a cache of 0 experts"),
                ({"pinned": [(0, 5)]}, "pinned experts that are not there"),
            ]:
                with pytest.raises(nvme_gpu.Usage, match=cause):
                    experts_of(store, good, True, **words)
        experts = experts_of(store, good, place.gpu)
        x, logits = place(dice(1, WIDTH)), place(dice(1, COUNT))
        for call, cause in [
            (lambda: experts.compute(1, logits, x), "layer is 1"),
            (lambda: experts.compute(0, logits, x, accumulate=True), "accumulate without out"),
            (lambda: experts.compute(0, logits, place(dice(1, 3))), "x has the shape"),
            (lambda: experts.compute(0, place(dice(2, COUNT)), x), "logits has the shape"),
            (lambda: experts.compute(0, logits, x, probabilities=x), "probabilities has the shape"),
        ]:
            with pytest.raises(nvme_gpu.Usage, match=cause):
                call()
        with pytest.raises(TypeError, match="experts is of the type list"):
            compute.moe_experts_compute([], 0, logits, x)
        with pytest.raises(nvme_gpu.Usage, match="cannot be pickled"):
            pickle.dumps(experts)
        if place.gpu:
            with pytest.raises(nvme_gpu.Usage, match="a step of 5 tokens: use 4 at most"):
                experts.compute(0, place(dice(5, COUNT)), place(dice(5, WIDTH)))
            plain = experts_of(store, good, False)
            with pytest.raises(nvme_gpu.Usage, match="no cache on a GPU"):
                plain.compute(0, logits, x)
        else:
            with pytest.raises(nvme_gpu.Usage, match="opened without a GPU"):
                experts.compute(0, cuda(torch.zeros(1, COUNT)), cuda(torch.zeros(1, WIDTH)))
        with experts:
            pass
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            experts.compute(0, logits, x)


def test_files_have_matrices_for_the_host_alone(tmp_path, cuda):
    path = tmp_path / "w.bin"
    stored, values = numbers.weights("q8_0", 40, 64)
    path.write_bytes(stored.tobytes())
    x = dice(64)
    with nvme_gpu.open(f"file:{path}", read_only=True) as store:
        found = compute.Matrix(store, 0, "q8_0", (40, 64)).gemv(x)
        close(found, values.astype(np.float64) @ x, np.abs(values).astype(np.float64) @ np.abs(x))
    with nvme_gpu.open(f"file:{path}", gpu=0, read_only=True) as store:
        matrix = compute.Matrix(store, 0, "q8_0", (40, 64))
        with pytest.raises(nvme_gpu.Usage):
            matrix.gemv(cuda(torch.from_numpy(x)), check="now")


def test_a_store_that_is_closed_first_closes_what_lies_on_it():
    store = nvme_gpu.open(SIM_GPU)
    kept = compute.Matrix(store, 0, "f32", (1, 32)), experts_of(store, [[(0, "f32")] * 3], False)
    store.close()
    for one in kept:
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            one.check()
