"""Run by hand where SGLang 0.5.23 can be imported: nvme_gpu.kv.sglang, made by SGLang's own factory, beside its HiCacheFile, on the CPU.

    python tests/engines/kv_sglang_on_cpu.py FOLDER

The answers of both are compared: pages, and which prefixes can be restored under both rules. Prints one line of JSON.
"""

import json
import sys

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory


class HostPool:
    page_size, layout, dtype = 16, "page_first", torch.bfloat16

    def __init__(self, pages, elements):
        self.memory = torch.randn(pages, elements).to(torch.bfloat16)

    def get_dummy_flat_data_page(self):
        return torch.zeros(self.memory.shape[1], dtype=self.dtype)

    def get_data_page(self, index, flat=True):
        return self.memory[int(index) // self.page_size]

    def set_from_flat_data_page(self, index, page):
        self.memory[int(index) // self.page_size] = page


def config(folder):
    options = {"backend_name": "nvme_gpu", "module_path": "nvme_gpu.kv.sglang", "class_name": "NvmeStorage"}
    sizes = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    words = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "model"}
    return HiCacheStorageConfig(**sizes, **words, extra_config={**options, "device": f"file:{folder}/pages"})


def registered(storage, pools):
    storage.register_mem_pool_host(pools[0])
    for name, pool in zip((PoolName.KV, PoolName.MAMBA), pools):
        storage.register_mem_host_pool_v2(pool, name)
    storage.on_host_pools_registered()
    return storage


def main(folder):
    with open(f"{folder}/pages", "wb") as file:
        file.truncate(64 << 20)
    pools = HostPool(40, 4096), HostPool(40, 1000)
    ours = registered(StorageBackendFactory.create_backend("dynamic", config(folder), pools[0]), pools)
    theirs = registered(HiCacheFile(config(folder), f"{folder}/files"), pools)
    keys, compared = [f"{number:064x}" for number in range(30)], 0
    states = [number for number in range(25) if number % 4]
    for storage in (ours, theirs):
        assert storage.batch_set(keys[:20], [pools[0].get_data_page(16 * number) for number in range(20)])
        places = torch.cat([torch.arange(16 * number, 16 * number + 16) for number in states])
        transfer = PoolTransfer(name=PoolName.MAMBA, host_indices=places, keys=[keys[number] for number in states])
        assert all(storage.batch_set_v2([transfer])[PoolName.MAMBA])
        pages = storage.batch_get(keys[:20], [pools[0].get_dummy_flat_data_page() for _ in range(20)])
        assert all(torch.equal(page, pools[0].memory[number]) for number, page in enumerate(pages))
    for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
        for count in range(1, 8):
            for first in range(6):
                asked = [PoolTransfer(name=PoolName.MAMBA, keys=keys[:count], hit_policy=policy)]
                assert ours.batch_exists_v2(keys[first:], asked) == theirs.batch_exists_v2(keys[first:], asked)
                compared += 1
    ours.close()
    again = registered(StorageBackendFactory.create_backend("dynamic", config(folder), pools[0]), pools)
    assert again.batch_exists(keys) == 20
    again.close()
    print(json.dumps({"pages": 20, "answers_compared": compared, "found_again": 20}))


main(sys.argv[1])
