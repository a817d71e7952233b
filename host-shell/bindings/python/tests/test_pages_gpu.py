"""Pages between a drive and memory of a GPU: the same bytes, outcomes and counts as by the CPU, whatever is on the drive."""

from __future__ import annotations

import ctypes
import itertools
import random

import pytest

import nvme_gpu
from conftest import SIM, SIM_GPU, Device, cuda_memory, drain

MODEL = {"model": "llama-3-8b", "dtype": "bfloat16", "block_tokens": 16}
PAGE = 9000
BLOCK = 4096
SLOT = BLOCK + 3 * BLOCK


class Memory:
    """Bytes of the stand-in's GPU, and parts of them as arrays at any address."""

    def __init__(self, nbytes, fill=0xAA):
        self.at, self.free = cuda_memory(nbytes)
        self.bytes = (ctypes.c_uint8 * nbytes).from_address(self.at)
        ctypes.memset(self.at, fill, nbytes)

    def part(self, begin, nbytes):
        return Part(self, begin, nbytes)

    def read(self, begin, nbytes):
        return ctypes.string_at(self.at + begin, nbytes)

    def write(self, begin, data):
        ctypes.memmove(self.at + begin, bytes(data), len(data))


class Part:
    def __init__(self, memory, begin, nbytes):
        self.memory, self.begin, self.nbytes = memory, begin, nbytes

    @property
    def __cuda_array_interface__(self):
        address = self.memory.at + self.begin
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (address, False), "strides": None}


def content(number, nbytes):
    return bytes((number * 31 + at * 7 + (at >> 8)) & 0xFF for at in range(nbytes))


def opened(store, **options):
    return nvme_gpu.PageStore(store, **{"page_bytes": PAGE, **MODEL, **options})


def keys_of(kv, count):
    return kv.keys([b"block %d" % number for number in range(count)])


def on_gpu(count, room=PAGE):
    """Memory for pages, one behind the other, and its parts."""
    memory = Memory(count * room)
    return memory, [memory.part(number * room, room) for number in range(count)]


def texts(outcomes):
    return [one if isinstance(one, (int, str)) else f"{type(one).__name__}: {one}" for one in outcomes]


def slot_of(kv, slot):
    return kv.nbytes - kv.stats()["capacity"] * SLOT + slot * SLOT


def test_pages_stored_one_way_are_loaded_the_other_way(gpu_store):
    kv = opened(gpu_store)
    assert kv.path["pages"] == "gpu" and "the GPU reads pages" in kv.path["why"]
    keys = keys_of(kv, 8)
    lengths = [PAGE - 1000 * number for number in range(8)]
    memory = Memory(8 * PAGE)
    parts = [memory.part(number * PAGE, length) for number, length in enumerate(lengths)]
    for number, length in enumerate(lengths):
        memory.write(number * PAGE, content(number, length))
    before = gpu_store.stats()
    assert kv.put(keys[:4], parts[:4]) == ["stored"] * 4
    assert kv.put(keys[4:], [content(number, lengths[number]) for number in range(4, 8)]) == ["stored"] * 4
    assert kv.put(keys, parts) == ["present"] * 8
    assert gpu_store.stats()["flushes"] > before.get("flushes", 0) if "flushes" in before else True
    host = [bytearray(PAGE) for _ in keys]
    found, there = on_gpu(8)
    assert kv.get(keys, host) == kv.get(keys, there) == lengths
    for number, length in enumerate(lengths):
        expected = content(number, length)
        assert bytes(host[number][:length]) == expected
        assert found.read(number * PAGE, length) == expected
        assert found.read(number * PAGE + length, PAGE - length) == b"\xaa" * (PAGE - length), "no byte behind the page"
    stats = kv.stats()
    assert (stats["stored_by_gpu"], stats["loaded_by_gpu"], stats["stored"], stats["loaded"]) == (4, 8, 8, 16)
    # Another owner finds them: they were committed as any.
    again = opened(gpu_store, create="never")
    assert again.stats()["recovered_pages"] == 8
    assert again.get(keys, there) == lengths
    drain()


