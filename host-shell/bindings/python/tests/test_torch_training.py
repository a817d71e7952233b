"""DiskEmbedding beside nn.Embedding(sparse=True): the same training, by all that acts on gradients."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap

import pytest

import nvme_gpu

torch = pytest.importorskip("torch")
import nvme_gpu.torch  # noqa: E402
from nvme_gpu.torch import DiskAdagrad, DiskEmbedding, DiskSGD, clip_grad_norm_  # noqa: E402

ROWS, WIDTH, RATE = 30, 4, 0.05


class Model(torch.nn.Module):
    """An embedding and a layer over it."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.head = torch.nn.Linear(WIDTH, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.arange(8.0).reshape(2, 4) / 8 - 0.4)
            self.head.bias.zero_()

    def forward(self, ids):
        return self.head(self.rows(ids))


class Training:
    """A model, its optimizers and its batches, the same for both embeddings."""

    def __init__(self, rows, of_rows):
        self.model = Model(rows)
        self.optimizers = [of_rows(rows.parameters()), torch.optim.SGD(self.model.head.parameters(), lr=RATE)]

    def loss(self, step):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, ROWS, (3, 5), generator=generator)
        return (self.model(ids) - 1).pow(2).sum()

    def zero(self):
        for one in self.optimizers:
            one.zero_grad()

    def step(self):
        for one in self.optimizers:
            one.step()


class Scaler:
    """What torch.amp.GradScaler does, which torch before 2.3 has for CUDA alone."""

    def __init__(self, scale=2.0**12):
        self._scale, self._found, self._unscaled = scale, {}, set()

    def scale(self, loss):
        return loss * self._scale

    def unscale_(self, optimizer):
        if id(optimizer) in self._unscaled:
            return
        bad = False
        for group in optimizer.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    values = one.grad._values() if one.grad.is_sparse else one.grad
                    bad |= not bool(torch.isfinite(values).all())
                    values.mul_(1 / self._scale)
        self._unscaled.add(id(optimizer))
        self._found[id(optimizer)] = bad

    def step(self, optimizer):
        self.unscale_(optimizer)
        if not self._found[id(optimizer)]:
            optimizer.step()

    def update(self):
        if any(self._found.values()):
            self._scale /= 2
        self._found, self._unscaled = {}, set()


def scalers():
    found = [Scaler]
    amp = getattr(torch, "amp", None)
    if hasattr(amp, "GradScaler"):
        found.append(lambda: amp.GradScaler("cpu", init_scale=2.0**12))
    return found


@pytest.fixture
def pair(store):
    """Trainings with rows on a drive and in memory."""
    torch.manual_seed(1)
    values = torch.randn(ROWS, WIDTH)
    store.write_from(values, 96).result()
    table = store.table(96, shape=(ROWS, WIDTH), dtype="float32")
    dense = torch.nn.Embedding(ROWS, WIDTH, sparse=True, _weight=values.clone())
    return Training(DiskEmbedding(table), lambda p: DiskSGD(p, lr=RATE)), Training(dense, lambda p: torch.optim.SGD(p, lr=RATE))


def rows_of(training):
    rows = training.model.rows
    if isinstance(rows, DiskEmbedding):
        return rows.table[torch.arange(ROWS)]
    return rows.weight.detach()


