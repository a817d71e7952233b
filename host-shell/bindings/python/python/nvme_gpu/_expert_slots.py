"""Memory for experts of published files in the form that a block of transformers multiplies with, and what fills it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._errors import Usage
from .compute._expert_files import ExpertLayout, ExpertPart

_PLAIN = ("float32", "float16", "bfloat16")
_BLOCKS = "q8_0 q4_0 q4_1 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs mxfp4 nvfp4".split()
_FAMILIES = ("float8_e4m3fn ", "mxfp4 (", "nvfp4 (", "int4 group ")


def is_known(stored: str) -> bool:
    """Whether numbers are made of a format, an :attr:`ExpertMatrix.format`."""
    return stored in _PLAIN or stored in _BLOCKS or stored.startswith(_FAMILIES)


class ExpertForm(NamedTuple):
    """The parameters of a block's experts, without the length that counts experts."""

    width: int
    """Elements of a token's vector."""
    hidden: int
    """Rows of gate and of up."""
    is_transposed: bool
    """Rows of a parameter are columns of the matrix."""
    is_interleaved: bool
    """Rows of gate and up take turns."""
    has_bias: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by its name."""
        both, down = (2 * self.hidden, self.width), (self.width, self.hidden)
        found: dict[str, tuple[int, ...]] = {
            "gate_up_proj": both[::-1] if self.is_transposed else both,
            "down_proj": down[::-1] if self.is_transposed else down,
        }
        if self.has_bias:
            found |= {"gate_up_proj_bias": both[:1], "down_proj_bias": down[:1]}
        return found

    @property
    def elements(self) -> int:
        """Of all parameters of an expert."""
        return sum(math.prod(shape) for shape in self.shapes().values())


class ExpertSlots:
    """``count`` experts in memory of a device: a tensor for each parameter, whose first length counts slots."""

    def __init__(self, torch: Any, form: ExpertForm, dtype: Any, device: Any, count: int) -> None:
        self._torch, self.form, self.dtype, self.device, self.count = torch, form, dtype, device, count
        self.tensors = {
            name: torch.empty((count, *shape), dtype=dtype, device=device) for name, shape in form.shapes().items()
        }
        self._scratch: Any = None

    def scratch(self, elements: int) -> None:
        """Takes memory of the host for ``elements`` numbers of float32, for formats that are converted."""
        if elements:
            self._scratch = self._torch.empty(elements, dtype=self._torch.float32)

    def fill(self, slot: int, layout: ExpertLayout, expert: int, memory: Any) -> None:
        """Writes an expert, whose bytes ``memory`` has as :meth:`ExpertLayout.read` leaves them, to a slot."""
        found = _StoredExpert(self._torch, layout, expert, memory, self._scratch)
        both, down = self._natural("gate_up_proj", slot), self._natural("down_proj", slot)
        self._fill_pair(found, both, found.matrix)
        down.copy_(found.matrix("down"))
        if self.form.has_bias:
            self._fill_pair(found, self.tensors["gate_up_proj_bias"][slot], found.bias)
            self.tensors["down_proj_bias"][slot].copy_(found.bias("down"))

    def _natural(self, name: str, slot: int) -> Any:
        tensor = self.tensors[name][slot]
        return tensor.t() if self.form.is_transposed else tensor

    def _fill_pair(self, found: _StoredExpert, both: Any, numbers: Any) -> None:
        is_interleaved = self.form.is_interleaved
        if found.is_merged and found.is_interleaved == is_interleaved:
            both.copy_(numbers("gate_up"))
            return
        targets = _halves(both, is_interleaved)
        if not found.is_merged:
            for target, name in zip(targets, ("gate", "up")):
                target.copy_(numbers(name))
            return
        for target, source in zip(targets, _halves(numbers("gate_up"), found.is_interleaved)):
            target.copy_(source)


def _halves(both: Any, is_interleaved: bool) -> tuple[Any, Any]:
    if is_interleaved:
        return both[0::2], both[1::2]
    half = both.shape[0] // 2
    return both[:half], both[half:]


class _StoredExpert:
    """The numbers of an expert in its bytes."""

    def __init__(self, torch: Any, layout: ExpertLayout, expert: int, memory: Any, scratch: Any) -> None:
        self._torch, self._layout, self._expert, self._memory, self._scratch = torch, layout, expert, memory, scratch
        self._matrices = {one.matrix: one for one in layout.matrices(expert)}
        self._parts = {(one.matrix, one.role): one for one in layout.parts(expert)}
        self.is_merged = "gate_up" in self._matrices
        self.is_interleaved = self.is_merged and self._matrices["gate_up"].is_interleaved

    def matrix(self, name: str) -> Any:
        """Rows and columns as products need them; the next call may write over converted ones."""
        stored = self._matrices[name]
        if stored.format in _PLAIN:
            found = self._plain(self._parts[name, "weight"])
            return found.t() if stored.is_transposed else found
        out = self._scratch[: math.prod(stored.shape)].view(stored.shape)
        return self._layout.unpack(self._expert, name, out, memory=self._memory)  # type: ignore[arg-type]

    def bias(self, name: str) -> Any:
        return self._plain(self._parts[name, "bias"])

    def _plain(self, part: ExpertPart) -> Any:
        found = self._memory[part.at : part.at + part.nbytes]
        dtype = getattr(self._torch, part.dtype)
        if part.at % (part.nbytes // math.prod(part.shape)):
            # torch views bytes as numbers only where those are aligned.
            found = found.clone()
        return found.view(dtype).view(part.shape)


def check_stored(layout: ExpertLayout, form: ExpertForm, block: str) -> int:
    """Raises unless all experts of a layer can be written to slots of ``form``. Returns how many numbers of float32 the
    conversion needs memory for.

    Raises :class:`Usage` with the names of the block and of the experts.
    """
    where = f"{layout.name} for {block}"
    if (layout.width, layout.hidden) != (form.width, form.hidden):
        raise Usage(
            f"{where}: matrices of {layout.width} x {layout.hidden}, and the block's are of {form.width} x {form.hidden}",
            "name the files of this model",
        )
    most = 0
    for expert in range(len(layout)):
        for stored in layout.matrices(expert):
            if not is_known(stored.format):
                raise Usage(f"{where}: {stored.matrix} of expert {expert} is {stored.format}", "use another checkpoint")
            if stored.format not in _PLAIN:
                most = max(most, math.prod(stored.shape))
        biases = [one for one in layout.parts(expert) if one.role == "bias"]
        if biases and not form.has_bias:
            raise Usage(f"{where}: the block has no bias, and the files have {biases[0].tensor}", "name this model's files")
        if form.has_bias and not biases:
            raise Usage(f"{where}: the block has biases, and expert {expert} has none in the files", "name this model's files")
        for one in biases:
            if one.dtype not in _PLAIN:
                raise Usage(f"{where}: {one.tensor} is {one.dtype}", "use " + " or ".join(_PLAIN))
    return most
