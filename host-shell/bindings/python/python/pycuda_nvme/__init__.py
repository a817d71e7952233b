"""Blocks of a drive into memory of a GPU, by the names of an earlier draft, over :mod:`nvme_gpu`."""

from __future__ import annotations

from typing import Any

import nvme_gpu
from nvme_gpu import _store

__all__ = ["NVMeGPU"]


class NVMeGPU:
    """A drive, or a file, for reads of whole blocks into memory of a GPU.

    ``device``: as for :func:`nvme_gpu.open`. ``gpu``: as CUDA counts it. ``block_bytes``: bytes of a logical block;
    None is the drive's own, and 512 for a file.
    """

    def __init__(self, device: str, gpu: int | None = 0, block_bytes: int | None = None, **options: Any) -> None:
        self.store = nvme_gpu.open(device, gpu, **options)
        own = self.store.block_bytes
        self.block_bytes = block_bytes or (own if own > 1 else 512)

    def read(self, lba: int, count: int, gpu_ptr: Any, stream: Any = None) -> None:
        """Reads ``count`` blocks from block ``lba`` on to the address ``gpu_ptr``: a number, or what ``int()`` takes, such
        as an allocation of pycuda, or any buffer. Waits for them."""
        nbytes = count * self.block_bytes
        if hasattr(gpu_ptr, "__cuda_array_interface__") or hasattr(gpu_ptr, "__dlpack__"):
            buffer: Any = gpu_ptr
        else:
            buffer = _Address(int(gpu_ptr), nbytes, gpu_ptr)
        self.store.read_into(buffer, lba * self.block_bytes, stream=stream).result()

    def read_to_gpu(self, lba: int = 0, size_mb: float = 1) -> nvme_gpu.Array:
        """``size_mb`` MiB from block ``lba`` on, in new memory of the GPU (of the host for ``gpu=None``)."""
        nbytes = int(size_mb * (1 << 20))
        on_gpu = self.store._native if self.store.gpu is not None else None
        made = nvme_gpu.Array((nbytes,), "uint8", 1, on_gpu)
        view: Any = made if on_gpu is not None else _store._host_bytes(made)
        self.store.read_into(view, lba * self.block_bytes).result()
        return made

    def close(self) -> None:
        """Closes the drive."""
        self.store.close()

    def __enter__(self) -> NVMeGPU:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Address:
    """An address of the GPU as an array of bytes."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }
