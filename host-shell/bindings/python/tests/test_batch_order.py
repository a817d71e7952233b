"""The order of batches as properties: whatever is left, saved, loaded or begun again, each epoch has the order that the
sampler gave for it, and each batch once."""

from __future__ import annotations

import json

import pytest

import nvme_gpu
from conftest import SIM, rows_of

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings, strategies as st  # noqa: E402
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler  # noqa: E402

MOST_ROWS, EPOCHS = 60, 4
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
# No deadline: other processes may have the processor.
PROPERTY = settings(max_examples=60, deadline=None, database=None, suppress_health_check=CHECKS, derandomize=True)


@pytest.fixture(scope="module")
def store():
    with nvme_gpu.open(SIM) as opened:
        rows_of(opened, MOST_ROWS, 1)
        yield opened


def _samplers(kind, rows, seed, rank, world):
    """A sampler, made anew, and the orders of its epochs as torch's DataLoader would see them."""
    generator = lambda: torch.Generator().manual_seed(seed)  # noqa: E731
    make = {
        "sequential": lambda: SequentialSampler(range(rows)),
        "random": lambda: RandomSampler(range(rows), generator=generator()),
        "replaced": lambda: RandomSampler(range(rows), replacement=True, num_samples=rows + 3, generator=generator()),
        "subset": lambda: SubsetRandomSampler(range(0, rows, 2), generator=generator()),
        "distributed": lambda: DistributedSampler(range(rows), world, rank, shuffle=True, seed=seed),
    }[kind]
    reference = make()
    orders = []
    for epoch in range(EPOCHS + 1):
        if hasattr(reference, "set_epoch"):
            reference.set_epoch(epoch)
        orders.append([int(one) for one in reference])
    return make, orders


def _batches(order, size, drop_last):
    found = [order[at : at + size] for at in range(0, len(order), size)]
    return [one for one in found if len(one) == size or not drop_last]


