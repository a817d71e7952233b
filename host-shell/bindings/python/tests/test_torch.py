"""Tensors, operations and the embedding, on the CPU: with Debian's torch 1.13 in CI."""

from __future__ import annotations

import pytest

import nvme_gpu
from conftest import SIM, Device, rows_of

torch = pytest.importorskip("torch")
import nvme_gpu.torch  # noqa: E402
from nvme_gpu import compute  # noqa: E402

OPS = torch.ops.nvme_ops


def floats(store, rows, width, dtype="float32", seed=1):
    torch.manual_seed(seed)
    values = torch.randn(rows, width).to(getattr(torch, dtype))
    table = store.table(0, shape=(rows, width), dtype=dtype)
    table.scatter(torch.arange(rows), values)
    return table, values


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_tensors_give_tensors(store, dtype, kind):
    table, values = floats(store, 100, 6, dtype)
    ids = torch.randint(0, 100, (3, 5))
    found = table[ids.to(kind)]
    assert found.dtype == values.dtype and torch.equal(found, values[ids])
    out = torch.empty(3, 5, 6, dtype=values.dtype)
    assert table.gather(ids, out=out) is out and torch.equal(out, values[ids])
    assert torch.equal(table[ids.t()], values[ids.t()]), "ids that are not contiguous"
    assert table.gather(ids, dtype=torch.float64).dtype == torch.float64
    assert table[torch.tensor(5)].shape == (6,) and table[torch.empty(0, dtype=kind)].shape == (0, 6)


def test_a_tensor_is_read_into_and_written_from(store):
    values = torch.randn(4, 5).to(torch.bfloat16)
    store.write_from(values, 77).result()
    back = torch.zeros_like(values)
    assert store.read_into(back, 77).result() is back and torch.equal(back, values)


def ids(*values):
    return torch.tensor(values)


BAD = {
    "ids that are fractions": lambda s, t: t[torch.zeros(3)],
    "a mask": lambda s, t: t.gather(torch.zeros(10, dtype=torch.bool)),
    "a mask of other rows": lambda s, t: t[torch.zeros(9, dtype=torch.bool)],
    "ids of 16 bits": lambda s, t: t.gather(torch.zeros(3, dtype=torch.int16)),
    "ids of 8 bits without a sign": lambda s, t: t[torch.zeros(3, dtype=torch.uint8)],
    "a negative id": lambda s, t: t[ids(-1)],
    "an id too large": lambda s, t: t[ids(10)],
    "ids without data": lambda s, t: t[torch.zeros(3, dtype=torch.long, device="meta")],
    "sparse ids": lambda s, t: t[torch.zeros(3, dtype=torch.long).to_sparse()],
    "complex ids": lambda s, t: t[torch.zeros(3, dtype=torch.complex64)],
    "out of another dtype": lambda s, t: t.gather(ids(1), out=torch.empty(1, 4, dtype=torch.float64)),
    "out of another shape": lambda s, t: t.gather(ids(1), out=torch.empty(2, 4)),
    "out with gaps": lambda s, t: t.gather(ids(1), out=torch.empty(4, 1).t()[:, ::2]),
    "out of another library": lambda s, t: t.gather(ids(1), out=bytearray(16)),
    "out without data": lambda s, t: t.gather(ids(1), out=torch.empty(1, 4, device="meta")),
    "a status of 64 bits": lambda s, t: t.gather(ids(1), status=torch.zeros(1, dtype=torch.long)),
    "a short status": lambda s, t: t.gather(ids(1, 2), status=torch.zeros(1, dtype=torch.int32)),
    "ids that share memory with out": lambda s, t: shared(t),
    "too few rows": lambda s, t: t.scatter(ids(1), torch.empty(2, 4)),
    "rows of another dtype": lambda s, t: t.scatter(ids(1), torch.empty(1, 4, dtype=torch.float16)),
    "rows to a negative id": lambda s, t: t.scatter(ids(-2), torch.empty(1, 4)),
    "rows twice": lambda s, t: t.scatter(ids(1, 1), torch.empty(2, 4), unique=True),
    "a column to read into": lambda s, t: s.read_into(torch.empty(4, 4)[:, 1]),
    "a sparse tensor to read into": lambda s, t: s.read_into(torch.empty(4).to_sparse()),
    "a tensor without data to read into": lambda s, t: s.read_into(torch.empty(4, device="meta")),
    "a tensor past the end": lambda s, t: s.read_into(torch.empty(4), s.nbytes - 15),
    "a tensor of quantised numbers": lambda s, t: s.read_into(torch.quantize_per_tensor(torch.zeros(4), 1, 0, torch.qint8)),
    "a state of no table": lambda s, t: OPS.gather(torch.zeros(9999, dtype=torch.uint8), ids(1)),
    "a state of two lengths": lambda s, t: OPS.gather(torch.zeros(2, 2), ids(1)),
    "an operation's bad id": lambda s, t: OPS.gather(nvme_gpu.torch.state(t), ids(10)),
    "an operation's bad rows": lambda s, t: OPS.scatter(nvme_gpu.torch.state(t), ids(1), torch.empty(1, 5)),
    "a device that is none": lambda s, t: OPS.read_tensor("floppy:0", 0, [1], None, torch.device("cpu")),
    "a read past the end": lambda s, t: OPS.read_tensor("sim:mem?size=1MiB", 1 << 40, [1], None, torch.device("cpu")),
    "a read before the begin": lambda s, t: OPS.read_into_tensor(torch.empty(4), "sim:mem?size=1MiB", -1),
}