@pytest.mark.parametrize("first, gap", [(0, 0), (1, 3), (5, 16)])
def test_pieces_of_a_page_lie_at_any_address(gpu_store, first, gap):
    kv = opened(gpu_store)
    keys = keys_of(kv, 3)
    cuts = [1, 333, 4096, 4097, 470, 3]
    assert sum(cuts) == PAGE
    memory, at, pages = Memory(4 * PAGE), first, []
    for number in range(3):
        page = []
        for cut in cuts:
            page.append(memory.part(at, cut))
            at += cut + gap
        pages.append(page)
    for number, page in enumerate(pages):
        data, done = content(number, PAGE), 0
        for part in page:
            memory.write(part.begin, data[done : done + part.nbytes])
            done += part.nbytes
    before = memory.read(0, 4 * PAGE)
    assert kv.put(keys, pages) == ["stored"] * 3
    host = [bytearray(PAGE) for _ in keys]
    assert kv.get(keys, host) == [PAGE] * 3
    assert [bytes(one) for one in host] == [content(number, PAGE) for number in range(3)]
    for page in pages:
        for part in page:
            memory.write(part.begin, b"\x55" * part.nbytes)
    assert kv.get(keys, pages) == [PAGE] * 3
    assert memory.read(0, 4 * PAGE) == before, "the pieces as they were, and nothing between them"
    assert kv.stats()["loaded_by_gpu"] == 3
    drain()


def damage(store, kv):
    """Spoils pages 1 to 6 of 9 on the drive, each in another way."""
    at = [slot_of(kv, slot) for slot in range(9)]
    read = lambda offset, nbytes: bytes(store.read(nbytes, offset))
    flipped = bytearray(read(at[1] + BLOCK + PAGE - 1, 1))
    flipped[0] ^= 1
    store.write(flipped, at[1] + BLOCK + PAGE - 1)
    # A misdirected write of a whole page, and one that lost its payload; a torn one; a header of nothing.
    store.write(read(at[8], SLOT), at[2])
    store.write(bytes(2 * BLOCK), at[3] + BLOCK)
    store.write(bytes(BLOCK), at[4] + 2 * BLOCK)
    store.write(bytes(BLOCK), at[5])
    store.write(b"\x01", at[6] + 100)


def test_each_damage_has_the_outcome_of_the_cpu_way():
    found = {}
    for way in ("cpu", "gpu"):
        with nvme_gpu.open(SIM_GPU, gpu=0) as store:
            kv = opened(store)
            keys = keys_of(kv, 9)
            assert kv.put(keys, [content(number, PAGE) for number in range(9)]) == ["stored"] * 9
            damage(store, kv)
            memory, parts = on_gpu(10)
            pages = [bytearray(b"\xaa" * PAGE) for _ in range(10)] if way == "cpu" else parts
            wanted = keys + kv.keys([b"never stored"])
            outcomes = kv.get(wanted, pages)
            assert [type(one) for one in outcomes[1:7]] == [nvme_gpu.PageMiss] * 6
            for number, outcome in enumerate(outcomes):
                data = bytes(pages[number]) if way == "cpu" else memory.read(number * PAGE, PAGE)
                assert data == (content(number, PAGE) if outcome == PAGE else bytes(PAGE)), (way, number)
            stats = kv.stats()
            again = texts(kv.get(keys[1:7], pages[1:7]))
            counts = [stats[name] for name in ("pages", "loaded", "missed", "lost")]
            found[way] = (texts(outcomes), counts, again, kv.contains(keys))
            drain()
    assert found["cpu"] == found["gpu"]
    outcomes, counts, again, _ = found["gpu"]
    assert counts == [3, 3, 1, 6] and all("no page has the key" in one for one in again)
    for number, words in enumerate(("payload", "another page", "payload", "payload", "checksum that it names")):
        assert words in outcomes[number + 1]
    assert len({one for one in outcomes if isinstance(one, str)}) == 7, "each names its page and its key"


def test_pages_of_several_launches():
    """Launches have 2, 4, 8 MiB of pages, or one page. Their staging memory has two parts, each used by every second one."""
    whole, room = 3 << 20, 64 << 10
    lengths = [whole] + [room - 77 * number for number in range(200)]
    first = [0, *itertools.accumulate(lengths)]
    given = random.Random(5).randbytes(first[-1])
    with nvme_gpu.open("sim:mem?size=1200MiB&queues=8", gpu=0) as store:
        kv = opened(store, page_bytes=whole)
        keys = keys_of(kv, len(lengths) + 1)
        memory, found = Memory(first[-1]), Memory(first[-1] + room)
        memory.write(0, given)
        assert kv.put(keys[:-1], [memory.part(*at) for at in zip(first, lengths)]) == ["stored"] * len(lengths)
        assert kv.stats()["stored_by_gpu"] == len(lengths)
        slot = BLOCK + whole
        at = kv.nbytes - kv.stats()["capacity"] * slot
        # The slots are taken in order: pages of each launch are spoilt, in their header or payload.
        lost = [0, 3, 20, 60, 100, 199]
        for number in lost:
            store.write(bytes(16), at + number * slot + BLOCK * (number % 2))
        rooms = [found.part(*at) for at in zip(first, lengths)] + [found.part(first[-1], room)]
        outcomes = kv.get(keys, rooms)
        missing = [number for number, one in enumerate(outcomes) if isinstance(one, nvme_gpu.PageMiss)]
        assert missing == [*lost, len(lengths)] and kv.stats()["lost"] == len(lost)
        for number, (begin, length) in enumerate(zip(first, lengths)):
            expected = bytes(length) if number in lost else given[begin : begin + length]
            assert found.read(begin, length) == expected, number
        assert found.read(first[-1], room) == bytes(room)
        drain()


