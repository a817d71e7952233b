"""Names of element types, whichever library they come from."""

from __future__ import annotations

import sys
from typing import Any

from ._errors import Usage

# Name: bytes, and the format of the buffer protocol where it has one.
SIZES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "?"),
    "int8": (1, "b"),
    "uint8": (1, "B"),
    "int16": (2, "h"),
    "uint16": (2, "H"),
    "int32": (4, "i"),
    "uint32": (4, "I"),
    "int64": (8, "q"),
    "uint64": (8, "Q"),
    "float16": (2, "e"),
    "float32": (4, "f"),
    "float64": (8, "d"),
    "complex64": (8, None),
    "complex128": (16, None),
    "bfloat16": (2, None),
    "float8_e4m3fn": (1, None),
    "float8_e5m2": (1, None),
    "float8_e8m0fnu": (1, None),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2fnuz": (1, None),
}
# What numpy has no dtype for: arrays of any dtype with as many bytes take their rows.
FOREIGN = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")
# Elements that are stored in blocks, as GGUF has them: how many, in how many bytes.
BLOCKS: dict[str, tuple[int, int]] = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "mxfp4": (32, 17),
    # Two elements of E2M1 in a byte, and rows of 256 of E4M3 with their eight scales behind them.
    "float4_e2m1fn_x2": (2, 1),
    "float8_scaled": (256, 264),
}
# What gathers widen, and to what.
WIDENED = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
WIDE = ("float16", "bfloat16", "float32")
_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "int": "int64", "long": "int64"}
_FORMATS = {fmt: name for name, (_, fmt) in SIZES.items() if fmt is not None}
_FORMATS |= {"l": "int64", "L": "uint64", "c": "uint8", "Zf": "complex64", "Zd": "complex128", "n": "int64"}


def name_of(dtype: Any) -> str:
    """The name of ``dtype``: a name, or a dtype of numpy, torch or another library."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if not isinstance(text, str):
        text = str(dtype)
        if text.startswith("<class '"):
            numpy = sys.modules.get("numpy")
            text = str(numpy.dtype(dtype)) if numpy is not None else getattr(dtype, "__name__", text)
    text = text.removeprefix("torch.").removeprefix("jax.numpy.")
    if text not in SIZES and text not in _ALIASES:
        if text[:1] in "<=|>" and (numpy := sys.modules.get("numpy")) is not None:
            try:
                found = numpy.dtype(text)
            except TypeError:
                found = None
            if found is not None and found.isnative:
                text = found.name
    text = _ALIASES.get(text, text)
    if text not in SIZES:
        raise Usage(f"no rows can have the dtype {dtype!r}", "use one of " + ", ".join(SIZES))
    return text


def of_format(text: str) -> str:
    """The name for what a view says of its elements: a name, or ``<`` and a format of the buffer protocol."""
    if not text.startswith("<"):
        return text
    text = text[1:].lstrip("@=<")
    if text not in _FORMATS:
        raise Usage(f"elements of the format {text!r}", "use numbers of the host's byte order")
    return _FORMATS[text]


def numbers(value: Any) -> Any:
    """The numbers of an array of ours as lists of lists."""
    name, shape = value.dtype, value.shape
    size, fmt = SIZES[name]
    if fmt is None:
        raise Usage(f"numbers of {name} have no form in Python", "use DLPack, or tobytes()")
    if 0 in shape:
        return _empty(shape)
    view: Any = memoryview(value.tobytes())
    return view.cast(fmt, shape).tolist() if shape else view.cast(fmt)[0]


def _empty(shape: tuple[int, ...]) -> Any:
    return [] if not shape or not shape[0] else [_empty(shape[1:]) for _ in range(shape[0])]