def shared(table):
    memory = torch.zeros(8, dtype=torch.long)
    return table.gather(memory[:4], out=memory.view(torch.float32)[:16].view(4, 4))


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_end_in_typed_errors(store, name):
    table, values = floats(store, 10, 4)
    with pytest.raises((nvme_gpu.NvmeGpuError, TypeError)) as caught:
        BAD[name](store, table)
    if isinstance(caught.value, nvme_gpu.NvmeGpuError):
        assert caught.value.cause and caught.value.remedy
    assert torch.equal(table[ids(9)], values[[9]])


def test_operations_gather_and_scatter_by_the_state(store):
    table, values = floats(store, 50, 3)
    state = nvme_gpu.torch.state(table)
    assert nvme_gpu.torch.state(table) is state and state.dim() == 1
    ids = torch.tensor([[1, 2], [49, 1]])
    assert torch.equal(OPS.gather(state, ids), values[ids])
    assert torch.equal(OPS.gather(state.clone(), ids), values[ids]), "a copy stands for the same table"
    out = torch.empty(2, 2, 3)
    OPS.gather_out(state, ids, out)
    assert torch.equal(out, values[ids])
    OPS.scatter(state, torch.tensor([4]), torch.full((1, 3), 7.0))
    OPS.scatter_add(state, torch.tensor([4, 4]), torch.ones(2, 3))
    assert table[4].tolist() == [9.0] * 3
    other = store.table(4096, shape=(50, 3), dtype="float32")
    assert nvme_gpu.torch.state(other).shape != state.shape


def test_operations_have_shapes_without_data(store):
    table, _ = floats(store, 50, 3, "float16")
    with torch.inference_mode():
        state = nvme_gpu.torch.state(table, "meta")
        ids = torch.empty(4, 5, dtype=torch.int64, device="meta")
        found = OPS.gather(state, ids)
        assert found.shape == (4, 5, 3) and found.dtype == torch.float16 and found.device.type == "meta"
        OPS.scatter(state, ids, found)
        OPS.gather_out(state, ids, found)
        OPS.read_into_tensor(found, "sim:never-opened", 0)


def test_schemas_are_those_that_were_promised():
    schemas = {
        "gather": "nvme_ops::gather(Tensor(a!) state, Tensor ids) -> Tensor",
        "gather_out": "nvme_ops::gather_out(Tensor(a!) state, Tensor ids, Tensor(b!) out) -> ()",
        "scatter": "nvme_ops::scatter(Tensor(a!) state, Tensor ids, Tensor src) -> ()",
        "read_into_tensor": "nvme_ops::read_into_tensor(Tensor(a!) t, str device_path, int offset) -> ()",
    }
    for name, schema in schemas.items():
        assert str(getattr(OPS, name).default._schema) == schema
    assert "SymInt[] shape, ScalarType? dtype, Device device" in str(OPS.read_tensor.default._schema)


def test_a_tensor_is_read_from_a_device_by_name(tmp_path):
    path = tmp_path / "data.bin"
    values = torch.arange(100, dtype=torch.float32)
    path.write_bytes(values.numpy().tobytes())
    device = f"file:{path}"
    found = OPS.read_tensor(device, 40, [2, 5], torch.float32, torch.device("cpu"))
    assert torch.equal(found, values[10:20].view(2, 5))
    assert OPS.read_tensor(device, 0, [8], None, torch.device("cpu")).dtype == torch.uint8
    tensor = torch.empty(5)
    OPS.read_into_tensor(tensor, device, 8)
    assert torch.equal(tensor, values[2:7])
    nvme_gpu.torch.store_of(device).close()


def test_row_wise_adagrad_is_that_of_a_dense_sum(store):
    rows, width, lr, eps = 40, 8, 0.1, 1e-10
    table, values = floats(store, rows, width)
    disk = nvme_gpu.torch.DiskEmbedding(table)
    dense = torch.nn.Embedding(rows, width, _weight=values.clone())
    optimizer = nvme_gpu.torch.DiskAdagrad(disk.parameters(), lr=lr, eps=eps)
    sums = torch.zeros(rows)
    weight = torch.randn(width)
    for _ in range(20):
        ids = torch.randint(0, rows, (4, 6))
        for embedding in (dense, disk):
            embedding.zero_grad()
            (embedding(ids) * weight).pow(2).sum().backward()
        grad = dense.weight.grad
        sums += grad.pow(2).mean(1)
        with torch.no_grad():
            dense.weight -= lr * grad / (sums.sqrt() + eps).unsqueeze(1)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[disk.weight]["sums"], sums, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(table[torch.arange(rows)], dense.weight.detach(), rtol=1e-4, atol=1e-5)


def test_the_names_of_the_drafts_work(tmp_path, monkeypatch):
    import torch_nvme

    path = tmp_path / "data.bin"
    values = torch.arange(1024, dtype=torch.float32)
    path.write_bytes(values.numpy().tobytes())
    with pytest.raises(nvme_gpu.Usage, match="NVME_GPU_DEVICE"):
        torch_nvme.read_into_tensor(torch.empty(4))
    tensor = torch.empty(2, 4)
    assert torch_nvme.read_into_tensor(tensor, lba=1, device=str(path)) is tensor
    assert torch.equal(tensor, values[128:136].view(2, 4))
    monkeypatch.setenv("NVME_GPU_DEVICE", str(path))
    torch_nvme.read_into_tensor(tensor, lba=0)
    assert tensor[0, 1] == 1
    torch_nvme.init(str(path))
    torch_nvme.read_into_tensor(tensor, lba=2)
    assert tensor[0, 0] == 256
    nvme_gpu.torch.store_of(str(path)).close()
    torch_nvme._DEVICE = None


def test_blocks_are_read_to_addresses_of_the_gpu(gpu_store):
    import ctypes

    import pycuda_nvme

    del gpu_store
    with pycuda_nvme.NVMeGPU("sim:mem?size=32MiB&queues=32&threads=2") as nvme:
        rows_of(nvme.store, 3000, 4)
        memory = Device([0] * 2048, "<i4")
        nvme.read(lba=1, count=2, gpu_ptr=ctypes.addressof(memory.memory))
        assert memory.tolist()[:4] == [256000, 256001, 256002, 256003]
        nvme.read(lba=0, count=2, gpu_ptr=memory)
        assert memory.tolist()[4:8] == [1000, 1001, 1002, 1003]
        data = nvme.read_to_gpu(lba=0, size_mb=0.25)
        assert data.nbytes == 1 << 18 and data.device == "cuda:0" and data.tobytes()[16:18] == b"\xe8\x03"
    with pycuda_nvme.NVMeGPU(SIM, gpu=None) as nvme:
        rows_of(nvme.store, 10, 4)
        assert nvme.read_to_gpu(size_mb=0.01).tobytes()[16:18] == b"\xe8\x03"


