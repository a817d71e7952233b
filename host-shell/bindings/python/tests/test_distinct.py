"""Gathers of many rows on a GPU, of which each distinct one is read once: their bits equal torch's ``table[ids]``."""

from __future__ import annotations

import pytest

import nvme_gpu
from conftest import SIM_GPU, stand_in

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
from test_scales import e4m3  # noqa: E402
from torch_on_stand_in import Cuda  # noqa: E402


ROWS, COUNT = 3000, 4096 + 100
"""A gather of as many rows looks for ids that come again."""
DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@pytest.fixture
def cuda(monkeypatch):
    assert stand_in(), "needs the stand-in of CUDA"
    return Cuda(monkeypatch)


def stored(dtype, width, seed=0):
    bits = torch.randint(0, 256, (ROWS, width * torch.empty(0, dtype=dtype).element_size()), generator=seeded(seed))
    return bits.to(torch.uint8).view(dtype)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def patterns():
    some = torch.randint(0, 500, (COUNT,), generator=seeded(1))
    outside = some.clone()
    outside[::97] = -1
    outside[::89] = ROWS
    outside[:4] = torch.tensor([-1, 1 << 40, -(1 << 63), ROWS])
    return {
        "many": some,
        "all": torch.full((COUNT,), ROWS - 1),
        "none": torch.randperm(2 * ROWS, generator=seeded(2))[:COUNT] % ROWS,
        "outside": outside,
    }


def expected(rows, ids, failed=0):
    inside = (ids >= 0) & (ids < ROWS)
    wanted = rows[ids.clamp(0, ROWS - 1)]
    wanted[~inside] = failed
    return wanted, torch.where(inside, 0, -1).int()


def same(found, wanted):
    found = found.cpu()
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    # NaN in the same places, and the same bits elsewhere.
    nans = wanted.isnan()
    assert torch.equal(found.isnan(), nans)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    assert ((found.contiguous().view(bits) == wanted.contiguous().view(bits)) | nans).all()


def distinct(ids):
    return len(set(ids.tolist()) & set(range(ROWS)))


@pytest.mark.parametrize("name", DTYPES)
def test_rows_of_each_dtype_equal_those_of_torch(cuda, name):
    dtype = getattr(torch, name)
    rows = stored(dtype, 6)
    with nvme_gpu.open(SIM_GPU, gpu=0) as store:
        store.write(rows.view(torch.uint8).reshape(-1).numpy(), 8)
        table = store.table(8, shape=(ROWS, 6), dtype=name, on_error="zero")
        for ids in patterns().values():
            before, status = store.stats(), cuda(torch.full((COUNT,), 9, dtype=torch.int32))
            found = table.gather(cuda(ids), status=status)
            table.check()
            wanted, codes = expected(rows, ids)
            same(found, wanted)
            assert torch.equal(status.cpu(), codes)
            after = store.stats()
            assert after["failed_rows"] - before["failed_rows"] == int((codes != 0).sum())
            assert after["unique_asked"] - before["unique_asked"] == COUNT
            assert after["unique_read"] - before["unique_read"] == distinct(ids)
            assert after["rows_read"] - before["rows_read"] == COUNT


@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float16", "scaled"])
def test_converted_rows_equal_those_of_torch(cuda, kind, to):
    rows = stored(torch.uint8, 64)
    words = {"dtype": "float8_e4m3fn" if kind == "scaled" else kind}
    wide = rows.view(torch.float16).float() if kind == "float16" else torch.from_numpy(e4m3()[rows.numpy()])
    with nvme_gpu.open(SIM_GPU, gpu=0) as store:
        store.write(rows.reshape(-1).numpy(), 3)
        if kind == "scaled":
            powers = torch.randint(110, 136, (ROWS, 2), dtype=torch.uint8, generator=seeded(3))
            wide = wide * torch.exp2(powers.float() - 127).repeat_interleave(32, dim=1)
            words["scales"] = cuda(powers)
        table = store.table(3, shape=tuple(wide.shape), to=to, on_error="zero", **words)
        for ids in patterns().values():
            wanted, _ = expected(wide.to(getattr(torch, to)), ids)
            same(table.gather(cuda(ids)), wanted)


def test_tables_in_several_ranges(cuda):
    rows = stored(torch.int32, 10)
    data = rows.view(torch.uint8).reshape(-1).numpy()
    with nvme_gpu.open(SIM_GPU, gpu=0) as store:
        # Three ranges, in which a row lies over two.
        ranges = [(1 << 20, 20_004), (40, 40_000), (2 << 20, len(data) - 60_004)]
        at = 0
        for first, nbytes in ranges:
            store.write(data[at : at + nbytes], first)
            at += nbytes
        result = nvme_gpu._scales.RowConversion(on_error="zero")
        table = nvme_gpu.Table(store, 0, (ROWS, 10), "int32", result, ranges)
        for ids in patterns().values():
            status = cuda(torch.full((COUNT,), 9, dtype=torch.int32))
            found = table.gather(cuda(ids.to(torch.int64)), status=status)
            wanted, codes = expected(rows, ids)
            same(found, wanted)
            assert torch.equal(status.cpu(), codes)
        assert store.stats()["unique_asked"] == 4 * COUNT


@pytest.mark.parametrize("on_error", ["raise", "zero", "nan"])
def test_a_block_that_fails_fails_each_position_of_its_rows(cuda, on_error):
    rows = stored(torch.float32, 128)
    # No two rows are neighbours, so that each is read by one command.
    ids = patterns()["outside"]
    ids = torch.where((ids >= 0) & (ids < ROWS), ids * 3, ids)
    with nvme_gpu.open(SIM_GPU + "&block=512&fault=status:0x281@op=read,nth=30", gpu=0) as store:
        store.write(rows.view(torch.uint8).reshape(-1).numpy())
        table = store.table(0, shape=(ROWS, 128), dtype="float32", on_error=on_error)
        status, out = cuda(torch.full((COUNT,), 9, dtype=torch.int32)), cuda(torch.full((COUNT, 128), 5.0))
        if on_error == "raise":
            with pytest.raises(nvme_gpu.NvmeGpuError) as caught:
                table.gather(cuda(ids), out=out, status=status, check="now")
            assert caught.value.row == 0
        else:
            table.gather(cuda(ids), out=out, status=status, check="now")
        wanted, codes = expected(rows, ids, float("nan") if on_error == "nan" else 0)
        failed = status.cpu() == 0x281
        broken = set(ids[failed].tolist())
        assert len(broken) == 1 and failed.sum() > 1
        assert torch.equal(failed, torch.isin(ids, torch.tensor(list(broken))))
        codes[failed], wanted[failed] = 0x281, float("nan") if on_error == "nan" else 0
        same(out, wanted)
        assert torch.equal(status.cpu(), codes)
        assert store.stats()["failed_rows"] == int((codes != 0).sum())
