"""Models of transformers whose experts stay on a drive: the router chooses as before, and only what it chose is read.

Needs ``transformers`` (tested with 5.19.0) and ``torch``, which are imported when a function of this module is called.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from typing import Any

from . import _arguments
from ._errors import Usage
from ._expert_blocks import ExpertBlock, find_blocks, release, strip
from ._expert_cache import CachePlan, ExpertBank, ExpertCache, ExpertCounts, OnReadError
from ._expert_layer import ExpertLayer, module_class
from ._expert_slots import ExpertSlots, check_stored
from .compute._expert_files import ExpertFiles

__all__ = ["ExpertCounts", "ExpertStream", "load_model", "stream_experts"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class ExpertStream:
    """The experts of a model on a drive, and their cache. Made by :func:`stream_experts` and :func:`load_model`. As a
    context manager it closes itself; the model computes nothing after that."""

    def __init__(self, files: ExpertFiles, owns: bool, caches: list[ExpertCache], banks: list[ExpertBank]) -> None:
        self._files, self._owns, self._caches, self._banks = files, owns, caches, banks
        self._is_closed = False

    @property
    def files(self) -> ExpertFiles:
        """The files from which experts are read."""
        return self._files

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory of slots, buffers of reads and conversion: ``cache_bytes`` at most."""
        return sum(one.plan.nbytes for one in self._caches)

    @property
    def slots(self) -> int:
        """Experts that the cache holds at most."""
        return sum(one.plan.slots for one in self._caches)

    def counts(self) -> ExpertCounts:
        """What was counted since the model was streamed."""
        counts = zip(*(one.counts() for one in self._caches))
        return ExpertCounts(*(sum(numbers) for numbers in counts))

    def close(self) -> None:
        """Waits for reads under way, frees the cache, and closes the files that :func:`stream_experts` opened."""
        if not self._is_closed:
            self._is_closed = True
            for cache in self._caches:
                cache.close()
            if self._owns:
                self._files.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Usage("the files of the experts are closed", "close the stream later, or load the model again")

    def __enter__(self) -> ExpertStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<nvme_gpu.transformers.ExpertStream of {len(self._banks)} layers, {self.slots} slots>"


def stream_experts(
    model: Any,
    source: Any,
    *,
    cache_bytes: int,
    device: Any = None,
    on_error: OnReadError = "raise",
    share: float = 0.5,
    reads: int = 16,
    guesses: int = 0,
    **options: Any,
) -> ExpertStream:
    """Replaces the experts of each layer of ``model`` by the same experts in files, and frees their parameters.

    The model's routers and products are used as they are, so that tokens are those of the model in memory. Experts that a
    step chose are read once for all its tokens, all reads before the first product, and stay in a cache from which the one
    that was used the longest time ago makes room for another; those of a step never do so for each other.

    ``model``: of gpt-oss, Mixtral, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, DeepSeek-V3, DeepSeek-V4 or GLM-4.5, with
    ``experts_implementation`` ``"eager"``, ``"batched_mm"`` or ``"grouped_mm"``. ``source``: the folder of a checkpoint, an
    :class:`~nvme_gpu.compute.ExpertFiles`, or what that takes, with its ``options``. Layers are found by their numbers.

    ``cache_bytes``: memory in bytes of ``device`` for experts in the dtype of the model, and of the host for ``reads``
    experts in the form of the file that are read at a time, as many as ``guesses``, and for conversion. ``device``: where
    the parameters are, without it. ``share``: a step that wants more than this part of a layer's experts reads them in pieces
    that leave the cache to the others, unless there is free room. ``guesses``: experts of the next layer that are read
    before its router chose, by its router and this layer's input; they evict nothing.

    ``on_error``: ``"raise"`` raises what the read ended with, and the step may be repeated. With ``"nan"`` the results of
    exactly the tokens that chose the expert are NaN, which :meth:`ExpertStream.counts` counts.

    One stream of a GPU at a time may use the model. It computes no gradients, and is not saved.

    Raises :class:`Usage`, with the name, for blocks of classes that are not known, tensors that are missing, of other shapes,
    of an unknown format or with another meaning, and a cache in which no expert fits. Nothing is replaced then.
    """
    import torch

    if on_error not in ("raise", "nan"):
        raise Usage(f"on_error is {on_error!r}", "use 'raise' or 'nan'")
    numbers = _numbers(cache_bytes, reads, guesses, share)
    blocks = find_blocks(model)
    files, owns = _files_of(source, options)
    try:
        banks, scratch = _banks(files, blocks)
        where = [_device(torch, model, block, device) for block in blocks]
        caches = _caches(torch, blocks, where, banks, scratch, numbers)
    except BaseException:
        if owns:
            files.close()
        raise
    stream = ExpertStream(files, owns, list(dict.fromkeys(caches)), banks)
    check = stream._check_open
    layers = [ExpertLayer(torch, *one, check, on_error) for one in zip(blocks, banks, caches)]
    for layer, following in zip(layers, layers[1:] if guesses else []):
        layer.following = following
    for block, layer in zip(blocks, layers):
        release(block.module)
        setattr(block.parent, block.name.rpartition(".")[2], module_class()(layer))
    return stream


