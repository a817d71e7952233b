"""Arguments of computations: what they are, where they lie, and whether they fit."""

from __future__ import annotations

import math
import threading
from typing import Any, Callable

from .. import _arguments, _buffers, _dtypes, _native
from .._errors import Usage
from .._gathers import Check, known_check, same_gpu
from .._native import Array, View

__all__ = [
    "Check",
    "Operand",
    "checked",
    "epsilon_of",
    "flag",
    "format_of",
    "formatted",
    "kernels",
    "known",
    "number",
    "operand",
    "outside",
    "place",
    "run",
    "same_gpu",
    "scratch",
    "settle",
    "shaped",
    "stream",
    "together",
    "whole",
]

flag, whole, known = _arguments.flag, _arguments.whole, known_check

FORMATS: dict[str, tuple[int, int, int]] = {
    "float32": (0, 1, 4),
    "float16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q8_0": (8, 32, 34),
    "q4_k": (12, 256, 144),
    "q6_k": (14, 256, 210),
    "bfloat16": (30, 1, 2),
    "mxfp4": (39, 64, 34),
}
"""Name: its number, elements of a block, and bytes of a block; two blocks of MXFP4, whose bytes are an odd number."""
_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
UNIT = 32
"""Elements that all rows are whole multiples of."""

_F32_END = 2.0**128 - 2.0**103
"""The first number that float32 rounds to infinity."""

_LOADED: dict[tuple[Callable[[int], Any], int], Any] = {}
_LOCK = threading.Lock()


class Operand:
    """A tensor or array as memory: where it begins, its shape, the name of its dtype, and its GPU (None: the host)."""

    __slots__ = ("value", "address", "shape", "dtype", "gpu", "contiguous", "_view")

    def __init__(self, value: Any, address: int, shape: tuple[int, ...], dtype: str, gpu: int | None, view: View | None) -> None:
        self.value = value
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.gpu = gpu
        self.contiguous = True
        self._view = view

    @property
    def stride(self) -> int:
        """Elements from one row of a matrix to the next."""
        if self.contiguous or self.shape[0] < 2:
            return self.shape[1]
        return int(self.value.stride(0))

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def view(self) -> View:
        """Of memory of the host."""
        if self._view is None:
            self._view = _buffers.of_tensor(self.value, "a tensor")
        return self._view

    @property
    def where(self) -> str:
        """Where it lies, for people."""
        return "memory of the host" if self.gpu is None else f"GPU {self.gpu}"


def operand(
    value: Any, what: str, dtypes: tuple[str, ...], *, writable: bool = False, gaps: bool = False
) -> Operand:
    """``value`` as an argument ``what``, of one of ``dtypes``: a tensor of torch on the CPU or a GPU, or another array in
    memory of the host. With ``gaps`` only the elements of a tensor's last length have to lie side by side."""
    if _buffers.is_tensor(value):
        found = _of_tensor(value, what, dtypes, gaps)
        if writable:
            _buffers.will_change(value)
        return found
    view = _buffers.view(value, what, writable=writable)
    if view.device[0] not in _buffers.CPU:
        raise Usage(f"{what} lies in memory of a GPU and is no tensor of torch", "pass torch.as_tensor(..., device='cuda')")
    name = _dtypes.of_format(view.dtype)
    _fits(name, what, dtypes)
    return Operand(value, view.address, tuple(view.shape), name, None, view)


def _of_tensor(value: Any, what: str, dtypes: tuple[str, ...], gaps: bool) -> Operand:
    torch: Any = _buffers.torch()
    if value.requires_grad and torch.is_grad_enabled():
        raise Usage(
            f"{what} requires a gradient, which this function does not compute",
            f"pass {what}.detach(), or call it under torch.no_grad()",
        )
    if value.layout is not torch.strided:
        raise Usage(f"{what} has the layout {value.layout}", "pass a dense tensor")
    contiguous = value.is_contiguous()
    if not contiguous and not (gaps and _has_rows(value)):
        raise Usage(f"{what} is not contiguous: its strides are {tuple(value.stride())}", f"pass {what}.contiguous()")
    place = value.device
    if place.type not in ("cpu", "cuda"):
        raise Usage(f"{what} is on the device {place}", "use the CPU, or a GPU of CUDA")
    name = str(value.dtype)[6:]
    _fits(name, what, dtypes)
    gpu = None if place.type == "cpu" else place.index or 0
    found = Operand(value, value.data_ptr(), tuple(value.shape), name, gpu, None)
    found.contiguous = contiguous
    return found


def _has_rows(value: Any) -> bool:
    """Whether the last length has no gaps, and no two elements are the same memory by a stride of 0."""
    lengths, strides = value.shape, value.stride()
    return bool(lengths) and strides[-1] == 1 and all(one > 0 for length, one in zip(lengths, strides) if length > 1)


def _fits(name: str, what: str, dtypes: tuple[str, ...]) -> None:
    if name not in dtypes:
        raise Usage(f"{what} is {name}", "use " + " or ".join(dtypes))


def shaped(one: Operand, what: str, shape: tuple[int | str, ...]) -> None:
    """Raises unless ``one`` has the shape: numbers, and names of lengths that may be anything."""
    fits = len(one.shape) == len(shape)
    if not fits or any(isinstance(want, int) and want != have for want, have in zip(shape, one.shape)):
        wanted = ", ".join(str(length) for length in shape) + ("," if len(shape) == 1 else "")
        raise Usage(f"{what} has the shape {one.shape}", f"use ({wanted})")


