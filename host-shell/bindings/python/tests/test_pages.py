"""Pages by key: found again by another process and after kill -9, each checked, each outcome its own."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import nvme_gpu

MODEL = {"model": "llama-3-8b", "dtype": "bfloat16", "block_tokens": 16}
PAGE = 8192


def hashes(count, first=0):
    return [b"block %d" % number for number in range(first, first + count)]


def pages(count, first=0):
    return [bytes([number % 251]) * (PAGE - number) for number in range(first, first + count)]


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "pages"
    with path.open("wb") as file:
        file.truncate(4 << 20)
    return f"file:{path}"


def opened(device, **options):
    return nvme_gpu.PageStore(
        nvme_gpu.open(device, allow_write=True, timeout_ms=60_000), page_bytes=PAGE, **{**MODEL, **options}
    )


def test_what_was_stored_is_found_by_the_next_one(image):
    kv = opened(image)
    assert "blank" in kv.formatted and len(kv) == 0 and kv.page_bytes == PAGE and kv.nbytes <= 4 << 20
    keys = kv.keys(hashes(5))
    assert len(set(keys)) == 5 and keys == kv.keys(hashes(5)) and keys != kv.keys(hashes(5), 1)
    assert kv.put(keys, pages(5)) == ["stored"] * 5
    assert kv.put(keys[:2], pages(2)) == ["present"] * 2
    kv.store.close()
    again = opened(image)
    assert again.formatted is None and len(again) == 5 and again.stats()["recovered_pages"] == 5
    found = [bytearray(PAGE) for _ in range(5)]
    assert again.get(keys, found) == [PAGE - number for number in range(5)]
    assert [bytes(one[: PAGE - number]) for number, one in enumerate(found)] == pages(5)
    again.store.close()


def test_a_page_of_another_model_is_not_found(image):
    kv = opened(image)
    keys = kv.keys(hashes(1))
    kv.put(keys, pages(1))
    kv.store.close()
    for other in ({"model": "llama-3-70b"}, {"revision": "2"}, {"dtype": "float8"}, {"layout": "heads first"},
                  {"block_tokens": 32}, {"parallel_rank": "1 of 2"}, {"group": 1}, {"hash_algorithm": "xxhash"}, {"seed": "7"}):
        with pytest.raises(nvme_gpu.NvmeGpuError) as refused:
            opened(image, **other, create="never")
        assert refused.value.code == "mismatch" and next(iter(other)) in refused.value.cause
    kv = opened(image, model="other")
    assert "llama-3-8b" in kv.formatted and kv.get(keys, [bytearray(PAGE)])[0].code == "missing"
    kv.store.close()


def test_a_miss_is_an_exception_that_is_not_raised(image):
    kv = opened(image)
    keys = kv.keys(hashes(3))
    kv.put(keys[1:2], pages(1))
    buffers = [bytearray(b"\1" * PAGE) for _ in range(3)]
    first, there, last = kv.load_async(keys, buffers).result(60)
    assert isinstance(first, nvme_gpu.PageMiss) and isinstance(last, nvme_gpu.PageMiss) and there == PAGE
    assert keys[0].hex() in first.cause and not any(buffers[0]) and kv.contains(keys) == [False, True, False]
    assert kv.stats()["missed"] == 2
    kv.store.close()


def test_a_page_that_is_not_what_was_stored_is_lost(image, tmp_path):
    kv = opened(image)
    keys = kv.keys(hashes(2))
    assert kv.put(keys, [b"\xa7" * PAGE, b"\xb8" * PAGE]) == ["stored", "stored"]
    data = bytearray((tmp_path / "pages").read_bytes())
    at = data.index(b"\xa7" * PAGE)
    with (tmp_path / "pages").open("r+b") as file:
        file.seek(at + 100)
        file.write(b"\0")
    buffers = [bytearray(b"\1" * PAGE) for _ in range(2)]
    lost, there = kv.get(keys, buffers)
    assert isinstance(lost, nvme_gpu.PageMiss) and lost.code == "lost" and "checksum" in lost.cause and there == PAGE
    assert not any(buffers[0]) and kv.stats()["lost"] == 1
    assert kv.contains(keys) == [False, True]
    assert kv.put(keys[:1], [b"\xa7" * PAGE]) == ["stored"]
    kv.store.close()


def test_pages_make_room_in_the_order_of_use_and_pins_stay(image):
    kv = opened(image)
    capacity = kv.stats()["capacity"]
    keys = kv.keys(hashes(capacity + 3))
    assert set(kv.put(keys[:capacity], pages(capacity))) == {"stored"}
    with kv.pin_prefix(keys[:2]) as pins:
        assert len(pins) == 2
        kv.touch(keys[3:4])
        assert kv.put(keys[capacity:], pages(3)) == ["stored"] * 3
        assert kv.contains(keys[:5])[:2] == [True, True] and kv.contains(keys[2:5]) == [False, True, False]
    pins.release()
    held = kv.pin_prefix(keys)
    assert len(held) == 2
    everything = [kv.pin_prefix([key]) for key in keys]
    # Some slots are freed ahead of need.
    further, outcomes = kv.keys(hashes(capacity, 10_000)), []
    for key in further:
        outcomes += kv.put([key], pages(1))
        everything.append(kv.pin_prefix([key]))
    assert outcomes[0] == "stored" and outcomes[-1] == "no_room"
    del everything, held
    assert kv.put(further[-1:], pages(1)) == ["stored"]
    assert kv.stats()["evicted"] >= 4
    kv.store.close()


def test_pages_are_removed(image):
    kv = opened(image)
    keys = kv.keys(hashes(4))
    kv.put(keys, pages(4))
    assert kv.remove(keys[:3] + keys[:1]) == 3 and len(kv) == 1
    kv.clear()
    kv.checkpoint()
    kv.store.close()
    again = opened(image, create="never")
    assert len(again) == 0 and again.stats()["recovered_log_blocks"] == 0
    again.store.close()


def test_arguments_that_cannot_be(image):
    store = nvme_gpu.open(image, allow_write=True)
    for wrong in ({"page_bytes": 0}, {"page_bytes": 4 << 20}, {"offset": 5}, {"nbytes": 4096}, {"nbytes": 1 << 40},
                  {"model": "m" * 256}, {"create": "yes"}, {"block_tokens": -1}):
        with pytest.raises(nvme_gpu.Usage):
            nvme_gpu.PageStore(store, **{"page_bytes": PAGE, **MODEL, **wrong})
    for wrong in ({"model": b"bytes"}, {"page_bytes": "8192"}, {"page_bytes": True}):
        with pytest.raises(TypeError):
            nvme_gpu.PageStore(store, **{"page_bytes": PAGE, **MODEL, **wrong})
    with pytest.raises(TypeError):
        nvme_gpu.PageStore(image, page_bytes=PAGE, **MODEL)
    kv = nvme_gpu.PageStore(store, page_bytes=PAGE, **MODEL)
    keys = kv.keys(hashes(2))
    for call in (kv.put, kv.get):
        with pytest.raises(nvme_gpu.Usage, match="2 keys do not match 1"):
            call(keys, [bytearray(PAGE)])
    with pytest.raises(nvme_gpu.Usage, match="3 bytes"):
        kv.contains([b"key"])
    with pytest.raises(TypeError):
        kv.contains(["key"])
    with pytest.raises(nvme_gpu.Usage):
        kv.get(keys[:1], [b"read-only" * 1000])
    shared = bytearray(2 * PAGE)
    with pytest.raises(nvme_gpu.Usage, match="share memory"):
        kv.get(keys, [memoryview(shared)[:PAGE], memoryview(shared)[1 : PAGE + 1]])
    itself = []
    itself.append(itself)
    for call in (kv.put, kv.get):
        with pytest.raises(TypeError, match="a page is of the type list"):
            call(keys[:1], [itself])
    long, empty = kv.put(keys, [bytes(PAGE + 1), b""])
    assert isinstance(long, nvme_gpu.Usage) and isinstance(empty, nvme_gpu.Usage)
    assert kv.put(keys[:1], pages(1)) == ["stored"]
    short = kv.get(keys[:1], [bytearray(10)])[0]
    assert isinstance(short, nvme_gpu.Usage) and "10" in short.cause
    store.close()
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        kv.contains(keys)


def test_areas_that_overlap_in_part_are_refused(image):
    """By another store of the file, as by another process; those that only touch, and the same one, are not."""
    half = 1 << 20
    first = opened(image, offset=half, nbytes=half)
    assert first.put(first.keys(hashes(1)), pages(1)) == ["stored"]
    for offset, nbytes in ((half // 2, half), (half + 4096, half), (half, half // 2), (0, None)):
        with pytest.raises(nvme_gpu.Usage, match=f"byte {offset} on overlap {half} bytes from byte {half} on"):
            opened(image, offset=offset, nbytes=nbytes)
        with pytest.raises(nvme_gpu.Usage, match="overlap"):
            nvme_gpu.PageStore(first.store, offset, nbytes, page_bytes=PAGE, **MODEL)
    opened(image, nbytes=half)
    opened(image, offset=2 * half)
    again = opened(image, offset=half, nbytes=half, create="never")
    assert again.contains(again.keys(hashes(1))) == [True]
    for one in (first, again):
        one.store.close()
    assert opened(image, offset=half + 4096, nbytes=half, create="always").formatted


def test_data_that_are_no_page_store_stay(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"a file system" * 100_000)
    with pytest.raises(nvme_gpu.NvmeGpuError) as refused:
        opened(f"file:{path}")
    assert refused.value.code == "mismatch" and path.read_bytes() == b"a file system" * 100_000
    assert opened(f"file:{path}", create="always").formatted


def test_the_owner_before_changes_nothing_any_more(image):
    first = opened(image)
    keys = first.keys(hashes(2))
    assert first.put(keys[:1], pages(1)) == ["stored"]
    second = opened(image)
    assert second.contains(keys) == [True, False]
    refused = first.put(keys[1:], pages(1))[0]
    assert isinstance(refused, nvme_gpu.Changed) and "opened again" in refused.cause
    assert second.put(keys[1:], pages(1)) == ["stored"]
    first.store.close()
    second.store.close()


WRITER = """
    import sys, nvme_gpu
    kv = nvme_gpu.PageStore(nvme_gpu.open(sys.argv[1], allow_write=True, timeout_ms=60_000), page_bytes=8192,
                            model="llama-3-8b", dtype="bfloat16", block_tokens=16)
    number = int(sys.argv[2])
    while True:
        key = kv.keys([b"block %d" % number])
        assert kv.put(key, [bytes([number % 251]) * (8192 - number % 100)]) == ["stored"]
        print(number, flush=True)
        number += 1