def same(pair):
    disk, dense = pair
    torch.testing.assert_close(rows_of(disk), rows_of(dense), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(disk.model.head.weight, dense.model.head.weight, rtol=1e-5, atol=1e-6)


def test_plain_steps(pair):
    for training in pair:
        for step in range(10):
            training.zero()
            training.loss(step).backward()
            training.step()
    same(pair)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_accumulated(pair, to_none):
    for training in pair:
        for step in range(12):
            (training.loss(step) / 3).backward()
            if step % 3 == 2:
                training.step()
                for one in training.optimizers:
                    one.zero_grad(set_to_none=to_none)
    same(pair)


@pytest.mark.parametrize("kind", range(len(scalers())))
def test_a_scaler_unscales_and_skips(pair, kind):
    before = [rows_of(training).clone() for training in pair]
    for training in pair:
        scaler = scalers()[kind]()
        for step in range(8):
            training.zero()
            loss = training.loss(step)
            if step in (0, 4):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            for one in training.optimizers:
                scaler.step(one)
            scaler.update()
            if step == 0:
                assert torch.equal(rows_of(training), before[0]), "a step that the scaler skips"
    same(pair)


@pytest.mark.parametrize("kind", range(len(scalers())))
def test_gradients_are_clipped_behind_a_scaler(pair, kind):
    norms = []
    for training in pair:
        scaler = scalers()[kind]()
        for step in range(6):
            training.zero()
            scaler.scale(training.loss(step)).backward()
            for one in training.optimizers:
                scaler.unscale_(one)
            norms.append(clip_grad_norm_(training.model.parameters(), 0.5).item())
            for one in training.optimizers:
                scaler.step(one)
            scaler.update()
    assert norms[:6] == pytest.approx(norms[6:], rel=1e-4) and min(norms) > 0.5
    same(pair)


def test_the_norm_is_that_of_torch():
    torch.manual_seed(2)
    ours, theirs = (torch.nn.Parameter(torch.zeros(7, 3)) for _ in range(2))
    for kind in (1.0, 2.0, float("inf")):
        grad = torch.randn(7, 3)
        ours.grad, theirs.grad = grad.to_sparse(1), grad.clone()
        found = clip_grad_norm_([ours], 0.25, kind)
        assert found.item() == pytest.approx(torch.nn.utils.clip_grad_norm_([theirs], 0.25, kind).item(), rel=1e-5)
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad, rtol=1e-4, atol=1e-6)
    assert clip_grad_norm_(torch.nn.Parameter(torch.zeros(2)), 1.0).item() == 0
    for wrong in (-1.0, float("nan"), float("inf"), True):
        with pytest.raises(nvme_gpu.Usage, match="max_norm"):
            clip_grad_norm_([ours], wrong)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kind", [DiskSGD, DiskAdagrad])
def test_what_is_not_finite_never_reaches_the_drive(pair, value, kind):
    rows = pair[0].model.rows
    optimizer = kind(rows.parameters(), lr=0.5)
    before = rows_of(pair[0]).clone()
    weight = torch.ones(3, WIDTH)
    weight[1, 2] = value
    (rows(torch.tensor([3, 8, 5])) * weight).sum().backward()
    with pytest.raises(nvme_gpu.Usage, match="row 8.*not finite"):
        optimizer.step()
    assert torch.equal(rows_of(pair[0]), before), "rows 3 and 5 are as they were, too"
    # Nor what becomes infinite by the rate, or in the dtype of the table.
    rows.weight.grad = None
    (rows(torch.tensor([3])) * 1e30).sum().backward()
    huge = DiskSGD(rows.parameters(), lr=1e30)
    with pytest.raises(nvme_gpu.Usage, match="row 3.*not finite"):
        huge.step()
    assert torch.equal(rows_of(pair[0]), before)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_gradient_of_one_group_that_is_not_finite_keeps_all_groups_from_the_drive(store, wrong):
    modules = []
    for number in range(2):
        table = store.table(number * 4096, shape=(10, 4), dtype="float32")
        table.scatter(torch.arange(10), torch.ones(10, 4))
        modules.append(DiskEmbedding(table))
    groups = [{"params": list(one.parameters())} for one in modules]
    optimizer = DiskSGD(groups, lr=0.5)
    for number, one in enumerate(modules):
        one(torch.tensor([2])).sum().mul(float("inf") if number == wrong else 1.0).backward()
    with pytest.raises(nvme_gpu.Usage, match="not finite"):
        optimizer.step()
    for one in modules:
        assert torch.equal(one.table[torch.arange(10)], torch.ones(10, 4))


def test_changes_that_overflow_a_half_are_refused(store):
    table = store.table(0, shape=(10, 4), dtype="float16")
    table.scatter(torch.arange(10), torch.zeros(10, 4, dtype=torch.float16))
    disk = DiskEmbedding(table).float()
    (disk(torch.tensor([2])) * 1e6).sum().backward()
    with pytest.raises(nvme_gpu.Usage, match="row 2.*not finite"):
        DiskSGD(disk.parameters(), lr=1.0).step()
    assert not table[torch.arange(10)].any()


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("padding", [7, -3])
def test_padding_gets_no_gradient_whatever_it_is(store, value, padding):
    values = torch.randn(ROWS, WIDTH)
    store.write_from(values).result()
    table = store.table(0, shape=(ROWS, WIDTH), dtype="float32")
    disk = DiskEmbedding(table, padding_idx=padding)
    dense = torch.nn.Embedding(ROWS, WIDTH, padding_idx=padding, sparse=True, _weight=values.clone())
    assert disk.padding_idx == dense.padding_idx
    for rows, optimizer in ((disk, DiskSGD(disk.parameters(), lr=1.0)), (dense, torch.optim.SGD(dense.parameters(), lr=1.0))):
        weight = torch.ones(3, WIDTH)
        weight[1] = value
        (rows(torch.tensor([3, disk.padding_idx, 5])) * weight).sum().backward()
        optimizer.step()
    torch.testing.assert_close(table[torch.arange(ROWS)], dense.weight.detach())