def test_reads_that_fail_cost_their_pages_alone():
    faults = "".join(f"&fault=status:0x281@op=read,p=0.3,qid={queue}" for queue in range(1, 25))
    with nvme_gpu.open(SIM_GPU + faults, gpu=0) as store:
        kv = opened(store)
        keys = keys_of(kv, 60)
        assert kv.put(keys, [content(number, PAGE) for number in range(60)]) == ["stored"] * 60
        memory, parts = on_gpu(60)
        outcomes = kv.get(keys, parts)
        lost = 0
        for number, outcome in enumerate(outcomes):
            data = memory.read(number * PAGE, PAGE)
            if outcome == PAGE:
                assert data == content(number, PAGE)
            else:
                assert isinstance(outcome, nvme_gpu.PageMiss) and "the drive could not read it" in str(outcome)
                assert data == bytes(PAGE)
                lost += 1
        assert 0 < lost < 60 and kv.stats()["lost"] == lost
        drain()


def test_a_write_that_fails_is_never_found():
    faults = "".join(f"&fault=status:0x280@op=write,p=0.4,qid={queue}" for queue in range(1, 25))
    with nvme_gpu.open(SIM_GPU + faults, gpu=0) as store:
        kv = opened(store)
        keys = keys_of(kv, 40)
        memory, parts = on_gpu(40)
        for number in range(40):
            memory.write(number * PAGE, content(number, PAGE))
        outcomes = kv.put(keys, parts)
        failed = [isinstance(one, nvme_gpu.NvmeGpuError) for one in outcomes]
        assert kv.contains(keys) == [not one for one in failed] and 0 < sum(failed) < 40
        assert kv.stats()["failed"] == sum(failed)
        host = [bytearray(PAGE) for _ in keys]
        kv.get(keys, host)
        for number, one in enumerate(failed):
            assert bytes(host[number]) == (bytes(PAGE) if one else content(number, PAGE))
        drain()


def test_pages_may_change_once_the_stream_has_passed_their_copy(gpu_store):
    kv = opened(gpu_store)
    keys = keys_of(kv, 1)
    memory, parts = on_gpu(1)
    memory.write(0, content(1, PAGE))
    pending = kv.store_async(keys, parts)
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuStreamSynchronize(None) == 0
    memory.write(0, b"\x00" * PAGE)
    assert pending.result(60) == ["stored"]
    host = [bytearray(PAGE)]
    assert kv.get(keys, host) == [PAGE] and bytes(host[0]) == content(1, PAGE)
    drain()