"""


def test_what_was_committed_survives_kill_9(image):
    """Real kills, at moments of the operating system's choice: the simulator's power cuts are in the crate's tests."""
    committed = 0
    for _ in range(4):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), image, str(committed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(7):
                committed = int(writer.stdout.readline()) + 1
            os.kill(writer.pid, signal.SIGKILL)
            committed += len(writer.stdout.read().splitlines())
        kv = opened(image, create="never")
        keys = kv.keys(hashes(committed))
        buffers = [bytearray(PAGE) for _ in keys]
        lengths = kv.get(keys, buffers)
        for number, (length, buffer) in enumerate(zip(lengths, buffers)):
            assert length == PAGE - number % 100, (number, length)
            assert buffer[:length] == bytes([number % 251]) * length
        kv.store.close()


def test_a_drive_that_fails_is_an_outcome_of_each_page():
    store = nvme_gpu.open("sim:mem?size=4MiB&fault=status:0x281@op=write,every=25", timeout_ms=60_000)
    kv = nvme_gpu.PageStore(store, page_bytes=PAGE, **MODEL)
    keys, failed = kv.keys(hashes(300)), 0
    for first in range(0, 300, 3):
        some = slice(first, first + 3)
        for outcome in kv.put(keys[some], pages(300)[some]):
            failed += isinstance(outcome, nvme_gpu.NvmeGpuError)
    assert failed
    there = kv.contains(keys)
    for key, is_there, page in zip(keys, there, pages(300)):
        buffer = bytearray(PAGE)
        outcome = kv.get([key], [buffer])[0]
        if isinstance(outcome, int):
            assert is_there and buffer[:outcome] == page
        else:
            assert not any(buffer)
    store.close()


def test_arrays_are_pages(image):
    np = pytest.importorskip("numpy")
    kv = opened(image)
    cache = np.arange(4 * PAGE // 4, dtype=np.float32).reshape(4, -1)
    keys = kv.keys(hashes(4))
    assert kv.put(keys, list(cache)) == ["stored"] * 4
    found = np.zeros_like(cache)
    assert kv.get(keys, list(found)) == [PAGE] * 4
    assert (found == cache).all()
    kv.store.close()


def test_a_child_of_a_fork_refuses(image):
    kv = opened(image)
    keys = kv.keys(hashes(1))
    pins = kv.pin_prefix(keys)
    child = os.fork()
    if child == 0:
        try:
            kv.contains(keys)
        except nvme_gpu.Usage:
            pins.release()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert kv.put(keys, pages(1)) == ["stored"]
    kv.store.close()


# ---- an area of several processes


def shared(image, tmp_path, **options):
    options = {**MODEL, "allow_write": True, "timeout_ms": 60_000, "directory": tmp_path / "sockets", **options}
    return nvme_gpu.PageStore.shared(image, page_bytes=PAGE, **options)


RANK = """
    import os, sys, nvme_gpu
    kv = nvme_gpu.PageStore.shared(sys.argv[1], page_bytes=8192, model="llama-3-8b", dtype="bfloat16", block_tokens=16,
                                   allow_write=True, timeout_ms=60_000, directory=sys.argv[2])
    pins = []
    print(kv.stats()["owner"], flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        keys = kv.keys([b"block %s" % one.encode() for one in numbers])
        if word == "put":
            print(*kv.put(keys, [bytes([int(one) % 251]) * (8192 - int(one)) for one in numbers]), flush=True)
        elif word == "get":
            pages = [bytearray(8192) for _ in keys]
            found = kv.get(keys, pages)
            for got in found:
                if isinstance(got, Exception) and not isinstance(got, nvme_gpu.PageMiss):
                    print(repr(got), file=sys.stderr)
            assert all(not isinstance(got, int) or page[:got] == bytes([int(one) % 251]) * (8192 - int(one))
                       for one, got, page in zip(numbers, found, pages))
            print(*(getattr(got, "code", got) for got in found), flush=True)
        elif word == "pin":
            pins.append(kv.pin_prefix(keys))
            print(len(pins[-1]), flush=True)
        elif word == "keep":
            if os.fork() == 0:
                import time
                time.sleep(600)
            print("kept", flush=True)
        elif word == "fork":
            parent = os.getpid()
            if os.fork() == 0:
                import time
                kv = nvme_gpu.PageStore.shared(sys.argv[1], page_bytes=8192, model="llama-3-8b", dtype="bfloat16",
                                               block_tokens=16, allow_write=True, timeout_ms=60_000, directory=sys.argv[2])
                owned = kv.stats()["owner"]
                print("forked", owned, flush=True)
                while os.getppid() == parent:
                    time.sleep(0.01)
                found = kv.contains(kv.keys([b"block 1"]))[0]
                # Written to the last, so that it is there as a whole.
                with open(sys.argv[2] + "/part", "w") as file:
                    file.write(f"{kv.stats()['owner']} {found}")
                os.rename(sys.argv[2] + "/part", sys.argv[2] + "/child")
                time.sleep(600)
"""


class Rank:
    def __init__(self, image, tmp_path):
        command = [sys.executable, "-c", textwrap.dedent(RANK), image, str(tmp_path / "sockets")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.owns = self.process.stdout.readline().strip() == "1"

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        """Ends the process and its children."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def ranks(image, tmp_path):
    made = [Rank(image, tmp_path) for _ in range(4)]
    yield made
    for rank in made:
        rank.end()


def test_ranks_share_an_area_and_an_owner_that_is_killed_is_replaced(ranks):
    assert [rank.owns for rank in ranks] == [True, False, False, False]
    for number, rank in enumerate(ranks):
        assert rank.ask(f"put {number} {number + 10}") == ["stored", "stored"]
    everything = "get 0 1 2 3 10 11 12 13 14"
    lengths = [str(PAGE - number) for number in (0, 1, 2, 3, 10, 11, 12, 13)]
    for rank in ranks:
        assert rank.ask(everything) == [*lengths, "missing"]
    assert ranks[1].ask("pin 0 1") == ["2"]
    ranks[0].kill()
    for rank in ranks[1:]:
        assert rank.ask(everything) == [*lengths, "missing"]
    assert ranks[2].ask("put 2 20") == ["present", "stored"]
    ranks[1].kill()
    assert ranks[3].ask("get 20 3") == [str(PAGE - 20), str(PAGE - 3)]


def test_an_owner_whose_children_live_on_is_replaced(ranks):
    """A child of a fork keeps the sockets, and not the lock."""
    assert ranks[0].ask("fork") == ["forked", "0"] and ranks[1].ask("put 1") == ["stored"]
    ranks[0].kill()
    assert ranks[1].ask("get 1") == [str(PAGE - 1)] and ranks[2].ask("put 1") == ["present"]


def test_the_socket_of_an_owner_that_has_ended_is_not_waited_for(ranks, tmp_path):
    """A child keeps the socket on which its parent listened: connections to it succeed, and nobody answers."""
    assert ranks[0].ask("keep") == ["kept"] and ranks[1].ask("put 1") == ["stored"]
    [path] = (tmp_path / "sockets").glob("*.lock")
    ranks[0].kill()
    with open(path, "r+") as file:
        # So that the next one looks for an owner before it may be one itself.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ranks[1].ask("get 1")))
        asking.start()
        asking.join(0.5)
        assert not answers
    asking.join()
    assert answers == [[str(PAGE - 1)]]


def test_a_child_of_an_owner_replaces_it(image, tmp_path):
    owner = Rank(image, tmp_path)
    try:
        assert owner.ask("put 1") == ["stored"] and owner.ask("fork") == ["forked", "0"]
        owner.kill()
        for _ in range(1200):
            if (tmp_path / "sockets" / "child").exists():
                break
            time.sleep(0.05)
        assert (tmp_path / "sockets" / "child").read_text() == "1 True"
    finally:
        owner.end()


def test_a_shared_area_has_the_calls_of_one_that_is_not(image, tmp_path):
    owner, client = shared(image, tmp_path), shared(image, tmp_path)
    assert owner.is_shared and "blank" in owner.formatted and client.formatted is None
    assert owner.stats()["owner"] == 1 and client.stats()["owner"] == 0
    assert client.page_bytes == PAGE and client.nbytes == owner.nbytes <= 4 << 20
    keys = client.keys(hashes(600))
    capacity = client.stats()["capacity"]
    # More than a window holds, and than fits.
    outcomes = client.put(keys, pages(600))
    assert set(outcomes) == {"stored"} and len(client) <= capacity < 600
    found = client.contains(keys)
    assert found == owner.contains(keys) and 0 < sum(found) <= capacity
    some = [key for key, there in zip(keys, found) if there]
    whole = [page for page, there in zip(pages(600), found) if there]
    buffers = [bytearray(PAGE) for _ in some]
    assert client.get(some, buffers) == [len(page) for page in whole] == client.lengths(some)
    assert all(buffer[: len(page)] == page for buffer, page in zip(buffers, whole))
    client.touch(some[:2])
    with client.pin_prefix(some) as pins:
        assert len(pins) == len(some)
    lost, short = client.get([client.keys([b"none"])[0], some[0]], [bytearray(b"\1" * PAGE), bytearray(10)])
    assert isinstance(lost, nvme_gpu.PageMiss) and isinstance(short, nvme_gpu.Usage)
    long, empty = client.put(keys[:2], [bytes(PAGE + 1), b""])
    assert isinstance(long, nvme_gpu.Usage) and isinstance(empty, nvme_gpu.Usage)
    assert client.remove(some[:1]) == 1
    client.clear()
    client.checkpoint()
    assert len(owner) == 0
    owner.close()
    assert client.put(keys[:1], pages(1)) == ["stored"] and client.stats()["owner"] == 1
    assert client.stats()["epoch"] == 2 and client.stats()["unanswered"] == 0
    with pytest.raises(nvme_gpu.Usage, match="owner has the store"):
        client.store
    client.close()
    with pytest.raises(nvme_gpu.Usage, match="closed"):
        client.contains(keys)


def test_what_cannot_share_an_area_is_refused(image, tmp_path):
    with shared(image, tmp_path) as owner:
        for other, word in (({"model": "other"}, "llama"), ({"nbytes": 1 << 20}, "area_bytes")):
            with pytest.raises(nvme_gpu.NvmeGpuError, match=word) as refused:
                shared(image, tmp_path, **other)
            assert refused.value.code == "mismatch"
        with pytest.raises(nvme_gpu.Usage, match="always"):
            shared(image, tmp_path, create="always")
        with pytest.raises(TypeError):
            nvme_gpu.PageStore.shared(owner, page_bytes=PAGE, **MODEL)
        # As nvme_gpu.open, also for a client, which may have to open the device later.
        for word in ("no", "false", 1):
            with pytest.raises(TypeError, match="allow_write is of the type"):
                shared(image, tmp_path, allow_write=word)
        for name, number in (("queues", 4096), ("depth", 4096), ("timeout_ms", 86_400_001)):
            with pytest.raises(nvme_gpu.Usage, match=f"{name} is {number}"):
                shared(image, tmp_path, **{name: number})
        (tmp_path / "open").mkdir(mode=0o755)
        with pytest.raises(nvme_gpu.Usage, match="only this user"):
            shared(image, tmp_path, directory=tmp_path / "open")
    with pytest.raises(nvme_gpu.NvmeGpuError, match="llama"):
        shared(image, tmp_path, model="other", create="never")
    with pytest.raises(nvme_gpu.NvmeGpuError):
        shared(str(tmp_path / "none"), tmp_path)
