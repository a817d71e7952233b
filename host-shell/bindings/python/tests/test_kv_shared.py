"""The adapters of nvme_gpu.kv whose ranks share an area, over the stand-ins of test_kv_engines.py."""

from __future__ import annotations

import pytest
from test_kv_engines import (  # fixtures are used by their names
    CHUNK,
    HostPool,
    Key,
    LookupResult,
    PoolName,
    chunk,
    device,
    ended,
    hicache,
    job,
    lmcache,
    loop,
    of,
    plugin,
    sglang,
    spec,
    transfer,
    view,
    vllm,
)

import nvme_gpu

__all__ = ["device", "lmcache", "loop", "sglang", "vllm"]


def test_replicas_of_vllm_share_an_area(vllm, device, tmp_path):
    memory, chunks = view()
    options = {"device": device, "allow_write": True, "shared": True, "directory": str(tmp_path / "sockets")}
    tiers = [vllm.NvmeTier(spec(replica, 2), chunks, "nvme", **options) for replica in (0, 1)]
    tiers[1].submit_store(job(1, [b"key"], [2]))
    assert ended(tiers[1])[0].success
    assert [tier.lookup(b"key", None) for tier in tiers] == [LookupResult.HIT] * 2
    tiers[0].shutdown()
    # The other one owns the area now.
    tiers[1].submit_load(job(2, [b"key"], [5]))
    assert ended(tiers[1])[0].success and memory[5 * CHUNK] == 3
    tiers[1].shutdown()
    with pytest.raises(nvme_gpu.Usage, match="directory"):
        vllm.NvmeTier(spec(), chunks, "nvme", **{**options, "shared": False})
    with pytest.raises(nvme_gpu.Usage, match="shared = yes"):
        vllm.NvmeTier(spec(), chunks, "nvme", **{**options, "shared": "yes"})


def test_ranks_of_sglang_share_an_area(sglang, device, tmp_path):
    import torch

    pools = HostPool(None, 4, 1024), HostPool(None, 4, 100)
    options = {"shared": True, "directory": str(tmp_path / "sockets")}
    for mla in (False, True):
        ranks = [hicache(sglang, device, pools, tp=(rank, 2), mla=mla, **options) for rank in (0, 1)]
        key = f"hash {mla}"
        assert ranks[0].set(key, pools[0].get_data_page(0))
        # Ranks have pages of their own, but not where they replicate keys and values.
        assert [rank.exists(key) for rank in ranks] == [True, mla]
        if mla:
            found = ranks[1].get(key, pools[0].get_dummy_flat_data_page())
            assert torch.equal(found, pools[0].memory[0])
        else:
            assert ranks[1].set(key, pools[0].get_data_page(2))
            for number, rank in enumerate(ranks):
                found = rank.get(key, pools[0].get_dummy_flat_data_page())
                assert torch.equal(found, pools[0].memory[number])
        for rank in ranks:
            rank.close()


def test_ranks_of_sglang_that_replicate_keys_have_states_of_their_own(sglang, device, tmp_path):
    """SGLang lets each rank write its states, and one rank what all have alike, as an index."""
    import torch

    options = {"mla": True, "shared": True, "directory": str(tmp_path / "sockets")}
    places = torch.tensor([0, 1])
    pools = [(HostPool(None, 4, 1024), HostPool(None, 4, 100)) for _ in range(2)]
    ranks = [hicache(sglang, device, pools[rank], tp=(rank, 2), **options) for rank in (0, 1)]
    for rank, (_, states) in zip(ranks, pools):
        assert rank.batch_set_v2([transfer(PoolName.MAMBA, ["hash"], places)]) == {PoolName.MAMBA: [True]}
        rank.register_mem_host_pool_v2(states, "indexer")
    assert ranks[0].set("hash", pools[0][0].get_data_page(0))
    assert ranks[0].batch_set_v2([transfer("indexer", ["hash"], places)]) == {"indexer": [True]}
    wanted = [states.memory.clone() for _, states in pools]
    for number, (rank, (_, states)) in enumerate(zip(ranks, pools)):
        found = rank.batch_exists_v2(["hash"], [transfer(PoolName.MAMBA, ["hash"]), transfer("indexer", ["hash"])])
        assert found.kv_hit_pages == 1
        for name, owner in ((PoolName.MAMBA, number), ("indexer", 0)):
            states.memory[0] = 0
            assert rank.batch_get_v2([transfer(name, ["hash"], places)]) == {name: [True]}
            assert torch.equal(states.memory[0], wanted[owner][0])
        rank.close()


def test_ranks_of_sglang_share_pages_with_those_of_their_shard_alone(sglang, device, tmp_path):
    """With decode context parallelism each rank of a group has other tokens of a page."""
    pools = HostPool(None, 4, 1024), HostPool(None, 4, 100)
    options = {"mla": True, "shared": True, "directory": str(tmp_path / "sockets")}
    ranks = [hicache(sglang, device, pools, tp=(rank, 4), dcp=(rank % 2, 2), **options) for rank in range(4)]
    assert ranks[0].set("hash", pools[0].get_data_page(0))
    assert [rank.exists("hash") for rank in ranks] == [True, False, True, False]
    for rank in ranks:
        rank.close()
    # Nor are they the pages of ranks that divide nothing.
    alone = hicache(sglang, device, pools, tp=(0, 4), **options)
    assert not alone.exists("hash")
    alone.close()


def test_workers_of_lmcache_share_an_area(lmcache, device, loop, tmp_path):
    options = {"shared": True, "directory": str(tmp_path / "sockets")}
    workers = [plugin(lmcache, device, loop, of(worker_id=number, world_size=2), **options) for number in (0, 1)]
    for number, worker in enumerate(workers):
        worker.batched_submit_put_task([Key(1)], [chunk(number)])[0].result(60)
    for number, worker in enumerate(workers):
        assert bytes(worker.get_blocking(Key(1)).byte_array) == bytes(chunk(number).byte_array)
        assert worker.contains(Key(1), pin=True) and worker.unpin(Key(1))
    for worker in workers:
        worker.close()
