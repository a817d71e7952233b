"""PyTorch: operations that torch.compile keeps and orders, and an embedding whose weights lie on NVMe.

>>> import torch, nvme_gpu, nvme_gpu.torch
>>> store = nvme_gpu.open("sim:mem?size=16MiB")
>>> table = store.table(0, shape=(1000, 4), dtype="float32")
>>> state = nvme_gpu.torch.state(table)
>>> torch.ops.nvme_ops.scatter(state, torch.tensor([7]), torch.ones(1, 4))
>>> torch.ops.nvme_ops.gather(state, torch.tensor([7, 8])).tolist()
[[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
>>> store.close()
"""

from ._disk_embedding import DiskEmbedding
from ._disk_optimizers import DiskAdagrad, DiskSGD
from ._gradients import average_gradients, clip_grad_norm_, prepare_for_ddp
from ._operations import state, store_of

__all__ = [
    "DiskAdagrad",
    "DiskEmbedding",
    "DiskSGD",
    "average_gradients",
    "clip_grad_norm_",
    "prepare_for_ddp",
    "state",
    "store_of",
]