def load_model(
    folder: str | os.PathLike[str],
    source: Any = None,
    *,
    cache_bytes: int,
    model_class: Any = None,
    stream_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, ExpertStream]:
    """A model whose experts are never in memory as a whole: everything but the experts is loaded by ``from_pretrained`` of
    transformers, and :func:`stream_experts` reads the experts. Returns the model, in eval mode, and its stream.

    ``folder``: the checkpoint on this machine. ``source``: where the experts are; None: in ``folder``, whose shards without
    expert tensors alone are read as a whole. ``model_class``: None: what the configuration names. ``stream_options``:
    arguments of :func:`stream_experts`. ``options``: those of ``from_pretrained``, such as ``dtype`` and ``device_map``.

    The quantisation of gpt-oss (MXFP4) concerns experts alone and is left out. FP8 of other matrices is converted while they
    are loaded, unless ``quantization_config`` says otherwise.

    Raises what those two raise, and :class:`Usage` for a checkpoint without weights of other modules.
    """
    import transformers

    path = os.fspath(folder)
    config = options.pop("config", None) or transformers.AutoConfig.from_pretrained(path)
    kind = model_class or getattr(transformers, (config.architectures or ["none"])[0], None)
    if kind is None:
        raise Usage(f"the configuration names the class {config.architectures}", "pass model_class=")
    config = _leave_quantisation_out(transformers, config, options)

    def without_experts(self: Any, *arguments: Any, **more: Any) -> None:
        kind.__init__(self, *arguments, **more)
        strip(self)

    # What the model does not have is no surprise, and transformers does not read it.
    ignored = [*(getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or []), r"\.experts\."]
    about_class = {"__init__": without_experts, "__module__": kind.__module__, "_keys_to_ignore_on_load_unexpected": ignored}
    made: Any = type(kind.__name__, (kind,), about_class)
    model, about = made.from_pretrained(path, config=config, output_loading_info=True, **options)
    if about["missing_keys"]:
        raise Usage(
            f"{path} lacks {sorted(about['missing_keys'])[0]} and {len(about['missing_keys']) - 1} more",
            "get the checkpoint again",
        )
    model.__class__ = kind
    model.eval()
    stream = stream_experts(model, path if source is None else source, cache_bytes=cache_bytes, **(stream_options or {}))
    return model, stream


def _leave_quantisation_out(transformers: Any, config: Any, options: dict[str, Any]) -> Any:
    """The configuration with which everything but the experts is loaded; the caller's own stays as it is."""
    found = getattr(config, "quantization_config", None)
    if found is None or "quantization_config" in options:
        return config
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    if method == "mxfp4":
        config = copy.deepcopy(config)
        del config.quantization_config
    elif method == "fp8":
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        raise Usage(f"the checkpoint is quantised by {method}", "pass quantization_config= for what is not an expert")
    return config