def test_frozen_rows_stay(pair):
    for freeze in (lambda one: one.weight.requires_grad_(False), lambda one: one.requires_grad_(False)):
        for training in pair:
            freeze(training.model.rows)
            before = rows_of(training).clone()
            training.zero()
            training.loss(1).backward()
            training.step()
            assert torch.equal(rows_of(training), before) and training.model.rows.weight.grad is None
            assert not training.model.rows(torch.tensor([1])).requires_grad
            training.model.rows.requires_grad_(True)
    same(pair)
    with torch.no_grad():
        assert not pair[0].model.rows(torch.tensor([1])).requires_grad
    assert pair[0].model.eval().rows(torch.tensor([1])).requires_grad, "as that of nn.Embedding"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_another_dtype_is_that_of_what_comes_out(pair, kind):
    disk, dense = (training.model.rows.to(kind) for training in pair)
    ids = torch.tensor([1, 2, 2])
    assert disk(ids).dtype == kind and torch.equal(disk(ids), dense(ids))
    for rows in (disk, dense):
        (rows(ids) * torch.tensor([[1], [2], [3]], dtype=kind)).sum().backward()
    assert disk.weight.grad.dtype == kind
    assert torch.equal(disk.weight.grad.coalesce().values().float(), dense.weight.grad.coalesce().values().float())
    before = rows_of(pair[0]).clone()
    pair[0].optimizers[0].step()
    found = rows_of(pair[0])
    assert found.dtype == torch.float32, "the table keeps its own"
    torch.testing.assert_close(found[2], before[2] - 5 * RATE)
    if kind is torch.float16 and hasattr(getattr(torch, "amp", None), "GradScaler"):
        scaler = torch.amp.GradScaler("cpu")
        disk.weight.grad = None
        scaler.scale(disk(ids).sum()).backward()
        with pytest.raises(ValueError, match="FP16"):
            scaler.unscale_(pair[0].optimizers[0])


def test_row_wise_adagrad_has_a_sum_for_each_row_and_saves_it(store):
    table = store.table(0, shape=(20, 4), dtype="float32")
    table.scatter(torch.arange(20), torch.zeros(20, 4))
    disk = DiskEmbedding(table)
    optimizer = DiskAdagrad(disk.parameters(), lr=0.5)
    (disk(torch.tensor([3, 3, 7]))).sum().backward()
    optimizer.step()
    # The step of Adagrad: the sum of a row's gradients over the root of its square.
    assert table[torch.tensor([3, 7, 4])].tolist() == [[-0.5] * 4, [-0.5] * 4, [0.0] * 4]
    sums = optimizer.state[disk.weight]["sums"]
    assert sums.tolist() == [0, 0, 0, 4, 0, 0, 0, 1] + [0] * 12
    again = DiskAdagrad(disk.parameters(), lr=0.5)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(again.state[disk.weight]["sums"], sums)
    assert not disk.state_dict()


def test_eps_is_added_to_the_root_of_the_sums_of_all_steps(store):
    table = store.table(0, shape=(20, 4), dtype="float32")
    table.scatter(torch.arange(20), torch.zeros(20, 4))
    disk = DiskEmbedding(table)
    optimizer = DiskAdagrad(disk.parameters(), lr=0.5, eps=1.0)
    expected = 0.0
    # Gradients of 3, 4 and 12: the root of the sum of their squares is 3, 5 and 13.
    for count, root in ((3, 3.0), (4, 5.0), (12, 13.0)):
        optimizer.zero_grad()
        disk(torch.tensor([3] * count)).sum().backward()
        optimizer.step()
        expected -= 0.5 * count / (root + 1.0)
        torch.testing.assert_close(table[torch.tensor([3])], torch.full((1, 4), expected))


def test_a_scheduler_changes_the_rate(pair):
    for training in pair:
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizers[0], 2, 0.5)
        for step in range(6):
            training.zero()
            training.loss(step).backward()
            training.step()
            scheduler.step()
    same(pair)


def test_optimizers_of_torch_and_averages_are_refused(pair):
    disk = pair[0].model.rows
    disk(torch.tensor([1])).sum().backward()
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SparseAdam):
        with pytest.raises((RuntimeError, ValueError)):
            make(disk.parameters()).step()
    with pytest.raises(NotImplementedError):
        torch.nn.init.normal_(disk.weight)
    with pytest.raises(nvme_gpu.Usage, match="cannot be copied"):
        torch.optim.swa_utils.AveragedModel(pair[0].model)
    with pytest.raises(nvme_gpu.Usage, match="no weight of a DiskEmbedding"):
        DiskSGD(pair[0].model.parameters(), lr=0.1)
    for wrong in (-0.1, float("nan"), float("inf"), True, "0.1", None):
        with pytest.raises(nvme_gpu.Usage, match="lr is"):
            DiskSGD(disk.parameters(), lr=wrong)
        with pytest.raises(nvme_gpu.Usage, match="eps is"):
            DiskAdagrad(disk.parameters(), lr=0.1, eps=wrong)
    # SGD of torch steps in memory: the next use of the rows says that it went nowhere.
    torch.optim.SGD(disk.parameters(), lr=0.1).step()
    for use in (lambda: disk(torch.tensor([1])), pair[0].optimizers[0].step):
        with pytest.raises(nvme_gpu.Usage, match="changed in memory"):
            use()


def test_checkpoints_have_no_rows(pair):
    model = pair[0].model
    saved = model.state_dict()
    assert set(saved) == {"head.weight", "head.bias"}
    model.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="table.scatter"):
        model.load_state_dict(pair[1].model.state_dict())
    with pytest.raises(RuntimeError, match="rows.sums"):
        model.load_state_dict({**saved, "rows.sums": torch.zeros(3)})


def test_an_embedding_that_cannot_be_is_refused(store):
    table = store.table(0, shape=(20, 4), dtype="float32")
    for make in (
        lambda: DiskEmbedding(store.table(0, shape=(20,), dtype="float32")),
        lambda: DiskEmbedding(store.table(0, shape=(20, 4), dtype="int32")),
        lambda: DiskEmbedding(table, padding_idx=20),
        lambda: DiskEmbedding(table, padding_idx=-21),
        lambda: DiskSGD(DiskEmbedding(store.table(0, shape=(20, 4), dtype="float16", to="float32")).parameters()),
        lambda: DiskSGD(DiskEmbedding(table).parameters(), ranks="no"),
    ):
        with pytest.raises(nvme_gpu.Usage):
            make()
    for wrong in (True, 1.0, "sgd"):
        with pytest.raises(TypeError):
            DiskEmbedding(table, padding_idx=wrong)
    with pytest.raises(TypeError):
        DiskEmbedding("table")
    empty = DiskEmbedding(table)
    optimizer = DiskSGD(empty.parameters())
    optimizer.step()
    empty(torch.tensor([], dtype=torch.long)).sum().backward()
    optimizer.step()
    with pytest.raises(nvme_gpu.Usage, match="out of range|Out of Range"):
        empty(torch.tensor([20]))


