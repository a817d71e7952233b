"""A plugin of pytest, by hand: vLLM's own tests of tiers run on nvme_gpu.kv.vllm.NvmeTier in place of vLLM's tiers.

    cd VLLM_SOURCES/tests/v1/kv_offload/tiering
    PYTHONPATH=TESTS_ENGINES python -m pytest --noconftest -p kv_vllm_tests test_fs_tier.py test_tiering_offloading.py

With vLLM 0.32.0 on a CPU, those that do not look into files, threads or dictionaries of vLLM's own tiers pass.
"""

import os
import tempfile
from types import SimpleNamespace

import vllm.v1.kv_offload.tiering.example.manager as example
import vllm.v1.kv_offload.tiering.fs.manager as fs
from vllm.v1.kv_offload.base import Medium

from nvme_gpu.kv.vllm import NvmeTier

AREA = 64 << 20
PARALLEL = SimpleNamespace(
    is_parallelism_agnostic=True, data_parallel_index=0, data_parallel_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1
)
SPEC = SimpleNamespace(
    config=SimpleNamespace(
        parallel=PARALLEL,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
        groups=(),
        model=SimpleNamespace(name="model", dtype="float16"),
        cache=SimpleNamespace(tokens_per_hash=16),
    ),
    blocks_per_chunk=1,
    kv_events_config=None,
)


def area(folder):
    path = os.path.join(folder, "pages")
    if not os.path.exists(path):
        with open(path, "wb") as file:
            file.truncate(AREA)
    return path


class FsTier(NvmeTier):
    """In place of FileSystemTierManager: its constructor, and what its tests look at."""

    def __init__(self, offloading_spec, primary_kv_view, tier_type, root_dir, n_read_threads=0, n_write_threads=0, **options):
        path = area(root_dir)
        super().__init__(offloading_spec, primary_kv_view, tier_type, device=f"file:{path}", **options)
        self._lookup_manager = SimpleNamespace(_pending_results=SimpleNamespace(empty=lambda: False))
        self.file_mapper = SimpleNamespace(get_file_name=lambda key: path)


class Chunks:
    """In place of the dictionary of ExampleSecondaryTierManager."""

    def __init__(self, tier):
        self.pages, self.size = tier._pages, tier.block_size_bytes

    def __contains__(self, key):
        return self.pages.contains(self.pages.keys([key]))[0]

    def __setitem__(self, key, value):
        assert self.pages.put(self.pages.keys([key]), [bytes(self.size)]) == ["stored"]

    def __len__(self):
        return len(self.pages)


class ExampleTier(NvmeTier):
    """In place of ExampleSecondaryTierManager, whose jobs have ended when they are submitted."""

    medium = Medium.CPU

    def __init__(self, offloading_spec, primary_kv_view, tier_type, custom_param=0, **options):
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(SPEC, primary_kv_view, tier_type, device=f"file:{area(self._folder.name)}", **options)

    def get_finished_jobs(self):
        self.drain_jobs()
        return super().get_finished_jobs()

    @property
    def chunks(self):
        return Chunks(self)

    def get_num_chunks(self):
        return len(self._pages)


fs.FileSystemTierManager = FsTier
example.ExampleSecondaryTierManager = ExampleTier
