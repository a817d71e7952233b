"""Run by hand where LMCache 0.5.6 can be imported: nvme_gpu.kv.lmcache, made by LMCache's own launcher, in its memory, on the CPU.

    python tests/engines/kv_lmcache_on_cpu.py FOLDER

Chunks, whole and partial, are stored, loaded by each of LMCache's calls, found after a restart, and one that was changed on
the disk is a miss. Prints one line of JSON.
"""

import asyncio
import json
import sys
import threading

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends

METADATA = {"model_name": "model", "world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0}
SHAPE = {"kv_dtype": torch.bfloat16, "kv_shape": (4, 2, 16, 8, 64), "chunk_size": 16}


def made(folder, loop):
    options = {
        "storage_plugin.nvme.module_path": "nvme_gpu.kv.lmcache",
        "storage_plugin.nvme.class_name": "NvmeBackend",
        "nvme_gpu.device": f"file:{folder}/pages",
    }
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=16, local_cpu=True, max_local_cpu_size=0.1, storage_plugins=["nvme"], extra_config=options
    )
    metadata = LMCacheMetadata(**METADATA, **SHAPE)
    backends = CreateStorageBackends(config, metadata, loop, "cpu")
    return metadata, backends["nvme"], backends["LocalCPUBackend"]


def main(folder):
    with open(f"{folder}/pages", "wb") as file:
        file.truncate(64 << 20)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    metadata, backend, memory = made(folder, loop)
    keys = [CacheEngineKey("model", 1, 0, number, torch.bfloat16) for number in range(20)]
    chunks = []
    for number in range(16):
        tokens = 16 if number < 15 else 5
        chunks.append(memory.allocate(metadata.get_shapes(tokens), metadata.get_dtypes(), MemoryFormat.KV_2LTD))
        chunks[-1].tensor.copy_(torch.randn(chunks[-1].tensor.shape))
    seen = []
    for future in backend.batched_submit_put_task(keys[:16], chunks, on_complete_callback=seen.append):
        future.result(60)
    assert seen == keys[:16] and backend.batched_submit_put_task(keys[:16], chunks) is None
    assert all(chunk.get_ref_count() == 1 for chunk in chunks)
    backend.close()
    metadata, backend, memory = made(folder, loop)
    assert backend.batched_contains(keys) == 16
    ways = [
        [backend.get_blocking(key) for key in keys[:16]],
        backend.batched_get_blocking(keys)[:16],
        asyncio.run_coroutine_threadsafe(backend.batched_get_non_blocking("id", keys), loop).result(60),
    ]
    for loaded in ways:
        assert all(torch.equal(one.tensor, chunk.tensor) for one, chunk in zip(loaded, chunks, strict=True))
        for one in loaded:
            one.ref_count_down()
    with open(f"{folder}/pages", "r+b") as file:
        file.seek(file.read().index(bytes(chunks[3].byte_array[:4096])) + 77)
        file.write(b"\xff\xfe")
    assert backend.contains(keys[3]) and backend.get_blocking(keys[3]) is None and not backend.contains(keys[3])
    # LMCache frees its memory before it closes its back ends.
    further = [CacheEngineKey("model", 1, 0, number, torch.bfloat16) for number in range(100, 116)]
    assert backend.batched_submit_put_task(further, chunks)
    memory.close()
    backend.close()
    print(json.dumps({"chunks": 16, "ways": len(ways), "damaged_is_a_miss": True}))


main(sys.argv[1])