def test_a_file_is_loaded_by_the_cpu_and_copied(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(4 << 20)
    with nvme_gpu.open(f"file:{path}", gpu=0, allow_write=True) as store:
        kv = opened(store)
        assert kv.path["pages"] == "cpu" and "one drive" in kv.path["why"]
        keys = keys_of(kv, 4)
        memory, parts = on_gpu(4)
        for number in range(4):
            memory.write(number * PAGE, content(number, PAGE))
        assert kv.put(keys, parts[:2] + [[parts[2]], parts[3]]) == ["stored"] * 4
        store.write(b"\x01", slot_of(kv, 1) + BLOCK + 77)
        back, there = on_gpu(5, PAGE + 1)
        outcomes = kv.get([*keys, *kv.keys([b"never"])], there)
        assert [one == PAGE for one in outcomes] == [True, False, True, True, False]
        for number, outcome in enumerate(outcomes):
            data = back.read(number * (PAGE + 1), PAGE + 1)
            right = content(number, PAGE) + b"\xaa"
            assert data == (right if outcome == PAGE else bytes(PAGE + 1)), number
        assert "its payload has another checksum" in str(outcomes[1])
        stats = kv.stats()
        assert (stats["loaded_by_gpu"], stats["stored_by_gpu"], stats["loaded"], stats["lost"]) == (0, 0, 3, 1)
        # Memory of no bytes is an error of its page alone, as where the GPU reads.
        outcomes = kv.get([keys[0], *kv.keys([b"never"]), keys[2]], [back.part(0, 0), back.part(1, 0), back.part(PAGE, PAGE)])
        assert f"has {PAGE} bytes, and its buffer 0" in str(outcomes[0])
        assert isinstance(outcomes[1], nvme_gpu.PageMiss) and outcomes[2] == PAGE
        assert back.read(PAGE, PAGE) == content(2, PAGE)
        drain()


def test_pages_of_wrong_lengths_are_refused_one_by_one(gpu_store):
    kv = opened(gpu_store)
    keys = keys_of(kv, 3)
    memory = Memory(4 * PAGE)
    memory.write(PAGE, content(1, PAGE))
    outcomes = kv.put(keys, [memory.part(0, 0), memory.part(PAGE, PAGE), memory.part(2 * PAGE, PAGE + 1)])
    assert outcomes[1] == "stored"
    assert "a page of 0 bytes" in str(outcomes[0]) and f"a page of {PAGE + 1} bytes" in str(outcomes[2])
    short = kv.get(keys[1:2], [memory.part(0, PAGE - 1)])
    assert "and its buffer 8999" in str(short[0]) and memory.read(0, PAGE - 1) == bytes(PAGE - 1)
    with pytest.raises(nvme_gpu.Usage, match="share memory"):
        kv.get(keys[:2], [memory.part(0, PAGE), memory.part(PAGE - 1, PAGE)])
    with pytest.raises(nvme_gpu.Usage, match="pass one kind"):
        kv.get(keys[:2], [memory.part(0, PAGE), bytearray(PAGE)])
    assert kv.get([], []) == [] and kv.put([], []) == []
    drain()


def test_memory_of_a_gpu_needs_a_store_with_one(store):
    kv = opened(store)
    assert kv.path == {"pages": "cpu", "why": "the store was opened without a GPU"}
    with pytest.raises(nvme_gpu.Usage, match="without a GPU"):
        kv.get(keys_of(kv, 1), [Device([0] * 2000)])


def test_memory_that_is_not_there_is_refused_before_anything_is_read(gpu_store):
    kv = opened(gpu_store)
    keys = keys_of(kv, 1)
    assert kv.put(keys, [bytes(PAGE)]) == ["stored"]
    memory = Memory(PAGE)
    with pytest.raises(nvme_gpu.Usage):
        kv.get(keys, [memory.part(0, PAGE + (1 << 30))])
    assert memory.read(0, PAGE) == b"\xaa" * PAGE
    assert kv.stats()["lost"] == 0 and kv.contains(keys) == [True]


def test_tensors_of_any_stride_are_pages(gpu_store, cuda):
    torch = pytest.importorskip("torch")
    kv = opened(gpu_store)
    # Two halves, K and V, of blocks of 4 heads of 32 elements, as engines lay them out.
    for layout in ((2, 6, 4, 16, 32), (6, 2, 4, 16, 32), (6, 4, 16, 2, 32)):
        axis = layout.index(6)
        cache = cuda(torch.zeros(layout, dtype=torch.int16))
        values = torch.randint(0, 1000, layout, dtype=torch.int16)
        torch.Tensor.copy_(cache.as_subclass(torch.Tensor), values)
        keys = kv.keys([b"%d %d" % (axis, layout[1]) + bytes([at]) for at in range(6)], layout[3])
        pages = [cache.select(axis, block) for block in range(6)]
        assert kv.put(keys, pages) == ["stored"] * 6
        nbytes = values.numel() // 6 * 2
        host = [bytearray(nbytes) for _ in keys]
        assert kv.get(keys, host) == [nbytes] * 6
        for block, one in enumerate(host):
            assert bytes(one) == values.select(axis, block).contiguous().numpy().tobytes()
        torch.Tensor.zero_(cache.as_subclass(torch.Tensor))
        assert kv.get(keys, pages) == [nbytes] * 6
        assert torch.equal(cache.as_subclass(torch.Tensor), values)
    drain()


def test_the_loaded_pages_of_a_store_stay_with_its_process():
    with nvme_gpu.open(SIM) as plain, nvme_gpu.open(SIM_GPU, gpu=0) as store:
        kv = opened(store)
        pending = kv.load_async(keys_of(kv, 1), on_gpu(1)[1])
        kv.close()
        assert isinstance(pending.result(60)[0], nvme_gpu.PageMiss)
        with pytest.raises(nvme_gpu.Usage, match="closed"):
            kv.get([bytes(16)], on_gpu(1)[1])
        assert plain.nbytes > 0
    drain()
