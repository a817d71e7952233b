"""Buffers of any library as views, and streams as numbers."""

from __future__ import annotations

import math
import operator
import re
import sys
from array import array
from typing import Any

from . import _dtypes
from ._errors import Usage, in_short
from ._native import Array, View

CPU = (1, 3)
"""Device types whose memory the host reaches: CPU, and pinned memory."""
CUDA = 2
GPU = (CUDA, 13)
"""Device types whose memory a GPU of CUDA has: its own, and managed memory."""


def torch() -> Any | None:
    """torch, when it is loaded."""
    return sys.modules.get("torch")


def numpy() -> Any | None:
    """numpy, where it is installed."""
    try:
        import numpy as found
    except ImportError:
        return None
    return found


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor of torch."""
    loaded = torch()
    return loaded is not None and isinstance(value, getattr(loaded, "Tensor", ()))


def is_of_gpu(value: Any, name: str) -> bool:
    """Whether a buffer lies in memory of a GPU, so that a stream matters for it."""
    if is_tensor(value):
        return bool(value.is_cuda)
    if isinstance(value, Array):
        return value.device != "cpu"
    if hasattr(value, "__cuda_array_interface__"):
        return True
    return hasattr(value, "__dlpack_device__") and dlpack_kind(value, name) in GPU


def check_resolved(tensor: Any, what: str) -> None:
    """Refuses a tensor whose memory has other values than the tensor."""
    if tensor.is_conj() or tensor.is_neg():
        raise Usage(f"{what} is a view that conjugates or negates", "pass tensor.resolve_conj().resolve_neg()")


def will_change(tensor: Any) -> None:
    """Tells autograd that the memory of ``tensor`` is written: a backward that saved the tensor before is refused."""
    if tensor.is_inference():
        return
    loaded: Any = torch()
    increment = getattr(loaded.autograd.graph, "increment_version", None)
    if increment is not None:
        increment(tensor)
    else:
        # Older versions of torch count changes in place alone: this one has no element.
        tensor.detach().as_strided((0,), (1,)).zero_()


def of_tensor(tensor: Any, what: str, *, writable: bool = False) -> View:
    """A view of a tensor of torch. Its memory is that of its storage, which the view keeps.

    Not by DLPack's exchange in C (``__dlpack_c_exchange_api__``): gathers on a GPU make no view, and elsewhere a view is
    a few percent of a call. It would be a second way, which torch before 2.10 does not have.
    """
    if not tensor.is_contiguous():
        raise Usage(f"{what} is not contiguous", "pass a copy: tensor.contiguous()")
    check_resolved(tensor, what)
    if tensor.layout is not torch().strided:  # type: ignore[union-attr]
        raise Usage(f"{what} has the layout {tensor.layout}", "pass a dense tensor")
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise Usage(f"{what} is on the device {tensor.device}", "use the CPU, or a GPU of CUDA")
    device = (1, 0) if kind == "cpu" else (CUDA, tensor.device.index or 0)
    name = _dtypes.name_of(tensor.dtype)
    nbytes = tensor.numel() * tensor.element_size()
    if writable:
        will_change(tensor)
    return View.raw(tensor, tensor.data_ptr(), nbytes, tuple(tensor.shape), name, device, False)


def of_cuda_array(value: Any, what: str, store: Any, stream: int) -> View:
    """A view of an object with ``__cuda_array_interface__``; ``stream`` waits for the object's own.

    Where the memory lies, and how long it is, is what the driver says when it is used.
    """
    interface = value.__cuda_array_interface__
    try:
        shape = tuple(operator.index(length) for length in interface["shape"])
        name = _dtypes.name_of(_typestr(interface["typestr"]))
        address, readonly = interface["data"]
        address = 0 if address is None else operator.index(address)
        strides = interface.get("strides")
        strides = None if strides is None else tuple(operator.index(stride) for stride in strides)
        mask, producer = interface.get("mask"), interface.get("stream")
        producer = None if producer is None else operator.index(producer)
        gpu = getattr(getattr(value, "device", None), "id", None)
        gpu = (store.gpu_index or 0 if store else 0) if gpu is None else operator.index(gpu)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        remedy = "pass an array of version 3"
        raise Usage(f"{what} has a __cuda_array_interface__ that is not one: {error!r}", remedy) from error
    size = _dtypes.SIZES[name][0]
    nbytes = size
    for length in shape:
        nbytes *= length
    if strides is not None and len(strides) != len(shape):
        raise Usage(f"{what} has {len(strides)} strides for {len(shape)} dimensions", "pass a stride for each")
    if strides is not None and nbytes:
        expected = size
        for length, stride in zip(reversed(shape), reversed(strides)):
            if length > 1 and stride != expected:
                raise Usage(f"{what} is not C-contiguous", "pass a contiguous copy")
            expected *= length
    if mask is not None:
        raise Usage(f"{what} has a mask", "pass an array without one")
    if min((0, address, *shape)) < 0 or address + nbytes >= 1 << 63 or (nbytes and not address):
        raise Usage(f"{what} says that it has the shape {shape} at address {address}", "pass an array that is there")
    if not 0 <= gpu < 1 << 31:
        raise Usage(f"{what} says that it lies on GPU {gpu}", "pass an array that is there")
    if producer is not None and not 1 <= producer < 1 << 64:
        raise Usage(f"{what} names the stream {producer}", "use 1, 2 or the address of a stream")
    if producer is not None and store is not None and store.gpu_index is not None:
        store.order(0 if producer == 1 else producer, stream)
    return View.raw(value, address, nbytes, shape, name, (CUDA, gpu), bool(readonly))


def _typestr(text: str) -> str:
    names = {"|b1": "bool", "|i1": "int8", "|u1": "uint8", "<V2": "bfloat16", "|V2": "bfloat16"}
    kinds = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
    if text in names:
        return names[text]
    if text[:1] in "<|" and text[1:2] in kinds and text[2:].isdigit():
        return f"{kinds[text[1]]}{int(text[2:]) * 8}"
    return text


def view(value: Any, what: str, *, writable: bool, store: Any = None, stream: int = 0) -> View:
    """``value`` as memory: a tensor, ``__cuda_array_interface__``, the buffer protocol, or DLPack."""
    if is_tensor(value):
        return of_tensor(value, what, writable=writable)
    if isinstance(value, Array):
        return of_array(value, writable, store, stream)
    if hasattr(value, "__cuda_array_interface__"):
        return _may_be_used(of_cuda_array(value, what, store, stream), what, writable)
    try:
        found = View.from_buffer(value, writable)
        # Names of fields stand between colons.
        if set(re.sub(":[^:]*:", "", found.dtype)) & set("OP&"):
            raise Usage(f"{what} holds objects of Python, or addresses", "use an array of numbers")
        return found
    except TypeError:
        pass
    except Usage:
        raise
    except (BufferError, ValueError) as error:
        # numpy names elements that the buffer protocol has no format for as a ValueError.
        if not hasattr(value, "__dlpack__") or isinstance(error, BufferError):
            raise Usage(f"{what}: {error}", "pass memory that is contiguous and, to read into, writable") from error
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(value, what, writable, stream)
    raise TypeError(
        f"{what} is of the type {type(value).__name__}: pass an array of numpy or torch, or any object with the buffer "
        "protocol, DLPack or __cuda_array_interface__"
    )


def of_array(value: Array, writable: bool, store: Any = None, stream: int = 0) -> View:
    """An array of ours. Raises the failure of what filled it, unless it is to be written over."""
    device = (1, 0) if value.device == "cpu" else (CUDA, int(value.device.rpartition(":")[2]))
    if device[0] == CUDA and store is not None and store.gpu_index is not None:
        store.order(value.stream, stream)
    if writable:
        value.is_filled_by(None, stream, True)
    else:
        value.check_filled()
    return View.raw(value, value.address, value.nbytes, value.shape, value.dtype, device, False)


def _of_dlpack(value: Any, what: str, writable: bool, stream: int) -> View:
    kind = dlpack_kind(value, what)
    words: dict[str, Any] = {}
    if kind in GPU:
        words["stream"] = stream or 1
    try:
        try:
            capsule = value.__dlpack__(max_version=(1, 0), copy=False, **words)
        except TypeError:
            # From before DLPack 1.0.
            capsule = value.__dlpack__(**words)
        found = View.from_dlpack(capsule)
    except BufferError as error:
        raise Usage(f"{what}: {error}", "pass a contiguous array") from error
    return _may_be_used(found, what, writable)


def dlpack_kind(value: Any, what: str) -> int:
    """The type of the device on which an object with ``__dlpack__`` lies: one that can be used here."""
    try:
        kind, _ = value.__dlpack_device__()
        kind = operator.index(kind)
    except (AttributeError, TypeError, ValueError) as error:
        remedy = "pass an object with the DLPack protocol"
        raise Usage(f"{what} does not say on which device it lies: {error!r}", remedy) from error
    if kind not in (*CPU, *GPU):
        raise Usage(f"{what} lies on a device of DLPack's type {kind}", "use memory of the host, or of a GPU of CUDA")
    return kind


def _may_be_used(found: View, what: str, writable: bool) -> View:
    if found.device[0] not in (*CPU, *GPU):
        kind = found.device[0]
        raise Usage(f"{what} lies on a device of DLPack's type {kind}", "use memory of the host, or of a GPU of CUDA")
    if writable and found.readonly:
        raise Usage(f"{what} is read-only", "pass memory that may be written")
    return found


MOST_NESTED = 32
"""Lists in lists: as many lengths as numpy's arrays have at most, before version 2."""


