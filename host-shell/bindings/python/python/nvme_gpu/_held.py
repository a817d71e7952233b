"""What the classes of this package have in common that belong to one process or hold a store."""

from __future__ import annotations

from typing import ClassVar, NoReturn, Protocol, TypeVar

from ._errors import Timeout, Usage

_H = TypeVar("_H", bound="Held")


class _Native(Protocol):
    def close(self) -> None: ...
    def check(self, timeout: float | None) -> bool: ...


def _native(held: Held) -> _Native:
    """What each class has of its own type."""
    native: _Native = getattr(held, "_native")
    return native


class OneProcess:
    """Belongs to the process that made it: it cannot be pickled."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise Usage(
            f"a {type(self).__name__} belongs to one process and cannot be pickled",
            "open the store in each process that uses it; let worker processes start by 'spawn'",
        )


class Held(OneProcess):
    """Holds a store until it is closed. As a context manager it closes itself."""

    __slots__ = ()

    def close(self) -> None:
        """Lets go of the store."""
        _native(self).close()

    def __enter__(self: _H) -> _H:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Launching(Held):
    """Starts work on a GPU that may fail after the call that started it has returned."""

    __slots__ = ()
    _LAUNCHED: ClassVar[str]

    def check(self, timeout: float | None = None) -> None:
        """Waits for the work on the GPU that was launched before, ``timeout`` seconds at most, and raises the first failure
        that was not raised yet; of captured work that of its last run that ended.

        Raises :class:`Timeout` when it has not ended in time.
        """
        if not _native(self).check(timeout):
            raise Timeout(f"{self._LAUNCHED} on the GPU have not ended", "call check again, or wait longer", "unfinished")
