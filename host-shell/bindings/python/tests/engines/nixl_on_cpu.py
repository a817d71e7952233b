"""Run by hand where the wheel of NIXL 1.5.1 can be imported: its agents move bytes by the back end NVME_GPU, on the CPU.

    NIXL_PLUGIN_DIR=FOLDER_OF_THE_BACK_END python tests/engines/nixl_on_cpu.py FOLDER

What agents wrote is compared with the files, what they read with what was written; prepared descriptors, thousands of them,
agents in threads, failures by their type, requests that are released in flight. Prints one line of JSON.
"""

import ctypes
import json
import os
import sys
import threading
import time

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
from nixl._bindings import nixlBackendError, nixlInvalidParamError, nixlNotFoundError, nixlRepostActiveError

PAGE = 16384
PAGES = 4096


def agent_on(name, **parameters):
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend("NVME_GPU", {key: str(value) for key, value in parameters.items()})
    return agent


def pages_of(array, page=PAGE):
    start = array.ctypes.data
    return [(start + at, min(page, array.nbytes - at), 0) for at in range(0, array.nbytes, page)]


def registered(agent, array, kind="DRAM"):
    return agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], kind)


def ended(agent, handle, limit=60):
    state, until = agent.transfer(handle), time.monotonic() + limit
    while state == "PROC" and time.monotonic() < until:
        state = agent.check_xfer_state(handle)
    return state


def moved(agent, operation, memory, storage, kind="BLOCK", memory_kind="DRAM"):
    lists = agent.get_xfer_descs(memory, memory_kind), agent.get_xfer_descs(storage, kind)
    handle = agent.initialize_xfer(operation, *lists, agent.name)
    state = ended(agent, handle)
    agent.release_xfer_handle(handle)
    return state


def raises(kind, call, *words):
    try:
        call(*words)
    except kind:
        return True
    return False


def bytes_in_a_file(folder, seen):
    path = f"{folder}/blocks"
    with open(path, "wb") as file:
        file.truncate(PAGE * PAGES + 999)
    agent = agent_on("blocks", device=f"file:{path}", queues=2)
    seen["memory"] = agent.get_backend_mem_types("NVME_GPU")
    assert agent.get_backend_params("NVME_GPU")["queues"] == "2"
    out = np.random.default_rng(1).integers(0, 256, PAGE * PAGES, dtype=np.uint8)
    back = np.zeros_like(out)
    registered(agent, out), registered(agent, back)
    agent.register_memory([(0, 0, 0, "")], "BLOCK")
    places = np.random.default_rng(2).permutation(PAGES)
    storage = [(999 + int(place) * PAGE, PAGE, 0) for place in places]
    begun = time.monotonic()
    assert moved(agent, "WRITE", pages_of(out), storage) == "DONE"
    seen["write_s"] = round(time.monotonic() - begun, 2)
    wanted = np.empty_like(out)
    wanted.reshape(PAGES, PAGE)[places] = out.reshape(PAGES, PAGE)
    assert np.array_equal(np.fromfile(path, dtype=np.uint8, offset=999), wanted)
    assert not np.fromfile(path, dtype=np.uint8, count=999).any()
    begun = time.monotonic()
    assert moved(agent, "READ", pages_of(back), storage) == "DONE" and np.array_equal(back, out)
    seen["read_s"] = round(time.monotonic() - begun, 2)
    # Prepared descriptors, of which requests choose, posted again and again.
    lists = agent.get_xfer_descs(pages_of(back), "DRAM"), agent.get_xfer_descs(storage, "BLOCK")
    local, remote = agent.prep_xfer_dlist("NIXL_INIT_AGENT", lists[0]), agent.prep_xfer_dlist(agent.name, lists[1])
    chosen = list(range(5, PAGES, 7))
    handle = agent.make_prepped_xfer("READ", local, chosen, remote, chosen)
    for _ in range(3):
        back[:] = 0
        assert ended(agent, handle) == "DONE"
        pages = back.reshape(PAGES, PAGE)
        assert np.array_equal(pages[chosen], out.reshape(PAGES, PAGE)[chosen]) and not pages[4].any()
    agent.release_xfer_handle(handle)
    facts = agent.query_memory([(0, 0, 0, ""), (0, 0, 3, "")], "NVME_GPU", "BLOCK")
    assert facts[0]["size"] == str(PAGE * PAGES + 999) and facts[1] is None
    seen["descriptors"] = PAGES


def failures(folder, seen):
    assert raises(nixlBackendError, lambda: agent_on("bad", device="nonsense"))
    assert raises(nixlBackendError, lambda: agent_on("bad", device=f"file:{folder}/nothing"))
    assert raises(nixlBackendError, lambda: agent_on("bad", queues="many"))
    agent = agent_on("failures", device="sim:mem?size=1MiB&fault=status:0x281@op=read,nth=2")
    data = np.zeros(8 * PAGE, dtype=np.uint8)
    registered(agent, data)
    assert raises(nixlBackendError, agent.register_memory, [(0, 0, 1, "")], "BLOCK")
    assert raises(nixlBackendError, agent.register_memory, [(1 << 20, 1, 0, "")], "BLOCK")
    assert raises(nixlNotFoundError, agent.register_memory, [(4096, 4096, 0, "")], "VRAM")
    assert raises(nixlNotFoundError, agent.register_memory, [(0, 0, 0, "key")], "OBJ")
    agent.register_memory([(0, 0, 0, "")], "BLOCK")
    past = [((1 << 20) - PAGE + 1, PAGE, 0)]
    assert raises(nixlInvalidParamError, moved, agent, "WRITE", pages_of(data)[:1], past)
    # The second command fails, and so does its request; the next one is well.
    places = [(2 * at * PAGE, PAGE, 0) for at in range(8)]
    assert raises(nixlBackendError, moved, agent, "READ", pages_of(data), places)
    assert moved(agent, "READ", pages_of(data), places) == "DONE"
    seen["failures"] = "typed"