def _numbers(cache_bytes: Any, reads: Any, guesses: Any, share: Any) -> tuple[int, int, int, float]:
    part = float(share)
    if not 0 < part <= 1:
        raise Usage(f"share is {share}", "use a part above 0, and 1 at most")
    return (
        _arguments.whole("cache_bytes", cache_bytes, 1, (1 << 63) - 1),
        _arguments.whole("reads", reads, 1, 4096),
        _arguments.whole("guesses", guesses, 0, 4096),
        part,
    )


def _files_of(source: Any, options: dict[str, Any]) -> tuple[ExpertFiles, bool]:
    if isinstance(source, ExpertFiles):
        if options:
            raise TypeError(f"options of what is open already: {', '.join(options)}")
        return source, False
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
        names = [os.path.join(source, name) for name in (_INDEX, _SINGLE)]
        there = [name for name in names if os.path.exists(name)]
        if not there:
            raise Usage(f"{os.fspath(source)} has no {_INDEX} and no {_SINGLE}", "name the files")
        source = there[0]
    return ExpertFiles(source, **options), True


def _banks(files: ExpertFiles, blocks: list[ExpertBlock]) -> tuple[list[ExpertBank], list[int]]:
    """The experts of each block in the files, and how many numbers their conversion needs memory for."""
    banks, scratch = [], []
    for number, block in enumerate(blocks):
        layout = files.layout(block.layer)
        if len(layout) != block.experts:
            raise Usage(
                f"{layout.name} has {len(layout)} experts, and {block.name} {block.experts}", "name the files of this model"
            )
        scratch.append(check_stored(layout, block.form, block.name))
        banks.append(ExpertBank(number, layout, files._check_unchanged))
    return banks, scratch


def _device(torch: Any, model: Any, block: ExpertBlock, device: Any) -> Any:
    """Where the experts of a block go: parameters without memory lie where their router does."""
    if device is not None:
        # "cuda" becomes "cuda:0": tensors name their devices with a number, and inputs are compared with it.
        found = torch.empty(0, device=device).device
    elif block.device.type != "meta":
        found = block.device
    else:
        others = [*block.parent.parameters(), *model.parameters(), torch.empty(0)]
        found = next(one.device for one in others if one.device.type != "meta")
    if found.type not in ("cpu", "cuda"):
        raise Usage(f"{block.name} is on the device {found}", "use the CPU, or a GPU of CUDA")
    return found


def _caches(
    torch: Any,
    blocks: list[ExpertBlock],
    where: list[Any],
    banks: list[ExpertBank],
    scratch: list[int],
    numbers: tuple[int, int, int, float],
) -> list[ExpertCache]:
    """The cache of each block: one for all of a form on a device, which has as large a part of the budget as its experts
    of all."""
    budget, reads, guesses, share = numbers
    keys = [(block.form, block.dtype, device) for block, device in zip(blocks, where)]
    slot_bytes = {key: key[0].elements * torch.empty(0, dtype=key[1]).element_size() for key in keys}
    totals = {key: sum(slot_bytes[key] * b.experts for k, b in zip(keys, blocks) if k == key) for key in keys}
    lock = threading.RLock()
    made: dict[Any, ExpertCache] = {}
    for key, total in totals.items():
        those = [number for number, one in enumerate(keys) if one == key]
        most = sum(blocks[number].experts for number in those)
        largest = max(banks[number].layout.memory_bytes for number in those)
        plan = CachePlan.of(
            budget * total // sum(totals.values()),
            slot_bytes[key],
            min(reads, most) + guesses,
            largest,
            max(scratch[number] for number in those),
            most,
        )
        slots = ExpertSlots(torch, *key, plan.slots)
        slots.scratch(plan.scratch)
        made[key] = ExpertCache(torch, slots, plan, guesses, share, lock)
    return [made[key] for key in keys]
