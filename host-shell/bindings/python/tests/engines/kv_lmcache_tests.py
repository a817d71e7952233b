"""A plugin of pytest, by hand: LMCache's own tests of L2 adapters and their controllers run on nvme_gpu.kv.lmcache.NvmeL2Adapter.

    cd LMCACHE_SOURCES/tests/v1/distributed
    PYTHONPATH=TESTS_ENGINES python -m pytest --noconftest -p kv_lmcache_tests test_mock_l2_adapter.py \
        test_l2_adapter_base.py test_prefetch_controller.py test_store_controller.py

With LMCache 0.5.6 on a CPU, those pass that do not look into LMCache's mock, its bandwidth or its capacity.
"""

import os
import tempfile

import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock

from nvme_gpu.kv.lmcache import NvmeL2Adapter

AREA = 64 << 20


class MockAdapter(NvmeL2Adapter):
    """In place of MockL2Adapter: its constructor."""

    def __init__(self, config, l1_memory_desc=None):
        self._folder = tempfile.TemporaryDirectory()
        path = os.path.join(self._folder.name, "pages")
        with open(path, "wb") as file:
            file.truncate(AREA)
        super().__init__({"device": f"file:{path}", "page_bytes": 1 << 20})


mock.MockL2Adapter = MockAdapter
