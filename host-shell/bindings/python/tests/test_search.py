"""Search for nearest vectors, by the host and by the stand-in of a GPU."""

from __future__ import annotations

import pickle

import pytest
from conftest import SIM, SIM_GPU, stand_in

import nvme_gpu

np = pytest.importorskip("numpy")

DIM, COUNT, QUERIES, K = 16, 600, 40, 5
OFFSET = 8192


def vectors(count, seed):
    """Points around eight centres."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(1).normal(size=(8, DIM)) * 4
    points = centres[random.integers(0, 8, count)] + random.normal(size=(count, DIM))
    return points.astype(np.float32)


VECTORS, ASKED = vectors(COUNT, 2), vectors(QUERIES, 3)


def nearest():
    """By comparing all."""
    distances = ((ASKED[:, None, :].astype(np.float64) - VECTORS[None, :, :]) ** 2).sum(-1)
    return np.argsort(distances, axis=1)[:, :K], np.sort(distances, axis=1)[:, :K]


@pytest.fixture
def store():
    with nvme_gpu.open(SIM) as opened:
        yield opened


@pytest.fixture
def index(store):
    return nvme_gpu.build_index(store, VECTORS, OFFSET, degree=16, candidates=60)


def test_what_is_found_is_what_is_near(index):
    found = index.search(ASKED, K, candidates=100)
    ids, distances = nearest()
    assert found.ids.dtype == np.int64 and found.distances.dtype == np.float32
    same = [len(set(a) & set(b)) for a, b in zip(found.ids.tolist(), ids.tolist())]
    assert sum(same) >= 0.98 * QUERIES * K
    # Distances are those of the vectors themselves, not of their codes.
    exact = ((ASKED[:, None, :].astype(np.float64) - VECTORS[found.ids]) ** 2).sum(-1)
    assert np.allclose(found.distances, exact, rtol=1e-5)
    assert (np.diff(found.distances, axis=1) >= 0).all() and np.allclose(distances[:, 0].min(), exact[:, 0].min())
    assert not found.status.any() and (found.reads > 0).all()


def test_an_index_is_opened_again(index, store):
    ids, *_ = index.search(ASKED, K)
    again = nvme_gpu.SearchIndex(store, OFFSET)
    assert again.store is store and (len(again), again.dim, again.degree) == (COUNT, DIM, 16)
    assert again.nbytes > COUNT * 4096 > again.memory_bytes > 0 and str(COUNT) in repr(again)
    assert (again.search(ASKED, K).ids == ids).all()
    again.close()
    with pytest.raises(nvme_gpu.Usage, match="is closed"):
        again.search(ASKED)
    with pytest.raises(nvme_gpu.Usage, match="pickled"):
        pickle.dumps(index)
    with index as same:
        assert same is index
    with pytest.raises(nvme_gpu.Usage, match="is closed"):
        index.check()


def test_one_query_has_answers_of_one_dimension(index):
    one, all_of_them = index.search(ASKED[3], K), index.search(ASKED, K)
    assert one.ids.shape == (K,) and one.status.shape == ()
    assert (one.ids == all_of_them.ids[3]).all() and one.reads == all_of_them.reads[3]
    assert index.search(ASKED[:0], K).ids.shape == (0, K)


def test_tensors_come_of_tensors(index):
    torch = pytest.importorskip("torch")
    found = index.search(torch.from_numpy(ASKED), K, threads=2)
    assert found.ids.dtype is torch.int64 and found.reads.dtype is torch.int32
    assert (found.ids.numpy() == index.search(ASKED, K).ids).all()


def test_without_numpy_answers_are_arrays(index, monkeypatch):
    expected = index.search(ASKED, K).ids.tolist()
    monkeypatch.setattr(nvme_gpu._buffers, "numpy", lambda: None)
    found = index.search(ASKED, K)
    assert isinstance(found.ids, nvme_gpu.Array) and found.ids.tolist() == expected


def test_a_query_that_is_not_finite_fails_alone(index):
    asked = ASKED.copy()
    asked[7, 2] = np.nan
    with pytest.raises(nvme_gpu.Usage, match="query 7: Query Not Finite; queries that failed: 1") as caught:
        index.search(asked, K)
    assert caught.value.row == 7
    found = index.search(asked, K, check="later")
    assert found.status[7] < 0 and (found.ids[7] == -1).all() and np.isinf(found.distances[7]).all()
    assert (np.delete(found.ids, 7, 0) == np.delete(index.search(ASKED, K).ids, 7, 0)).all()


def test_a_read_that_fails_is_its_queries(index):
    store = nvme_gpu.open("sim:mem?size=16MiB&fault=status:0x281@op=read,nth=100-400")
    index = nvme_gpu.build_index(store, VECTORS, 0, degree=16, candidates=60)
    with pytest.raises(nvme_gpu.Status, match="queries that failed") as caught:
        index.search(ASKED, K)
    found = index.search(ASKED, K, check="later")
    assert (caught.value.sct, caught.value.sc) == (2, 0x81) and 0x281 in found.status
    store.close()
    with pytest.raises(nvme_gpu.Usage, match="is closed"):
        index.search(ASKED)


def test_progress_is_told_and_may_end_the_work(store):
    seen = []
    nvme_gpu.build_index(store, VECTORS, progress=lambda *so_far: seen.append(so_far))
    assert seen[-1] == (2 * COUNT, 2 * COUNT) and all(done <= total for done, total in seen)

    def stop(*_):
        raise KeyError("enough")

    with pytest.raises(KeyError):
        nvme_gpu.build_index(store, vectors(20_000, 4)[:3000], progress=stop, candidates=1000)


def test_damage_is_told(index, store):
    with pytest.raises(nvme_gpu.NvmeGpuError, match="no index begins here"):
        nvme_gpu.SearchIndex(store, 0)
    last = OFFSET + index.nbytes - 4096 * COUNT
    store.write(b"\1" * 4096 * COUNT, last)
    with pytest.raises(nvme_gpu.NvmeGpuError, match="Wrong Node"):
        index.search(ASKED)


@pytest.mark.parametrize(
    "words, message",
    [
        ({"k": 0}, "k is 0"),
        ({"k": 33}, "k is 33"),
        ({"k": 20, "candidates": 10}, "10 candidates for 20 results"),
        ({"candidates": 257}, "candidates is 257"),
        ({"beam": 33}, "beam is 33"),
        ({"threads": 0}, "threads is 0"),
        ({"check": "never"}, "check is 'never'"),
    ],
)
def test_options_are_checked(index, words, message):
    with pytest.raises(nvme_gpu.Usage, match=message):
        index.search(ASKED, **words)


def test_what_is_no_query_is_refused(index, store):
    for queries, message in (
        (ASKED.astype(np.float64), "queries are float64"),
        (ASKED[:, :8].copy(), "queries have the shape"),
        (ASKED[None], "queries have the shape"),
    ):
        with pytest.raises(nvme_gpu.Usage, match=message):
            index.search(queries)
    for given, words, message in (
        (VECTORS[0], {}, "vectors have the shape"),
        (VECTORS, {"offset": 100}, "multiple of 4096"),
        (VECTORS, {"degree": 65}, "65 neighbours"),
        (VECTORS, {"candidates": 0}, "0 candidates"),
        (VECTORS, {"offset": 31 << 20}, "fewer vectors, or a larger device"),
        (np.full((3, 4), np.inf, np.float32), {}, "not finite"),
    ):
        with pytest.raises(nvme_gpu.Usage, match=message):
            nvme_gpu.build_index(store, given, **words)
    for call in (lambda: nvme_gpu.SearchIndex("store"), lambda: nvme_gpu.build_index("store", VECTORS)):
        with pytest.raises(TypeError, match="use nvme_gpu.open"):
            call()


@pytest.fixture
def on_gpu():
    if not stand_in():
        pytest.fail("needs the stand-in of CUDA: LD_LIBRARY_PATH with its libcuda.so.1")
    with nvme_gpu.open(SIM_GPU, gpu=0) as store:
        yield nvme_gpu.build_index(store, VECTORS, OFFSET, degree=16, candidates=60)


def test_a_gpu_finds_the_same(on_gpu, cuda):
    torch = pytest.importorskip("torch")
    by_cpu = on_gpu.search(ASKED, K)
    for words in ({}, {"check": "now"}, {"stream": 2}):
        found = on_gpu.search(cuda(torch.from_numpy(ASKED)), K, **words)
        on_gpu.check(20)
        for one, other in zip(found, by_cpu):
            assert one.is_cuda and (one.cpu().numpy() == other).all()


def test_what_a_gpu_refuses_is_told(on_gpu, cuda):
    torch = pytest.importorskip("torch")
    asked = ASKED.copy()
    asked[9, 0] = np.inf
    found = on_gpu.search(cuda(torch.from_numpy(asked)), K)
    with pytest.raises(nvme_gpu.Usage, match=r"search \d+ of 40 queries on the GPU: query 9: Query Not Finite"):
        on_gpu.check(20)
    assert int(found.status.cpu()[9]) < 0
    with pytest.raises(nvme_gpu.Usage, match="query 9"):
        on_gpu.search(cuda(torch.from_numpy(asked)), K, check="now")
    array = nvme_gpu.Array((2, DIM), "float32", 4, on_gpu.store._native)
    with pytest.raises(nvme_gpu.Usage, match="no tensor of torch"):
        on_gpu.search(array)
    with nvme_gpu.open(SIM) as store:
        index = nvme_gpu.build_index(store, VECTORS)
        with pytest.raises(nvme_gpu.Usage, match="without a GPU"):
            index.search(cuda(torch.from_numpy(ASKED)))


def test_searches_that_take_longer_are_waited_for(cuda):
    torch = pytest.importorskip("torch")
    with nvme_gpu.open(SIM_GPU + "&fault=delay:300ms@op=read,nth=50-400", gpu=0) as store:
        index = nvme_gpu.build_index(store, VECTORS, degree=16, candidates=60)
        index.search(cuda(torch.from_numpy(ASKED)), K)
        with pytest.raises(nvme_gpu.Timeout):
            index.check(0)
        index.check(60)


def test_an_index_of_angles_divides_by_lengths_and_says_so():
    given = VECTORS * np.resize([1e-3, 1.0, 500.0], (COUNT, 1)).astype(np.float32)
    with nvme_gpu.open(SIM) as store:
        index = nvme_gpu.build_index(store, given, metric="cosine")
        assert index.metric == "cosine" and nvme_gpu.SearchIndex(store, metric="cosine").metric == "cosine"
        found = index.search(ASKED * 7, K)
        unit = given.astype("float64") / np.linalg.norm(given.astype("float64"), axis=1, keepdims=True)
        asked = ASKED.astype("float64") / np.linalg.norm(ASKED.astype("float64"), axis=1, keepdims=True)
        cosines = asked @ unit.T
        best = -np.sort(-cosines, axis=1)[:, :1]
        assert (np.take_along_axis(cosines, found.ids[:, :1], 1) >= best - 1e-6).mean() > 0.9
        far = 2 - 2 * np.take_along_axis(cosines, found.ids, 1)
        assert np.allclose(found.distances, far, atol=1e-4)
        with pytest.raises(nvme_gpu.Usage, match="the metric 'cosine', not 'euclidean'"):
            nvme_gpu.SearchIndex(store, metric="euclidean")
        with pytest.raises(nvme_gpu.Usage, match="no metric is called"):
            nvme_gpu.build_index(store, given, metric="dot")
        given[5] = 0
        with pytest.raises(nvme_gpu.Usage, match="vector 5 has no direction"):
            nvme_gpu.build_index(store, given, metric="cosine")


def recall(found, products, k):
    """The part of the ``k`` greatest of each row of ``products`` that is among the ids, equal ones counted alike."""
    least = -np.sort(-products, axis=1)[:, k - 1 : k]
    return (np.take_along_axis(products, found.ids, 1) >= least - 1e-6 * np.abs(least)).mean()


def test_inner_products_are_the_greatest_of_a_product_of_matrices(on_gpu, cuda):
    torch = pytest.importorskip("torch")
    given = VECTORS * np.resize([0.1, 1.0, 5.0, 3.0], (COUNT, 1)).astype(np.float32)
    index = nvme_gpu.build_index(on_gpu.store, given, metric="inner_product")
    assert (index.metric, index.dim) == ("inner_product", DIM)
    products = ASKED.astype(np.float64) @ given.astype(np.float64).T
    found = index.search(ASKED, K, candidates=128)
    assert recall(found, products, K) >= 0.97
    assert np.isclose(index.longest, np.linalg.norm(given.astype(np.float64), axis=1).max(), rtol=1e-6)
    lengths = np.linalg.norm(ASKED.astype(np.float64), axis=1, keepdims=True) * index.longest
    far = 2 - 2 * np.take_along_axis(products, found.ids, 1) / lengths
    assert np.allclose(found.distances, far, atol=1e-5)
    by_gpu = index.search(cuda(torch.from_numpy(ASKED)), K, candidates=128, check="now")
    assert recall(nvme_gpu._search.Nearest(*(one.cpu().numpy() for one in by_gpu)), products, K) >= 0.97
    assert np.allclose(by_gpu.distances.cpu().numpy(), found.distances, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "int8", "uint8"])
def test_other_types_are_searched_as_their_values(store, dtype):
    given, asked = ((numbers * 8).clip(0, 120).astype(dtype) for numbers in (VECTORS, ASKED))
    index = nvme_gpu.build_index(store, given, OFFSET)
    found = index.search(asked, K, candidates=100)
    same = nvme_gpu.build_index(store, given.astype(np.float32), OFFSET).search(asked.astype(np.float32), K, candidates=100)
    assert (found.ids == same.ids).all() and (found.distances == same.distances).all()
    apart = ((asked[:, None].astype(np.float64) - given[None].astype(np.float64)) ** 2).sum(-1)
    assert recall(found, -apart, K) >= 0.98


def test_bfloat16_tensors_are_searched_as_their_values(store):
    torch = pytest.importorskip("torch")
    given, asked = torch.from_numpy(VECTORS).bfloat16(), torch.from_numpy(ASKED).bfloat16()
    index = nvme_gpu.build_index(store, given)
    same = nvme_gpu.build_index(store, given.float(), OFFSET * 1000)
    for one, other in zip(index.search(asked, K), same.search(asked.float(), K)):
        assert (one == other).all()


@pytest.mark.parametrize("dim, beam", [(929, 16), (1536, 4), (4096, 4), (8100, 3)])
def test_vectors_of_several_blocks_are_found_by_host_and_gpu_alike(on_gpu, cuda, dim, beam):
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(dim)
    given = random.normal(size=(60, dim)).astype(np.float32)
    asked = (given[:5] + random.normal(size=(5, dim)) / 4).astype(np.float32)
    index = nvme_gpu.build_index(on_gpu.store, given, sub_dim=16)
    node = -(-(dim + 96) * 4 // 4096) * 4096
    assert index.nbytes >= 60 * node
    by_cpu = index.search(asked, K, beam=beam)
    apart = ((asked[:, None].astype(np.float64) - given[None].astype(np.float64)) ** 2).sum(-1)
    assert recall(by_cpu, -apart, K) >= 0.98
    by_gpu = index.search(cuda(torch.from_numpy(asked)), K, beam=beam, check="now")
    for one, other in zip(by_gpu, by_cpu):
        assert (one.cpu().numpy() == other).all()
    if dim == 8100:
        # Four nodes of 36 KiB are more than a warp has room for: refused, not read over its neighbour's.
        with pytest.raises(nvme_gpu.Usage, match="room for 3 rows of 36864 bytes at a time, and 4 are asked for"):
            index.search(cuda(torch.from_numpy(asked)), K, check="now")