def agents_in_threads(seen):
    device, size, wrong = "sim:mem?size=64MiB", 1 << 20, []

    def work(number, agent):
        out = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
        back = np.zeros_like(out)
        registered(agent, out), registered(agent, back)
        storage = [(number * size + at, 4096, 0) for at in range(0, size, 4096)]
        for _ in range(4):
            back[:] = 0
            states = moved(agent, "WRITE", pages_of(out, 4096), storage), moved(agent, "READ", pages_of(back, 4096), storage)
            if states != ("DONE", "DONE") or not np.array_equal(out, back):
                wrong.append(number)

    agents = [agent_on(f"thread {number}", device=device) for number in range(2)]
    for agent in agents:
        agent.register_memory([(0, 0, 0, "")], "BLOCK")
    threads = [threading.Thread(target=work, args=(number, agents[number])) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # The second agent reads what the first one wrote: both have the same drive.
    back = np.zeros(size, dtype=np.uint8)
    registered(agents[1], back)
    assert moved(agents[1], "READ", pages_of(back), [(at, PAGE, 0) for at in range(0, size, PAGE)]) == "DONE"
    assert np.array_equal(back, np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    seen["agents"] = len(agents)


def release_in_flight(seen):
    agent = agent_on("slow", device="sim:mem?size=4MiB&latency=2s")
    hasty = agent_on("hasty", device="sim:mem?size=4MiB&latency=2s", release_ms=0)
    for one in agent, hasty:
        data = np.zeros(1 << 20, dtype=np.uint8)
        registered(one, data)
        one.register_memory([(0, 0, 0, "")], "BLOCK")
        storage = [(at, PAGE, 0) for at in range(0, 1 << 20, PAGE)]
        lists = one.get_xfer_descs(pages_of(data), "DRAM"), one.get_xfer_descs(storage, "BLOCK")
        handle = one.initialize_xfer("READ", *lists, one.name)
        begun = time.monotonic()
        assert one.transfer(handle) == "PROC" and one.check_xfer_state(handle) == "PROC"
        assert time.monotonic() - begun < 1, "a call waited for the drive"
        if one is hasty:
            assert raises(nixlRepostActiveError, one.release_xfer_handle, handle)
            time.sleep(4)
        one.release_xfer_handle(handle)
        seen["released"] = seen.get("released", 0) + 1


def files(folder, seen):
    agent = agent_on("files")
    out = np.random.default_rng(5).integers(0, 256, 1 << 20, dtype=np.uint8)
    back = np.zeros_like(out)
    registered(agent, out), registered(agent, back)
    begun = time.monotonic()
    numbers = [os.open(f"{folder}/page{number}", os.O_RDWR | os.O_CREAT) for number in range(16)]
    agent.register_memory([(0, 65536, number, "") for number in numbers], "FILE")
    seen["files_registered_s"] = round(time.monotonic() - begun, 2)
    storage = [(0, 65536, number) for number in numbers]
    assert moved(agent, "WRITE", pages_of(out, 65536), storage, "FILE") == "DONE"
    stored = b"".join(open(f"{folder}/page{number}", "rb").read() for number in range(16))
    assert stored == out.tobytes()
    assert moved(agent, "READ", pages_of(back, 65536), storage, "FILE") == "DONE" and np.array_equal(out, back)
    seen["files"] = len(numbers)


def memory_of_a_gpu(seen):
    """Where libcuda.so.1 is loaded: that of a GPU, or the stand-in."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    gpu, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    out = np.random.default_rng(9).integers(0, 256, 4 << 20, dtype=np.uint8)
    back = np.zeros_like(out)
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(gpu), 0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
    cuda.cuCtxSetCurrent(context)
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(out.nbytes)) == 0
    start, size = memory, ctypes.c_size_t(out.nbytes)
    assert cuda.cuMemcpyHtoD_v2(start, out.ctypes.data_as(ctypes.c_void_p), size) == 0
    agent = agent_on("gpu", device="sim:mem?size=16MiB&queues=32", gpu=0)
    agent.register_memory([(memory.value, out.nbytes, 0, "")], "VRAM")
    agent.register_memory([(0, 0, 0, "")], "BLOCK")
    pages = [(memory.value + at, PAGE, 0) for at in range(0, out.nbytes, PAGE)]
    storage = [(at * 3, PAGE, 0) for at in range(0, out.nbytes, PAGE)]
    assert moved(agent, "WRITE", pages, storage, memory_kind="VRAM") == "DONE"
    assert cuda.cuMemsetD8_v2(start, ctypes.c_ubyte(0), size) == 0
    assert moved(agent, "READ", pages, storage, memory_kind="VRAM") == "DONE"
    assert cuda.cuMemcpyDtoH_v2(back.ctypes.data_as(ctypes.c_void_p), start, size) == 0
    assert np.array_equal(back, out)
    seen["pages_of_a_gpu"] = len(pages)


def main(folder):
    agent = nixl_agent("list", nixl_agent_config(backends=[]))
    seen = {"plugins": agent.get_plugin_list(), "of_plugin": agent.get_plugin_mem_types("NVME_GPU")}
    bytes_in_a_file(folder, seen)
    failures(folder, seen)
    agents_in_threads(seen)
    release_in_flight(seen)
    files(folder, seen)
    memory_of_a_gpu(seen)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
