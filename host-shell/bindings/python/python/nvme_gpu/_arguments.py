"""Arguments of calls: whole numbers, booleans, names of devices, limits of waits."""

from __future__ import annotations

from typing import Any

from ._errors import Usage, in_short


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``: other numbers, and booleans, are refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is of the type {type(value).__name__}: pass a whole number")
    number = int(value.__index__())
    if not least <= number <= most:
        raise Usage(f"{name} is {in_short(number)}", f"use {least} to {most}")
    return number


def flag(name: str, value: Any) -> bool:
    """A boolean: what else is true, such as the text "no", is refused."""
    kind = type(value)
    if not isinstance(value, bool) and (kind.__module__, kind.__name__) not in (("numpy", "bool"), ("numpy", "bool_")):
        raise TypeError(f"{name} is of the type {kind.__name__}: pass True or False")
    return bool(value)


def device(device: Any) -> tuple[bool, int | None]:
    """Whether ``device``, a name or a torch.device, is a GPU, and the number that it gives."""
    kind, colon, number = str(device).partition(":")
    if kind == "cpu" and number in ("", "0") and bool(colon) == bool(number):
        return False, None
    if kind != "cuda" or bool(colon) != (number.isascii() and number.isdecimal()):
        raise Usage(f"device is {str(device)!r}", "use 'cpu' or 'cuda'")
    return True, int(number) if number else None


def within(timeout: float | None) -> str:
    """A limit in words: None stands for that of the operation."""
    return f"within {timeout} s" if timeout is not None else "in the time that its commands may take"
