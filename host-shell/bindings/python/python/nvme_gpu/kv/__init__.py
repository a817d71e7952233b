"""Caches of keys and values of engines on NVMe, in a :class:`nvme_gpu.PageStore`: found again after a restart, each page
checked when it is loaded. docs/guide/kv.md has the command for each engine.

- :mod:`nvme_gpu.kv.vllm`: ``NvmeTier``, a secondary tier of vLLM's offloading connector
- :mod:`nvme_gpu.kv.lmcache`: ``NvmeBackend``, a storage plugin of LMCache
- :mod:`nvme_gpu.kv.sglang`: ``NvmeStorage``, a dynamic storage back end of SGLang's HiCache

None of them is imported before an engine asks for it.
"""
