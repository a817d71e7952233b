"""Gradients of embeddings on NVMe: averaged over processes, and clipped."""

from __future__ import annotations

import math
import os
import socket
from typing import Any

import torch as _torch

from ._disk_embedding import DiskEmbedding, sparse_rows, table_of
from ._errors import NvmeGpuError, Usage
from ._table import Table


def _weights(module: Any) -> list[Any]:
    """The weights on NVMe of ``module``, each once, in the order of its modules."""
    found: dict[int, Any] = {}
    for one in module.modules():
        if isinstance(one, DiskEmbedding):
            found.setdefault(id(one.weight), one.weight)
    return list(found.values())


def _world(group: Any = None) -> int:
    dist = _torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return int(dist.get_world_size(group))


def check_averaged(weight: Any) -> None:
    """Raises :class:`Usage` for a gradient of this process alone, of several that train the same rows."""
    if _world() > 1 and not weight.is_averaged:
        raise Usage(
            f"the gradient of a DiskEmbedding is that of one of {_world()} ranks",
            "call nvme_gpu.torch.average_gradients(model) before the step, or say ranks='separate'",
        )


def check_rows(grad: Any) -> None:
    """Raises :class:`Usage` for a sparse gradient of rows that its table does not have. Such a table says that they are no
    error, and torch sums gradients by their ids without a look at them: it would write past its memory."""
    rows = int(grad.shape[0])
    ids = grad._indices()[0]
    wrong = ids[(ids < 0) | (ids >= rows)]
    if wrong.numel():
        raise Usage(
            f"the gradient has row {int(wrong[0])}, and the table rows from 0 to {rows - 1}",
            "no row was written: give the embedding ids of its rows, or padding_idx",
        )


def prepare_for_ddp(module: Any) -> None:
    """Has ``DistributedDataParallel(module)``, which is called next, leave the embeddings on NVMe alone.

    Call :func:`average_gradients` between the last backward and what uses the gradients: a scaler, clipping, the step.
    """
    weights = {id(one) for one in _weights(module)}
    names = [name for name, one in module.named_parameters() if id(one) in weights]
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    ddp = _torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, [*before, *names])


def average_gradients(module: Any, group: Any = None) -> None:
    """Averages the gradients of the embeddings on NVMe in ``module`` over the ranks of ``group`` (None: all), as
    DistributedDataParallel does with those of other parameters. Every rank calls it, also one that has no gradient.

    Raises :class:`Usage` when ranks share a file: each of them would add the same change to it.
    """
    ranks = _world(group)
    if ranks == 1:
        return
    for weight in _weights(module):
        _check_apart(table_of(weight), ranks, group)
        grad = (weight if weight.grad is None else weight.grad).detach()
        check_rows(grad)
        grad = grad.coalesce()
        # A gradient that was set to zero has lost the shape of its rows.
        values = grad.values().reshape(-1, weight.shape[1])
        ids, values = _gathered(grad.indices()[0], values, ranks, group)
        weight.grad = sparse_rows(ids.unsqueeze(0), values / ranks, weight.shape).coalesce()
        weight.is_averaged = True


def _gathered(ids: Any, values: Any, ranks: int, group: Any) -> tuple[Any, Any]:
    """Those of all ranks, one after the other. Back ends reduce no sparse tensors, or not of different lengths."""
    dist = _torch.distributed
    count = _torch.tensor([ids.shape[0]], device=ids.device)
    counts = [_torch.empty_like(count) for _ in range(ranks)]
    dist.all_gather(counts, count, group=group)
    lengths = [int(one) for one in counts]

    def all_of(mine: Any) -> Any:
        room = mine.new_zeros((max(lengths), *mine.shape[1:]))
        room[: mine.shape[0]] = mine
        found = [_torch.empty_like(room) for _ in range(ranks)]
        dist.all_gather(found, room, group=group)
        return _torch.cat([one[:length] for one, length in zip(found, lengths)])

    return all_of(ids), all_of(values)


def _check_apart(table: Table, ranks: int, group: Any) -> None:
    """Drives belong to one process; a file may be open in several."""
    mine: list[tuple[str, int, int]] | str
    try:
        mine = _files(table.store._device)
    except OSError as error:
        # The other ranks wait for this one: they get the error in its place.
        mine = str(error)
    all_of_them: list[Any] = [None] * ranks
    _torch.distributed.all_gather_object(all_of_them, mine, group=group)
    seen: set[Any] = set()
    for rank, files in enumerate(all_of_them):
        if isinstance(files, str):
            raise NvmeGpuError(f"rank {rank} cannot look at the file of its rows: {files}", "check that file", "file")
        if seen & set(files):
            raise Usage(
                "several ranks train rows of one file, which would be changed once by each",
                "give each rank a file of its own",
            )
        seen |= set(files)


def _files(device: str) -> list[tuple[str, int, int]]:
    """Host, device and inode of the files that a store lies on."""
    if device.startswith(("stripe:", "joined:")):
        kind, _, members = device.partition(":")
        if kind == "stripe":
            members = members.rsplit("?stripe=", 1)[0]
        return [file for one in members.split("|") for file in _files(one)]
    # A text without a colon before its first slash is a path, as Store.open has it.
    if not device.startswith("file:") and ":" in device.partition("/")[0]:
        return []
    found = os.stat(device.removeprefix("file:"))
    return [(socket.gethostname(), found.st_dev, found.st_ino)]


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
    """``torch.nn.utils.clip_grad_norm_`` for gradients that may be sparse, which torch 2 refuses: scales all of them so
    that their norm together is at most ``max_norm``; returns what it was."""
    if isinstance(max_norm, bool) or not 0 <= float(max_norm) < math.inf:
        raise Usage(f"max_norm is {max_norm!r}", "use a finite number from 0 on")
    found = [parameters] if isinstance(parameters, _torch.Tensor) else list(parameters)
    values = [_values(one) for one in found if one.grad is not None]
    # A norm of no numbers is an error for torch where it is a maximum.
    values = [one for one in values if one.numel()]
    if not values:
        return _torch.tensor(0.0)
    norms = [_torch.linalg.vector_norm(one, norm_type).to(values[0].device) for one in values]
    total = _torch.linalg.vector_norm(_torch.stack(norms), norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for one in values:
        one.mul_(scale.to(one.device))
    return total


def _values(parameter: Any) -> Any:
    """The elements of its gradient: of a sparse one those of each row summed."""
    grad = parameter.grad.detach()
    if grad.layout is not _torch.sparse_coo:
        return grad
    if not parameter.grad.is_coalesced():
        check_rows(parameter.grad)
        parameter.grad = parameter.grad.detach().coalesce()
    return parameter.grad._values()