def test_tensors_of_the_gpu_are_gathered_by_the_gpu(gpu_store, cuda):
    table, values = floats(gpu_store, 100, 4)
    ids = torch.tensor([[3, 99], [0, 3]])
    before = gpu_store.stats()["commands"]
    found = table[cuda(ids)]
    table.check()
    assert found.is_cuda and found.shape == (2, 2, 4)
    assert gpu_store.stats()["commands"] == before, "the CPU's queues moved nothing"
    assert torch.equal(found.as_subclass(torch.Tensor), values[ids])
    out, status = torch.zeros(4, 2, 4), torch.full((4, 2), 9, dtype=torch.int32)
    ids = torch.tensor([[1, 2], [3, 4], [-1, 5], [6, 100]], dtype=torch.int32)
    same = cuda(out)
    assert table.gather(cuda(ids), out=same, stream=2, status=cuda(status)) is same
    with pytest.raises(nvme_gpu.Usage, match="row 4"):
        table.check()
    assert status.tolist() == [[0, 0], [0, 0], [-1, 0], [0, -1]]
    assert torch.equal(out[:2], values[ids[:2].long()]) and not out[2, 0].any()
    with pytest.raises(nvme_gpu.Usage):
        table.gather(cuda(torch.tensor([100])), check="now")
    table.scatter(cuda(torch.tensor([7])), cuda(torch.ones(1, 4)), stream=2, check="now")
    assert torch.equal(table[torch.tensor([7])], torch.ones(1, 4))
    back = torch.zeros(4)
    gpu_store.read_into(cuda(back), 7 * 16).result()
    assert torch.equal(back, torch.ones(4))
    with pytest.raises(nvme_gpu.Usage, match="one device"):
        table.gather(cuda(torch.tensor([1])), out=torch.empty(1, 4))
    with pytest.raises(nvme_gpu.Usage, match="status has 1 places for 2"):
        table.gather(cuda(torch.tensor([1, 2])), status=cuda(torch.zeros(1, dtype=torch.int32)))
    with nvme_gpu.open(SIM) as plain:
        with pytest.raises(nvme_gpu.Usage, match="without a GPU"):
            plain.table(0, shape=(10, 4), dtype="float32")[cuda(torch.tensor([1]))]


def test_views_that_conjugate_or_negate_are_refused():
    store = nvme_gpu.open("sim:mem?size=1MiB")
    numbers = torch.ones(8, dtype=torch.complex64) * (1 + 2j)
    with pytest.raises(nvme_gpu.Usage, match="conjugates"):
        store.write_from(numbers.conj(), 0)
    with pytest.raises(nvme_gpu.Usage, match="conjugates"):
        store.write_from(torch._neg_view(torch.ones(8)), 0)


def test_a_table_of_bfloat16_takes_no_other_numbers_of_its_size():
    table = nvme_gpu.open("sim:mem?size=1MiB").table(0, shape=(10, 4), dtype="bfloat16")
    rows = torch.ones(2, 4)
    table.scatter([1, 2], rows.bfloat16())
    for other in (rows.half(), torch.ones(2, 2), torch.ones(2, 4, dtype=torch.int16).view(torch.float16)):
        with pytest.raises(nvme_gpu.Usage, match="bfloat16"):
            table.scatter([1, 2], other)
    assert torch.equal(table.gather([1, 2], out=torch.empty(2, 4, dtype=torch.bfloat16)).float(), rows)


def test_rows_of_operations_come_in_the_stream_that_uses_them(gpu_store, cuda, monkeypatch):
    table, values = floats(gpu_store, 100, 4)
    state, ids = nvme_gpu.torch.state(table), cuda(torch.tensor([3, 99]))
    streams, ended = [], nvme_gpu._gathers._ended_on_gpu

    def seen(operation, wanted, *rest):
        streams.append(wanted.stream)
        ended(operation, wanted, *rest)

    monkeypatch.setattr(nvme_gpu._gathers, "_ended_on_gpu", seen)
    for current, out in ((1, None), (2, cuda(torch.zeros(2, 4)))):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
        token = OPS.prefetch(state, ids)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index, current=current: current)
        found = OPS.prefetched(state, token) if out is None else OPS.prefetched_out(state, token, out)
        table.check()
        assert torch.equal((found if out is None else out).as_subclass(torch.Tensor), values[[3, 99]])
    assert streams == [1, 2]