MOST_LISTED = 1 << 31
"""Ids in lists: more are the same lists again and again."""


def flattened(value: Any) -> tuple[array[int], tuple[int, ...]]:
    """Whole numbers in lists of lists as one array of 64 bits, and their shape.

    Raises :class:`Usage` for lists of different lengths, and for more than :data:`MOST_NESTED` in one another, which a list
    that contains itself has.
    """
    if isinstance(value, range):
        return _of_range(value)
    shape: list[int] = []
    probe = value
    while isinstance(probe, (list, tuple, range)):
        if len(shape) == MOST_NESTED:
            raise Usage(f"ids are lists in more than {MOST_NESTED} lists", "give one flat list, or an array")
        shape.append(len(probe))
        if not len(probe):
            break
        probe = probe[0]
    # Empty lists have no ids, and still are walked.
    if math.prod(one or 1 for one in shape) > MOST_LISTED:
        raise Usage(f"{math.prod(shape)} ids in lists", "pass an array")
    flat = array("q")
    _flatten(value, tuple(shape), flat)
    return flat, tuple(shape)


def _of_range(value: range) -> tuple[array[int], tuple[int, ...]]:
    for one in value[:1], value[-1:]:
        if one and not -(1 << 63) <= one[0] < 1 << 63:
            raise Usage(f"the id {in_short(one[0])} has more than 64 bits", "use ids from 0 to the number of rows - 1")
    found = numpy()
    if found is None:
        return array("q", value), (len(value),)
    flat = array("q")
    flat.frombytes(found.arange(value.start, value.stop, value.step, dtype="int64").view("uint8"))
    return flat, (len(value),)


