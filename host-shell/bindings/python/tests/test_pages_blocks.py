"""Pages that are blocks of an engine's tensors: the same bytes as with a view of each, and what is refused."""

from __future__ import annotations

import pytest

import nvme_gpu
from conftest import SIM_GPU, drain

torch = pytest.importorskip("torch")

BLOCKS = 6
LAYOUTS = {
    # Shapes of the tensors of a page with the number of blocks at an axis, and that axis.
    "layer first": ([(2, BLOCKS, 4, 8, 16)] * 3, 1),
    "block first": ([(BLOCKS, 2, 4, 8, 16)] * 2, 0),
    "mla": ([(BLOCKS, 16, 36)], 0),
    "from the end": ([(4, BLOCKS, 16)], -2),
}


def tensors_of(cuda, shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [cuda(torch.randint(-30_000, 30_000, shape, dtype=torch.int16, generator=generator)) for shape in shapes]


def blocks_of(tensors, axis, numbers):
    """The bytes of blocks, one after the other."""
    plain = [one.as_subclass(torch.Tensor) for one in tensors]
    return b"".join(one.select(axis, block).contiguous().numpy().tobytes() for block in numbers for one in plain)


@pytest.fixture
def pages(gpu_store):
    return nvme_gpu.PageStore(gpu_store, page_bytes=1 << 16, model="of blocks")


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_the_pages_that_views_of_them_are(cuda, pages, name):
    shapes, axis = LAYOUTS[name]
    given, taken = tensors_of(cuda, shapes, 1), tensors_of(cuda, shapes, 2)
    wanted = [[0], [5, 2], [3, 1, 4]]
    keys = pages.keys([b"%d" % number for number in range(3)])
    of_given = nvme_gpu.PageBlocks(given, [torch.tensor(0), (5, 2), torch.tensor([3, 1, 4])], axis)
    assert len(of_given) == 3
    assert pages.put(keys, of_given) == ["stored"] * 3
    lengths = [len(blocks_of(given, axis, some)) for some in wanted]
    # By the CPU, and into views of blocks: both as before.
    room = [bytearray(length) for length in lengths]
    assert pages.get(keys, room) == lengths
    assert [bytes(one) for one in room] == [blocks_of(given, axis, some) for some in wanted]
    # Blocks of another place, in the middle of other pages of the call.
    order = [4, 3, 0, 2, 5, 1]
    moved = nvme_gpu.PageBlocks(taken, [[order[block] for block in some] for some in wanted[1:]], axis)
    one = [[view.select(axis, order[0]) for view in taken]]
    assert pages.get(keys, [*one, moved]) == lengths
    for block in range(BLOCKS):
        assert blocks_of(taken, axis, [order[block]]) == blocks_of(given, axis, [block])
    assert pages.stats()["loaded_by_gpu"] == 3 == pages.stats()["stored_by_gpu"]
    drain()


def test_a_block_that_a_load_leaves_out_is_left_alone(cuda, pages):
    (given,), (taken,) = tensors_of(cuda, [(BLOCKS, 64)], 1), tensors_of(cuda, [(BLOCKS, 64)], 2)
    before = blocks_of([taken], 0, range(BLOCKS))
    keys = pages.keys([b"a", b"b"])
    assert pages.put(keys, nvme_gpu.PageBlocks(given, [(0, 1, 2), (3, 4, 5)])) == ["stored"] * 2
    assert pages.get(keys, nvme_gpu.PageBlocks(taken, [(None, 1, None), (None, 4, None)])) == [384, 384]
    for block in range(BLOCKS):
        source = [given] if block in (1, 4) else None
        expected = blocks_of(source, 0, [block]) if source else before[block * 128 :][:128]
        assert blocks_of([taken], 0, [block]) == expected
    with pytest.raises(nvme_gpu.Usage, match="a block that is None"):
        pages.put(pages.keys([b"c"]), nvme_gpu.PageBlocks(given, [(None,)]))
    drain()


def test_a_part_of_each_block_is_a_tensor_with_gaps(cuda, pages):
    (given,), (taken,) = tensors_of(cuda, [(BLOCKS, 64)], 1), tensors_of(cuda, [(BLOCKS, 64)], 2)
    before = taken.as_subclass(torch.Tensor).clone()
    keys = pages.keys([b"a"])
    assert pages.put(keys, nvme_gpu.PageBlocks(given[:, :20], [(1, 2)])) == ["stored"]
    assert pages.get(keys, nvme_gpu.PageBlocks(taken[:, 5:25], [(3, 0)])) == [80]
    expected, source = before.clone(), given.as_subclass(torch.Tensor)
    expected[3, 5:25], expected[0, 5:25] = source[1, :20], source[2, :20]
    assert torch.equal(taken.as_subclass(torch.Tensor), expected)
    drain()


def test_what_is_refused_moves_nothing(cuda, pages):
    (tensor,) = tensors_of(cuda, [(BLOCKS, 64)], 1)
    keys = pages.keys([b"a", b"b"])
    for call, error, text in [
        (lambda: nvme_gpu.PageBlocks(torch.zeros(4, 4), [0]), nvme_gpu.Usage, "tensors of a GPU"),
        (lambda: nvme_gpu.PageBlocks([], [0]), nvme_gpu.Usage, "tensors of a GPU"),
        (lambda: nvme_gpu.PageBlocks(tensor, [0], 2), nvme_gpu.Usage, "axis is 2"),
        (lambda: pages.put(keys, nvme_gpu.PageBlocks(tensor, [0])), nvme_gpu.Usage, "2 keys do not match 1 pages"),
        (lambda: pages.put(keys, nvme_gpu.PageBlocks(tensor, [0, BLOCKS])), IndexError, "block 6 of 6"),
        (lambda: pages.put(keys, nvme_gpu.PageBlocks(tensor, [0, -1])), IndexError, "block -1"),
        (lambda: pages.get(keys, nvme_gpu.PageBlocks(tensor, [(0, 1), (2, 1)])), nvme_gpu.Usage, "share"),
        (lambda: pages.put(keys, [nvme_gpu.PageBlocks(tensor, [0]), bytes(4)]), nvme_gpu.Usage, "memory of the host"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert pages.stats()["pages"] == 0 and pages.get(keys[:1], nvme_gpu.PageBlocks(tensor, [0]))[0].code == "missing"
    with nvme_gpu.open(SIM_GPU) as host:
        alone = nvme_gpu.PageStore(host, page_bytes=4096, model="of blocks")
        with pytest.raises(nvme_gpu.Usage, match="without a GPU"):
            alone.put(keys[:1], nvme_gpu.PageBlocks(tensor, [0]))