def test_a_token_stays_good_where_its_output_is_refused(gpu_store, cuda):
    table, values = floats(gpu_store, 100, 4)
    state = nvme_gpu.torch.state(table)
    token = OPS.prefetch(state, cuda(torch.tensor([3, 99])))
    with pytest.raises(nvme_gpu.Usage, match="shape"):
        OPS.prefetched_out(state, token, cuda(torch.zeros(3, 4)))
    found = OPS.prefetched(state, token)
    table.check()
    assert torch.equal(found.as_subclass(torch.Tensor), values[[3, 99]])
    with pytest.raises(nvme_gpu.Usage, match="names no rows"):
        OPS.prefetched(state, token)


class Ordered:
    """A native store, and between which streams it was asked for an order."""

    def __init__(self, native):
        self._native, self.orders = native, []

    def __getattr__(self, name):
        return getattr(self._native, name)

    def order(self, first, then):
        self.orders.append((first, then))
        self._native.order(first, then)


def test_tensors_are_ordered_before_another_stream_whatever_the_ids_are(gpu_store, cuda, monkeypatch):
    table, values = floats(gpu_store, 100, 4)
    native = Ordered(gpu_store._native)
    monkeypatch.setattr(gpu_store, "_native", native)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1)
    table.scatter(Device([7]), cuda(torch.ones(1, 4)), stream=2, check="now")
    assert native.orders == [(1, 2)]
    out, status = cuda(torch.zeros(1, 4)), cuda(torch.full((1,), 9, dtype=torch.int32))
    table.gather(Device([7]), out=out, stream=2, check="now")
    plain = Device([0] * 4, "<f4", shape=(1, 4))
    table.gather(Device([7]), out=plain, status=status, stream=2, check="now")
    assert native.orders == [(1, 2)] * 3
    assert out.tolist() == [[1.0] * 4] and status.tolist() == [0]


def test_memory_of_the_gpu_that_is_written_is_no_other_argument(gpu_store, cuda):
    table, values = floats(gpu_store, 100, 4)
    memory = torch.zeros(16, dtype=torch.long)
    ids, rows = cuda(memory[:4]), cuda(memory.view(torch.float32)[:16].view(4, 4))
    status = cuda(memory.view(torch.int32)[2:6])
    apart = cuda(torch.zeros(4, 4))
    for call in (
        lambda: table.gather(ids, out=rows),
        lambda: table.gather(ids, status=status),
        lambda: table.gather(cuda(torch.zeros(4, dtype=torch.long)), out=rows, status=status),
        lambda: table.scatter(ids, apart, status=status),
    ):
        with pytest.raises(nvme_gpu.Usage, match="share memory"):
            call()
    # Ids and rows that are read may be one memory.
    table.scatter(ids, rows, check="now")
    table.gather(ids, out=apart, check="now")
    assert not apart.as_subclass(torch.Tensor).any()


def test_a_backward_refuses_a_tensor_that_was_read_into_since(store, gpu_store, cuda):
    table, _ = floats(store, 50, 3)
    on_gpu, _ = floats(gpu_store, 50, 3)
    ids = torch.tensor([1, 2])
    pages = nvme_gpu.PageStore(gpu_store, 1 << 20, page_bytes=64, model="m", create="always")
    keys = pages.keys([b"never stored"])
    calls = {
        "gather": lambda one: table.gather(ids, out=one),
        "bytes": lambda one: store.read_into(one).result(),
        "GPU": lambda one: on_gpu.gather(cuda(ids), out=cuda(one), check="now"),
        "prefetch": lambda one: on_gpu.prefetch(cuda(ids)).result(cuda(one), check="now"),
        "operation": lambda one: OPS.gather_out(nvme_gpu.torch.state(table), ids, one),
        "blocks": lambda one: pages.get(keys, nvme_gpu.PageBlocks(cuda(one), [0])),
        "pieces": lambda one: pages.get(keys, [cuda(one[:, :2])]),
        "compute": lambda one: compute.silu_mul(torch.ones(2, 3), torch.ones(2, 3), one),
    }
    for name, call in calls.items():
        weight, saved = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
        loss = (weight * saved).sum()
        call(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
            pytest.fail(name)
    with torch.inference_mode():
        out = torch.ones(2, 3)
    table.gather(ids, out=out)
