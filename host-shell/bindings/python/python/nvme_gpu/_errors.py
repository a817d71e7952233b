"""Exceptions: each has its cause, a remedy, and one word for its kind."""

from __future__ import annotations

from collections.abc import Iterable
from errno import ENOENT
from itertools import islice

__all__ = ["Changed", "Gone", "KvLoadError", "NotFound", "NvmeGpuError", "Status", "Timeout", "Usage"]


# How many members of a list a message names, the longest message, and what of a longer one's begin and end stays.
_MOST_NAMED = 5
_MOST, _BEGIN, _END = 2_000, 1_500, 400


def listed(members: Iterable[object]) -> str:
    """The first few of ``members`` with commas between, and how many more there are."""
    rest = iter(members)
    named = ", ".join(str(one) for one in islice(rest, _MOST_NAMED))
    more = sum(1 for _ in rest)
    return f"{named} and {more} more" if more else named


def in_short(value: object) -> str:
    """A value of a caller in a message: Python does not write numbers of some thousand digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return str(value) if isinstance(value, (bool, int, float, str)) or value is None else f"a {type(value).__name__}"


def _bounded(text: str) -> str:
    """A message that fits on a screen, whatever it repeats."""
    if len(text) <= _MOST:
        return text
    return f"{text[:_BEGIN]} ... ({len(text) - _BEGIN - _END} characters left out) ... {text[-_END:]}"


class NvmeGpuError(Exception):
    """What went wrong (``cause``), what to do about it (``remedy``), and its kind in one word (``code``).

    ``code`` is one of ``usage``, ``file``, ``system``, ``device``, ``environment``, ``internal``, ``command``,
    ``unsupported``, ``unfinished``, ``mismatch``, ``timeout``, ``gone``, ``changed``, ``interrupted``: those of the tool;
    or ``missing`` and ``lost``, of a :class:`PageMiss`.

    Of a gather or scatter, ``row`` is the place of the first row that failed, counted over the flattened ids, and
    ``id`` its id where it is known. ``errno`` is the number of a failed system call, else None.
    """

    def __init__(
        self,
        cause: str,
        remedy: str = "",
        code: str = "usage",
        *,
        row: int | None = None,
        id: int | None = None,
        errno: int | None = None,
    ) -> None:
        cause, remedy = _bounded(cause), _bounded(remedy)
        super().__init__(f"{cause}: {remedy}" if remedy else cause)
        self.cause = cause
        self.remedy = remedy
        self.code = code
        self.row = row
        self.id = id
        self.errno = errno

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}" if self.remedy else self.cause


class Usage(NvmeGpuError, ValueError):
    """The call cannot be: a range, an id, a dtype, a device or a closed store. Nothing was sent to the device,
    except where a row of a gather is named."""


class OutOfRange(Usage, IndexError):
    """A gather or scatter named a row that the table does not have: ``id``, at the place ``row``. Its code is ``usage``."""


class NotFound(NvmeGpuError, FileNotFoundError):
    """There is no such file, of this machine or of a :class:`Volume`. Its code is ``file``."""


class Status(NvmeGpuError):
    """The controller answered a command with an error: status code type ``sct`` and status code ``sc`` of NVMe."""

    sct: int = 0
    sc: int = 0


class Timeout(NvmeGpuError, TimeoutError):
    """What was waited for has not ended in time. The buffers of a transfer are kept until it has."""


class Gone(NvmeGpuError):
    """The device left, or did not come back from a reset. Open it again."""


class Changed(NvmeGpuError):
    """The device is not what it was when it was opened: another host formatted a namespace of it, it became smaller,
    was deleted, write protected or sanitized, or another drive answers. Nothing was sent. Open it again."""


class KvLoadError(NvmeGpuError):
    """Blocks of a cache that a :class:`KvStore` did not load: ``block_ids`` of ``layer``. The others were loaded. Its code
    is that of the first error, which is its ``__cause__``."""

    def __init__(self, layer: str, block_ids: set[int], first: NvmeGpuError) -> None:
        super().__init__(
            f"blocks {listed(sorted(block_ids))} of the layer {layer!r} were not loaded: {first.cause}",
            "compute them again: they keep what they held, and are not found again",
            first.code,
        )
        self.layer = layer
        self.block_ids = frozenset(block_ids)


class PageMiss(NvmeGpuError):
    """A :class:`PageStore` does not have the page: it was never stored or made room for another (code ``missing``), or
    what lies on the drive is not what was stored (code ``lost``). Compute it, and store it again."""


_CLASSES: dict[str, type[NvmeGpuError]] = {
    "missing": PageMiss,
    "lost": PageMiss,
    "usage": Usage,
    "command": Status,
    "timeout": Timeout,
    "unfinished": Timeout,
    "gone": Gone,
    "changed": Changed,
}


def make(
    code: str,
    cause: str,
    remedy: str,
    status: int | None,
    row: int | None,
    id: int | None,
    errno: int | None,
) -> NvmeGpuError:
    """The exception for an error of the extension module."""
    kind = NotFound if (code, errno) == ("file", ENOENT) else _CLASSES.get(code, NvmeGpuError)
    if code == "index":
        kind, code = OutOfRange, "usage"
    error = kind(cause, remedy, code, row=row, id=id, errno=errno)
    if isinstance(error, Status) and status is not None:
        error.sct, error.sc = status >> 8 & 7, status & 0xFF
    return error
