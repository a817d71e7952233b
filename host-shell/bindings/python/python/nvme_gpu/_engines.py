"""What the adapters of engines share: the variables that choose tables on a drive, and checks of the classes that they replace."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from typing import Any, NamedTuple

from ._errors import Usage, in_short
from ._lookup_table import lookup_table

ENGRAM = "NVME_GPU_ENGRAM"
"""Names the checkpoint with the Engram tables of DeepSeek-V4.1."""
ENGRAM_WEIGHT, ENGRAM_SCALE = "layers.{}.engram.embed.weight", "layers.{}.engram.embed.scale"


class TableSettings(NamedTuple):
    """What a variable says."""

    source: str
    weight: str
    scale: str = ENGRAM_SCALE
    on_error: Any = "nan"
    options: dict[str, Any] = {}

    @classmethod
    def of(cls, variable: str, weight: str) -> TableSettings | None:
        """Reads a variable; ``weight`` is what its tensors are called by default. None where it is not set.

        Raises :class:`Usage` for what is no object with a source, and for names of Engram's tensors that are the same in all layers.
        """
        text = os.environ.get(variable, "")
        if not text.lstrip().startswith("{"):
            return cls(text, weight) if text else None
        try:
            found = dict(json.loads(text))
        except ValueError as error:
            raise Usage(f"{variable} is no JSON object: {error}", 'write a path, or {"source": "PATH"}') from None
        if not isinstance(found.get("source"), str):
            raise Usage(f"{variable} names no source", 'write a path, or {"source": "PATH"}')
        for name in ("weight", "scale") if variable == ENGRAM else ():
            _check_name(variable, name, found.get(name, "{}"))
        known = {name: found.pop(name) for name in ("source", "weight", "scale", "on_error") if name in found}
        return cls(**{"weight": weight, **known}, options=found)

    def layer(self, layer_id: int, shape: tuple[int, int], device: Any) -> Any:
        """The Engram table of a layer, its rows multiplied by their scales; otherwise as :meth:`table`."""
        return self.table(self.weight.format(layer_id), shape, self.scale.format(layer_id), device)

    def table(self, weight: str, shape: tuple[int, int], scales: str | None, device: Any) -> Any:
        """The table of bf16 rows of ``weight``, for ids on ``device``, a torch.device."""
        options = dict(self.options)
        cache_bytes = options.pop("cache_bytes", None)
        if device.type == "cuda":
            options.setdefault("gpu", device.index)
        if scales is not None:
            options["scales"] = scales
        found = lookup_table(self.source, weight, shape=shape, to="bfloat16", on_error=self.on_error, **options)
        return found if cache_bytes is None else found.cached(cache_bytes)


def _check_name(variable: str, name: str, text: Any) -> None:
    """Refuses a name that tells no layer: each would have one table."""
    if not isinstance(text, str) or not text.count("{}") == text.count("{") == text.count("}") == 1:
        cause = f"{variable} has {name} = {in_short(text)}, which does not have {{}} once"
        raise Usage(cause, f"write {{}} for the number of the layer, as in {ENGRAM_WEIGHT if name == 'weight' else ENGRAM_SCALE}")


def check_rows(layer_id: int, rows: int, loaded: Any) -> None:
    """What a weight loader does for a table that stays where it is: refuses a tensor with another number of rows than the table has,
    which is another checkpoint's."""
    if loaded.shape[0] != rows:
        raise Usage(
            f"layer {layer_id}: the checkpoint has {loaded.shape[0]} rows, the table on the drive {rows}",
            f"name the checkpoint that is served in {ENGRAM}",
        )


def known_class(module: str, name: str, parameters: list[str], version: str) -> Any:
    """The class ``name`` of an engine.

    Raises :class:`Usage` where it is missing, or its constructor is another one than the adapter was written for.
    """
    original = getattr(importlib.import_module(module), name, None)
    if original is None:
        raise Usage(f"{module} has no {name}", f"use {version}")
    found = list(inspect.signature(original.__init__).parameters)[1:]
    if found != parameters:
        raise Usage(f"{name} of this version has the parameters {found}", f"use {version}")
    return original