RANKS = """
    import gc, os, sys, time
    import torch
    import torch.distributed as dist
    import nvme_gpu
    from nvme_gpu.torch import DiskEmbedding, DiskSGD, average_gradients, prepare_for_ddp

    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ROWS, WIDTH = 20, 4

    class Model(torch.nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.rows, self.head = rows, torch.nn.Linear(WIDTH, 2)
            torch.nn.init.constant_(self.head.weight, 0.3)
            torch.nn.init.zeros_(self.head.bias)

        def forward(self, ids):
            return self.head(self.rows(ids))

    values = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH) / 50
    path = f"{folder}/rows{rank}"
    values.numpy().tofile(path)
    dense = torch.nn.Embedding(ROWS, WIDTH, _weight=values.clone())
    with nvme_gpu.open(f"file:{path}") as store:
        table = store.table(0, shape=(ROWS, WIDTH), dtype="float32")
        disk = DiskEmbedding(table)
        try:
            torch.nn.parallel.DistributedDataParallel(Model(disk))
        except RuntimeError as error:
            print("without prepare_for_ddp:", error)
        else:
            raise SystemExit("DDP took rows that it cannot average")
        for rows in (dense, disk):
            model = Model(rows)
            prepare_for_ddp(model)
            parallel = torch.nn.parallel.DistributedDataParallel(model)
            of_rows = torch.optim.SGD(rows.parameters(), lr=0.1) if rows is dense else DiskSGD(rows.parameters(), lr=0.1)
            of_head = torch.optim.SGD(model.head.parameters(), lr=0.1)
            for step in range(4):
                of_rows.zero_grad(), of_head.zero_grad()
                ids = torch.randint(0, ROWS, (6,), generator=torch.Generator().manual_seed(2 * step + rank))
                parallel(ids).pow(2).sum().backward()
                if rows is disk:
                    try:
                        of_rows.step()
                    except nvme_gpu.Usage as error:
                        assert "average_gradients" in error.remedy
                    else:
                        raise SystemExit("a step with the gradients of one rank")
                    average_gradients(model)
                of_rows.step(), of_head.step()
        # One rank alone uses rows.
        ids = torch.tensor([3, 9, 3])
        weight = dense.weight.detach().clone().requires_grad_()
        torch.nn.functional.embedding(ids, weight).pow(2).sum().backward()
        wanted = dense.weight.detach() - 0.1 * weight.grad / 2
        of_rows.zero_grad()
        if rank == 0:
            disk(ids).pow(2).sum().backward()
        average_gradients(disk)
        of_rows.step()
        trained = table[torch.arange(ROWS)]
        torch.testing.assert_close(trained, wanted, rtol=1e-5, atol=1e-6)
        everywhere = [torch.empty(ROWS, WIDTH) for _ in range(2)]
        dist.all_gather(everywhere, trained)
        assert torch.equal(everywhere[0], everywhere[1])
        # Ranks that train rows of their own, and ranks that share a file.
        disk.weight.grad = None
        disk(torch.tensor([rank])).sum().backward()
        DiskSGD(disk.parameters(), lr=1.0, ranks="separate").step()
        torch.testing.assert_close(table[torch.tensor([rank])], trained[rank : rank + 1] - 1)
    dist.barrier()
    for device in (f"file:{folder}/rows0", f"joined:file:{folder}/rows0|file:{folder}/rows1"):
        with nvme_gpu.open(device) as store:
            disk = DiskEmbedding(store.table(0, shape=(ROWS, WIDTH), dtype="float32"))
            disk(torch.tensor([1])).sum().backward()
            try:
                average_gradients(disk)
            except nvme_gpu.Usage as error:
                assert "one file" in error.cause
            else:
                raise SystemExit("two ranks trained one file")
    dist.barrier()
    # gloo ends a barrier with an error where the other rank has left it and is gone: each stays until both are here.
    open(f"{folder}/left{rank}", "w").close()
    while not os.path.exists(f"{folder}/left{1 - rank}"):
        time.sleep(0.01)
    # Ends gloo's threads. One that needs the interpreter while it ends is ended within C++, which aborts the process.
    parallel = model = None
    gc.collect()
    dist.destroy_process_group()
    print("ok")
"""


def test_two_ranks_average_as_ddp_does(tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    program = tmp_path / "ranks.py"
    program.write_text(textwrap.dedent(RANKS))
    run = lambda rank: subprocess.Popen(  # noqa: E731
        [sys.executable, str(program), str(rank), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    both = [run(rank) for rank in range(2)]
    said = [one.communicate(timeout=300)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], "\n".join(said)
    assert all("ok" in text for text in said), said


def test_sums_of_squares_stay_what_they_were(store):
    """torch converts the state of a weight of half precision, where the sums would be rounded or infinite."""
    table = store.table(0, shape=(20, 4), dtype="float32")
    table.scatter(torch.arange(20), torch.zeros(20, 4))
    disk = DiskEmbedding(table).half()
    optimizer = DiskAdagrad(disk.parameters(), lr=0.5)
    sums = torch.linspace(1, 1e9, 20)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"sums": sums}}})
    kept = optimizer.state[disk.weight]["sums"]
    assert kept.dtype is torch.float32 and torch.equal(kept, sums) and kept is not sums
    assert torch.equal(optimizer.state_dict()["state"][0]["sums"], sums)