def _flatten(value: Any, shape: tuple[int, ...], into: array[int]) -> None:
    if not shape:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"an id of the type {type(value).__name__}: ids are whole numbers")
        number = value.__index__()
        if not -(1 << 63) <= number < 1 << 63:
            raise Usage(f"the id {in_short(number)} has more than 64 bits", "use ids from 0 to the number of rows - 1")
        into.append(number)
        return
    if not isinstance(value, (list, tuple, range)) or len(value) != shape[0]:
        raise Usage("the lists of ids have different lengths", "give as many ids in each, or one flat list")
    for one in value:
        _flatten(one, shape[1:], into)


def current_stream(tensor: Any) -> int | None:
    """Torch's current stream on the GPU of ``tensor``; None for memory of the host."""
    if not tensor.is_cuda:
        return None
    return int(torch()._C._cuda_getCurrentRawStream(tensor.device.index))  # type: ignore[union-attr]


def stream_of(value: Any, gpu: int | None) -> int:
    """A stream as CUDA counts it.

    None is torch's current one on ``gpu`` when torch uses GPUs, else the default one (0). Otherwise a number, or an object
    with ``cuda_stream`` (torch), ``ptr`` (cupy), ``handle`` (pycuda, numba) or ``__cuda_stream__`` (cuda.core).
    """
    if value is None:
        loaded = torch()
        if loaded is not None and hasattr(loaded, "cuda") and loaded.cuda.is_initialized():
            return int(loaded.cuda.current_stream(gpu).cuda_stream)
        return 0
    found = value
    if not isinstance(value, int):
        method = getattr(value, "__cuda_stream__", None)
        if method is not None:
            found = (method() if callable(method) else method)[1]
        else:
            for name in ("cuda_stream", "ptr", "handle"):
                if hasattr(value, name):
                    found = getattr(value, name)
                    break
            found = getattr(found, "value", found)
            found = 0 if found is None else found
    if isinstance(found, bool) or not hasattr(found, "__index__"):
        raise TypeError(f"a stream of the type {type(value).__name__}: pass a number, or a stream of torch or cupy")
    number = int(found)
    if not 0 <= number < 1 << 64:
        raise Usage(f"{in_short(number)} is no stream", "pass the address of a CUstream, or 0 for the default one")
    return number
