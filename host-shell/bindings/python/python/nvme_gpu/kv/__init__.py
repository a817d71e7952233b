"""Caches of keys and values of engines on NVMe, in a :class:`nvme_gpu.PageStore`: found again after a restart, each page
checked when it is loaded. docs/guide/kv.md has the command for each engine.

- :mod:`nvme_gpu.kv.vllm`: ``NvmeOffloadingConnector``, vLLM's offloading connector between its tensors and a drive, and
  ``NvmeTier``, a tier behind its memory of the host
- :mod:`nvme_gpu.kv.lmcache`: ``NvmeBackend``, a storage plugin of LMCache, and ``NvmeL2Adapter`` for its server mode
- :mod:`nvme_gpu.kv.sglang`: ``NvmeStorage``, a dynamic storage back end of SGLang's HiCache

None of them is imported before an engine asks for it.
"""