def together(**operands: Operand | None) -> int | None:
    """The GPU on which all operands lie, or None for memory of the host."""
    first: tuple[str, Operand] | None = None
    for what, one in operands.items():
        if one is None:
            continue
        if first is None:
            first = (what, one)
        elif one.gpu != first[1].gpu:
            raise Usage(
                f"{what} lies in {one.where}, {first[0]} in {first[1].where}",
                "use one device for all of them",
            )
    return None if first is None else first[1].gpu


def place(out: Any, what: str, like: Operand, shape: tuple[int, ...], dtype: str = "float32") -> Operand:
    """Memory for a result: ``out``, which has to fit, or new memory of the library and device of ``like``."""
    if out is None:
        return _new(like, shape, dtype)
    found = operand(out, what, (dtype,), writable=True)
    shaped(found, what, shape)
    if found.gpu != like.gpu:
        raise Usage(f"{what} lies in {found.where}, the other arguments in {like.where}", "use one device for all of them")
    return found


def _new(like: Operand, shape: tuple[int, ...], dtype: str) -> Operand:
    if _buffers.is_tensor(like.value):
        torch: Any = _buffers.torch()
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=like.value.device)
        return Operand(made, made.data_ptr(), tuple(shape), dtype, like.gpu, None)
    numpy = _buffers.numpy()
    if numpy is None:
        made = Array(shape, dtype, _dtypes.SIZES[dtype][0])
        return Operand(made, made.address, shape, dtype, None, _buffers.of_array(made, True))
    return operand(numpy.empty(shape, dtype=dtype), "a result", (dtype,), writable=True)


def scratch(like: Operand, nbytes: int) -> Operand:
    """Memory of the GPU of ``like`` for a while, in the order of the current stream."""
    return _new(like, (max(nbytes, 16),), "uint8")


def format_of(name: Any) -> str:
    """The name of a format of weights."""
    text = name.lower() if isinstance(name, str) else _dtypes.name_of(name)
    text = _NAMES.get(text, text)
    if text not in FORMATS:
        raise Usage(f"weights of the format {name!r}", "use one of " + ", ".join(FORMATS))
    return text


def formatted(weights: Operand, what: str, format: Any) -> tuple[int, int]:
    """The number of the format of weights, and their columns: numbers of a floating dtype, or rows of bytes of ``format``."""
    if len(weights.shape) != 2:
        raise Usage(f"{what} has the shape {weights.shape}", "use (rows, columns), or (rows, bytes of a row) with format=")
    if weights.dtype == "uint8":
        if format is None:
            raise Usage(f"{what} is uint8, and its format is not known", "pass format=, such as 'q8_0'")
        name = format_of(format)
        number, elements, nbytes = FORMATS[name]
        columns, rest = divmod(weights.shape[1] * elements, nbytes)
        if rest or weights.shape[1] % nbytes:
            raise Usage(f"{what} has rows of {weights.shape[1]} bytes", f"use a multiple of {nbytes}: whole blocks of {name}")
    else:
        name = weights.dtype
        number, elements, _ = FORMATS[name]
        columns = weights.shape[1]
        if format is not None and format_of(format) != name:
            raise Usage(f"{what} is {name}, and format is {format!r}", "leave format out, or pass bytes: uint8")
    if columns == 0 or columns % UNIT:
        raise Usage(f"{what} has {columns} columns", f"use a multiple of {UNIT}")
    return number, columns


def number(what: str, value: Any, *, positive: bool = False) -> float:
    """A finite number, also as float32."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"{what} is of the type {type(value).__name__}: pass a number")
    found = float(value)
    if not abs(found) < _F32_END or positive and found <= 0:
        raise Usage(f"{what} is {found}", "use a finite number" + (" above 0" if positive else ""))
    return found


def outside(counts: Operand, most: int) -> Any:
    """Where counts on a GPU are none: below 0, or above ``most``. Nothing waits for it, so that it may be captured."""
    return (counts.value < 0) | (counts.value > most)


def epsilon_of(value: Any) -> float:
    """What is added to a mean: no number below 0."""
    found = number("epsilon", value)
    if found < 0:
        raise Usage(f"epsilon is {found}", "use 0 or more")
    return found


def run(operation: _native.Operation) -> None:
    """Waits for threads of the host, and raises what went wrong. Ctrl-C ends the wait."""
    operation.wait()
    operation.check()


def checked(operation: _native.GpuOperation, check: Check | None) -> None:
    """Waits for a launch and raises, where ``check`` is ``"now"`` and it is no part of a graph."""
    if check == "now" and not operation.is_captured:
        operation.finish()


def stream(gpu: int) -> int:
    """The current stream of torch on a GPU."""
    return int(_buffers.torch()._C._cuda_getCurrentRawStream(gpu))  # type: ignore[union-attr]


def settle(gpu: int | None) -> None:
    """Waits for a GPU, where torch uses it."""
    torch = _buffers.torch()
    if torch is not None and gpu is not None:
        torch.cuda.synchronize(gpu)


def kernels(kind: Callable[[int], Any], gpu: int) -> Any:
    """The kernels of one kind, loaded for a GPU when they are first used."""
    found = _LOADED.get((kind, gpu))
    if found is None:
        with _LOCK:
            found = _LOADED.get((kind, gpu))
            if found is None:
                found = _LOADED[kind, gpu] = kind(gpu)
    return found
