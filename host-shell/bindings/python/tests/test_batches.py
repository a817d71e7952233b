"""Batches of rows: their order, shares, states and faults."""

from __future__ import annotations

import gc
import pickle

import pytest

import nvme_gpu
from conftest import SIM, python, rows_of

ROWS, WIDTH = 103, 5


@pytest.fixture
def table(store):
    return rows_of(store, ROWS, WIDTH, 77)


def numbers(batches):
    """The row numbers of batches, whose rows are checked."""
    found = []
    for batch in batches:
        for row in batch.tolist():
            assert row == [row[0] + column for column in range(WIDTH)]
            found.append(row[0] // 1000)
    return found


def test_an_epoch_has_each_row_once(table):
    loader = nvme_gpu.DataLoader(table, 10)
    assert len(loader) == 11 and "11 batches" in repr(loader)
    batches = list(loader)
    assert tuple(batches[0].shape) == (10, WIDTH) and tuple(batches[-1].shape) == (3, WIDTH)
    assert numbers(batches) == list(range(ROWS)) and loader.epoch == 1
    assert len(list(nvme_gpu.DataLoader(table, 10, drop_last=True))) == 10
    for depth in (0, 1, 50):
        assert numbers(nvme_gpu.DataLoader(table, 7, prefetch_depth=depth)) == list(range(ROWS))
    assert next(iter(nvme_gpu.DataLoader(table, 2, with_ids=True)))[0] == [0, 1]


def test_a_shuffle_is_the_same_each_time_and_another_in_each_epoch(table):
    loader = nvme_gpu.DataLoader(table, 10, shuffle=True, seed=7)
    epochs = [numbers(loader) for _ in range(3)]
    assert epochs == [numbers(one) for one in [nvme_gpu.DataLoader(table, 10, shuffle=True, seed=7)] for _ in range(3)]
    assert all(sorted(one) == list(range(ROWS)) for one in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert numbers(nvme_gpu.DataLoader(table, 10, shuffle=True, seed=8)) != epochs[0]
    loader.set_epoch(1)
    assert numbers(loader) == epochs[1]


def test_processes_share_rows_as_torch_does(table):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DistributedSampler

    for world in (1, 2, 3, 8):
        for pad in (True, False):
            for rank in range(world):
                theirs = DistributedSampler(range(ROWS), world, rank, shuffle=False, drop_last=not pad)
                ours = nvme_gpu.DataLoader(table, 10, rank=rank, world=world, pad=pad)
                assert numbers(ours) == list(theirs), (world, pad, rank)
    # torch's own permutation, by its sampler.
    theirs = DistributedSampler(range(ROWS), 2, 1, shuffle=True, seed=3)
    ours = nvme_gpu.DataLoader(table, 10, sampler=theirs)
    for epoch in range(2):
        found = numbers(ours)
        theirs.set_epoch(epoch)
        assert found == list(theirs) and len(ours) == 6
    generator = torch.Generator().manual_seed(5)
    plain = torch.utils.data.RandomSampler(range(ROWS), generator=generator)
    assert sorted(numbers(nvme_gpu.DataLoader(table, 10, sampler=plain, drop_last=True))) != list(range(ROWS))


def test_a_state_goes_on_in_another_loader(table):
    new = lambda: nvme_gpu.DataLoader(table, 10, shuffle=True, seed=1, rank=1, world=2)  # noqa: E731
    whole = [numbers([batch]) for loader in [new()] for _ in range(2) for batch in loader]
    first = new()
    seen, states = [], [first.state_dict()]
    for _ in range(2):
        for batch in first:
            seen.append(numbers([batch]))
            states.append(first.state_dict())
    assert seen == whole and states[0]["epoch"] == 0
    for given, state in enumerate(states):
        second = new()
        second.load_state_dict(state)
        rest = []
        while second.epoch < 2:
            rest += [numbers([batch]) for batch in second]
        assert rest == whole[given:], given
    # A loop that was left early continues, too.
    third = new()
    for batch in third:
        break
    assert [numbers([one]) for one in third] == whole[1:6]
    for wrong in ({}, None, {**states[0], "seed": 2}, {**states[0], "batch": -1}, {**states[0], "version": 2}):
        with pytest.raises(nvme_gpu.Usage):
            third.load_state_dict(wrong)


def test_a_state_that_no_loader_wrote_is_refused_by_name(table):
    new = lambda **more: nvme_gpu.DataLoader(table, 10, **more)  # noqa: E731
    by_rows, by_sampler = new(seed=1), new(sampler=iter_of_rows())
    next(iter(by_rows))
    next(iter(by_sampler))
    odd = (None, "1", b"1", 1.0, float("nan"), float("inf"), [], {}, -1, -(1 << 70), 1 << 70, 10**5000, table)
    for state, names in (
        (by_rows.state_dict(), ("version", "epoch", "batch", "rows", "batch_size", "shuffle", "seed", "world", "pad")),
        (by_sampler.state_dict(), ("sampler_asked", "sampler_begun", "sampler_digest", "has_sampler")),
    ):
        for name in names:
            for value in (*odd, True, False, 1, 1 << 40):
                if value == state[name] and type(value) is type(state[name]):
                    continue
                loader = new(seed=1) if name in by_rows.state_dict() else new(sampler=iter_of_rows())
                if name == "epoch" and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
                    loader.load_state_dict({**state, name: value})
                    continue
                if name == "batch" and value in (0, 1) and not isinstance(value, (bool, float)):
                    continue
                with pytest.raises((nvme_gpu.Usage, TypeError)) as caught:
                    loader.load_state_dict({**state, name: value})
                    pytest.fail(f"{name}={value!r:.50} was taken")
                assert len(str(caught.value)) < 3000 and str(caught.value), (name, value)


def iter_of_rows():
    class Rows:
        def __iter__(self):
            return iter(range(ROWS))

        def __len__(self):
            return ROWS

    return Rows()


def test_an_epoch_that_is_set_begins_at_its_first_batch(table):
    whole = nvme_gpu.DataLoader(table, 7, shuffle=True, seed=3, with_ids=True)
    whole.set_epoch(5)
    expected = [ids for ids, _ in whole]
    loader = nvme_gpu.DataLoader(table, 7, shuffle=True, seed=3, with_ids=True)
    some = iter(loader)
    for _ in range(2):
        next(some)
    loader.set_epoch(5)
    assert loader.state_dict()["batch"] == 0
    assert [ids for ids, _ in loader] == expected


def test_a_batch_that_fails_raises_in_its_turn_and_comes_when_asked_again():
    with nvme_gpu.open(f"{SIM}&block=4096&fault=status:0x281@op=read,nth=5") as store:
        table = rows_of(store, 64, 1024)
        loader = nvme_gpu.DataLoader(table, 4, prefetch_depth=3)
        seen, failed = [], 0
        while loader.epoch == 0:
            try:
                for batch in loader:
                    seen += [row[0] // 1000 for row in batch.tolist()]
            except nvme_gpu.Status as error:
                assert error.row is not None and loader.state_dict()["batch"] == len(seen) // 4
                failed += 1
        assert seen == list(range(64)) and failed <= 1


def test_a_closed_store_ends_it(table):
    loader = nvme_gpu.DataLoader(table, 10)
    batches = iter(loader)
    numbers([next(batches)])
    table.store.close()
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        for _ in batches:
            pass
    del batches
    gc.collect()


def test_what_cannot_be_is_refused(table):
    for wrong in (
        {"batch_size": 0},
        {"rank": 1},
        {"rank": -1},
        {"world": 0},
        {"prefetch_depth": -1},
        {"streams": 0},
        {"staging": "disk"},
        {"device": "cuda"},
        {"device": "tpu"},
        {"seed": -1},
        {"sampler": range(5), "shuffle": True},
    ):
        with pytest.raises(nvme_gpu.Usage):
            nvme_gpu.DataLoader(table, **{"batch_size": 4, **wrong})
    with pytest.raises(TypeError):
        nvme_gpu.DataLoader([1], 4)
    loader = nvme_gpu.DataLoader(table, 4, sampler=[5, ROWS], device="cpu")
    with pytest.raises(nvme_gpu.Usage):
        list(loader)
    with pytest.raises(nvme_gpu.Usage):
        pickle.dumps(loader)


def test_batches_without_torch_are_arrays():
    text = """
        import nvme_gpu
        with nvme_gpu.open("sim:mem?size=16MiB") as store:
            table = store.table(0, shape=(10, 4), dtype="int32")
            for rows in nvme_gpu.DataLoader(table, 4, shuffle=True):
                print(type(rows).__module__, tuple(rows.shape))
    """
    assert python(text).stdout.count("numpy") == 3


def test_a_batch_of_more_rows_than_memory_holds_is_an_error():
    rows = 1 << 44
    with nvme_gpu.open("sim:mem?size=1MiB") as store:
        table = store.table(0, shape=(10, 4), dtype="int32")
        loader = nvme_gpu.DataLoader(table, 4)
        for batch in (rows, (1 << 63) - 1):
            loader._own = nvme_gpu._native.Sampler((1 << 63) - 1, batch, 7, 0, 1, False, False)
            with pytest.raises(MemoryError):
                next(iter(loader))