def test_a_state_that_would_freeze_rows_is_refused_by_name(store):
    table = store.table(0, shape=(20, 4), dtype="float32")
    table.scatter(torch.arange(20), torch.zeros(20, 4))
    disk = DiskEmbedding(table)
    optimizer = DiskAdagrad(disk.parameters(), lr=0.5)
    state = optimizer.state_dict()
    for bad in (float("inf"), float("nan"), -1.0):
        sums = torch.ones(20)
        sums[7] = bad
        with pytest.raises(nvme_gpu.Usage, match="row 7"):
            optimizer.load_state_dict({**state, "state": {0: {"sums": sums}}})
    for sums in (torch.ones(20).half(), torch.ones(19), torch.ones(20).double(), [1.0] * 20):
        with pytest.raises(nvme_gpu.Usage, match="the sums of squares are"):
            optimizer.load_state_dict({**state, "state": {0: {"sums": sums}}})
    with pytest.raises(nvme_gpu.Usage, match="'momentum_buffer'"):
        optimizer.load_state_dict({**state, "state": {0: {"momentum_buffer": torch.ones(20, 4)}}})
    groups = state["param_groups"]
    for wrong in (5, None, [5], [{}], [{"params": 3}], {}, "groups"):
        with pytest.raises(nvme_gpu.Usage, match="no state of an optimizer"):
            optimizer.load_state_dict({"state": {}, "param_groups": wrong})
    for wrong in (5, [], [1], {0: 5}, {0: [1]}):
        with pytest.raises(nvme_gpu.Usage, match="no state of an optimizer"):
            optimizer.load_state_dict({"state": wrong, "param_groups": groups})
    with pytest.raises(nvme_gpu.Usage, match="eps is nan"):
        group = {**state["param_groups"][0], "eps": float("nan")}
        optimizer.load_state_dict({**state, "param_groups": [group]})
    assert not optimizer.state[disk.weight]
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    with pytest.raises(nvme_gpu.Usage, match="which DiskSGD does not know"):
        DiskSGD(disk.parameters()).load_state_dict(other.state_dict())
    # What overflows while it is added up is refused before a row is written.
    (disk(torch.tensor([3])) * 5e18).sum().backward()
    with pytest.raises(nvme_gpu.Usage, match="row 3"):
        for _ in range(20):
            optimizer.step()
    assert torch.isfinite(optimizer.state[disk.weight]["sums"]).all()


@pytest.mark.parametrize("wrong", [-1, 20])
@pytest.mark.parametrize("kind", [DiskSGD, DiskAdagrad])
def test_a_gradient_of_rows_that_are_not_there_changes_nothing(store, kind, wrong):
    rows = torch.arange(80.0).reshape(20, 4)
    table = store.table(0, shape=(20, 4), dtype="float32", on_error="zero")
    table.scatter(torch.arange(20), rows)
    disk = DiskEmbedding(table)
    optimizer = kind(disk.parameters(), lr=0.5)
    disk(torch.tensor([3, wrong])).sum().backward()
    with pytest.raises(nvme_gpu.Usage, match=f"the gradient has row {wrong}, and the table rows from 0 to 19"):
        optimizer.step()
    with pytest.raises(nvme_gpu.Usage, match=f"the gradient has row {wrong}"):
        clip_grad_norm_(disk.parameters(), 1.0)
    assert torch.equal(table[torch.arange(20)], rows) and not optimizer.state.get(disk.weight)


def test_a_rank_that_cannot_look_at_its_file_tells_the_others(tmp_path, monkeypatch):
    from nvme_gpu import _gradients

    path = tmp_path / "rows"
    path.write_bytes(bytes(4096))
    sent = []

    def gather(into, mine, group=None):
        sent.append(mine)
        into[:] = [[], mine]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with nvme_gpu.open(f"file:{path}") as store:
        table = store.table(0, shape=(20, 4), dtype="float32")
        _gradients._check_apart(table, 2, None)
        path.unlink()
        with pytest.raises(nvme_gpu.NvmeGpuError, match="rank 1 cannot look at the file") as caught:
            _gradients._check_apart(table, 2, None)
    assert caught.value.code == "file" and len(sent) == 2