def _follow(loader, make, steps, wanted):
    """Takes batches in loops that are left, with saved states in between; they are those of ``wanted``, one by one."""
    taken = []
    for count, reloads in steps:
        if reloads:
            state = json.loads(json.dumps(loader.state_dict()))
            loader = make()
            loader.load_state_dict(state)
        left = count
        while left and len(taken) < len(wanted):
            # Each loop may be left anywhere: at an epoch's last batch, too.
            for rows in loader:
                taken.append([row[0] // 1000 for row in rows.tolist()])
                left -= 1
                if not left or len(taken) == len(wanted):
                    break
            assert taken == wanted[: len(taken)]
    assert taken == wanted[: len(taken)]


STEPS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8)


@PROPERTY
@given(
    kind=st.sampled_from(["sequential", "random", "replaced", "subset", "distributed"]),
    rows=st.integers(1, MOST_ROWS),
    size=st.integers(1, 20),
    drop_last=st.booleans(),
    depth=st.integers(0, 4),
    seed=st.integers(0, 1000),
    world=st.integers(1, 3),
    steps=STEPS,
)
def test_a_sampler_gives_each_epoch_its_order(store, kind, rows, size, drop_last, depth, seed, world, steps):
    sampler, orders = _samplers(kind, rows, seed, world - 1, world)
    wanted = [batch for order in orders[:EPOCHS] for batch in _batches(order, size, drop_last)]
    table = store.table(0, shape=(rows, 1), dtype="int32")

    def make():
        return nvme_gpu.DataLoader(table, size, sampler=sampler(), drop_last=drop_last, prefetch_depth=depth)

    if not wanted:
        assert list(make()) == []
        return
    _follow(make(), make, steps, wanted)


@PROPERTY
@given(
    rows=st.integers(1, MOST_ROWS),
    size=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    pad=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    world=st.integers(1, 5),
    steps=STEPS,
)
def test_own_orders_share_out_each_epoch(store, rows, size, shuffle, drop_last, pad, seed, world, steps):
    table = store.table(0, shape=(rows, 1), dtype="int32")

    def make(rank, batch=size, drops=drop_last):
        options = {"shuffle": shuffle, "seed": seed, "rank": rank, "world": world, "pad": pad, "drop_last": drops}
        return nvme_gpu.DataLoader(table, batch, **options)

    epochs = []
    for epoch in range(EPOCHS):
        shares = []
        for rank in range(world):
            loader = make(rank, MOST_ROWS, False)
            loader.set_epoch(epoch)
            shares.append([row[0] // 1000 for batch in loader for row in batch.tolist()])
        each = -(-rows // world) if pad else rows // world
        assert [len(share) for share in shares] == [each] * world
        # Position by position over the ranks: as DistributedSampler shares out, with rows of the begin at the end.
        dealt = [share[at] for at in range(each) for share in shares]
        if shuffle:
            assert sorted(dealt[:rows]) == sorted(set(dealt[:rows])), "a row twice before all came"
        else:
            assert dealt == [at % rows for at in range(each * world)]
        if pad:
            assert sorted(dealt[:rows]) == list(range(rows)) and dealt[rows:] == dealt[: each * world - rows]
        epochs.append(shares[0])
    wanted = [batch for order in epochs for batch in _batches(order, size, drop_last)]
    if wanted:
        _follow(make(0), lambda: make(0), steps, wanted)


def test_a_state_in_another_order_is_refused(store):
    table = store.table(0, shape=(MOST_ROWS, 1), dtype="int32")
    new = lambda sampler: nvme_gpu.DataLoader(table, 7, sampler=sampler)  # noqa: E731
    seeded = lambda seed: RandomSampler(range(MOST_ROWS), generator=torch.Generator().manual_seed(seed))  # noqa: E731
    first = new(seeded(1))
    states = [first.state_dict()]
    for _ in range(2):
        for _ in first:
            states.append(first.state_dict())
    for state in states[1:]:
        with pytest.raises(nvme_gpu.Usage, match="another order"):
            new(seeded(2)).load_state_dict(state)
        # A sampler without a generator of its own cannot give the same again.
        with pytest.raises(nvme_gpu.Usage, match="another order"):
            new(RandomSampler(range(MOST_ROWS))).load_state_dict(state)
    # What was asked more often cannot go back; its own last epoch it has.
    with pytest.raises(nvme_gpu.Usage, match="new sampler"):
        first.load_state_dict(states[1])
    first.load_state_dict(states[-2])
    rest = [row[0] // 1000 for batch in first for row in batch.tolist()]
    reference = seeded(1)
    orders = [list(reference), list(reference)]
    assert rest == orders[1][-len(rest) :] and len(rest) == MOST_ROWS % 7
    other = DistributedSampler(range(MOST_ROWS), 1, 0, seed=3)
    of_epochs = new(DistributedSampler(range(MOST_ROWS), 1, 0, seed=4))
    next(iter(of_epochs))
    with pytest.raises(nvme_gpu.Usage, match="another order"):
        new(other).load_state_dict(of_epochs.state_dict())


def test_behind_the_last_batch_the_next_epoch_comes(store):
    table = store.table(0, shape=(10, 1), dtype="int32")
    loader = nvme_gpu.DataLoader(table, 5, shuffle=True, seed=1)
    epochs = [[rows.tolist() for rows in loader] for _ in range(2)]
    again = nvme_gpu.DataLoader(table, 5, shuffle=True, seed=1)
    for number, _ in enumerate(again):
        if number == 1:
            break
    assert (again.epoch, again.state_dict()["batch"]) == (1, 0)
    assert [rows.tolist() for rows in again] == epochs[1] and again.epoch == 2
    # A state as it was written before: all batches of epoch 0.
    third = nvme_gpu.DataLoader(table, 5, shuffle=True, seed=1)
    third.load_state_dict({**third.state_dict(), "batch": 2})
    assert [rows.tolist() for rows in third] == epochs[1]
    with pytest.raises(nvme_gpu.Usage, match="batch 3 of an epoch of 2"):
        third.load_state_dict({**third.state_dict(), "epoch": 0, "batch": 3})


def test_two_iterators_at_a_time_are_refused(store):
    table = store.table(0, shape=(20, 1), dtype="int32")
    loader = nvme_gpu.DataLoader(table, 5)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second)[0].tolist() == [5000]
    with pytest.raises(nvme_gpu.Usage, match="one iterator at a time"):
        next(first)
    loader.set_epoch(3)
    with pytest.raises(nvme_gpu.Usage, match="another epoch"):
        next(second)


@pytest.mark.parametrize("wrong", [1.5, "3", None, True, [1, 2]])
def test_rows_of_a_sampler_are_whole_numbers(store, wrong):
    table = store.table(0, shape=(20, 1), dtype="int32")
    with pytest.raises(TypeError):
        next(iter(nvme_gpu.DataLoader(table, 5, sampler=[1, wrong])))
