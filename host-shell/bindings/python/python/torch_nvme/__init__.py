"""Blocks of a drive into tensors, by the names of an earlier draft, over :mod:`nvme_gpu.torch`.

The drive is the one of :func:`init`, or that of the environment variable ``NVME_GPU_DEVICE``.
"""

from __future__ import annotations

import os
from typing import Any

import nvme_gpu
import nvme_gpu.torch
from nvme_gpu._operations import read_into_tensor as _read_into_tensor

__all__ = ["init", "read_into_tensor"]

_DEVICE: str | None = None


def init(device: str) -> None:
    """The drive of later calls: as for :func:`nvme_gpu.open`."""
    global _DEVICE
    _DEVICE = device


def read_into_tensor(tensor: Any, lba: int = 0, device: str | None = None) -> Any:
    """Fills ``tensor`` (contiguous; of the CPU, or of a GPU on its current stream) from block ``lba`` on, and returns it.

    A block is the drive's own, and 512 bytes of a file.
    """
    name = device or _DEVICE or os.environ.get("NVME_GPU_DEVICE")
    if not name:
        raise nvme_gpu.Usage("no drive is named", "call torch_nvme.init(device), or set NVME_GPU_DEVICE")
    gpu = tensor.device.index or 0 if tensor.is_cuda else None
    own = nvme_gpu.torch.store_of(name, gpu).block_bytes
    _read_into_tensor(tensor, name, lba * (own if own > 1 else 512))
    return tensor
