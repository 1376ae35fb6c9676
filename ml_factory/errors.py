"""Errors that state what went wrong, where, what was got and wanted, and the next step."""

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from ml_factory.redaction import redact_secrets


class FactoryError(ValueError):
    """A mistake that the user can fix with the message alone.

    Parameters
    ----------
    what : one sentence: what could not be done.
    where : the file, column, row or setting concerned.
    got, wanted : the value found, and the value expected.
    next_step : what to do now, as an imperative.
    """

    def __init__(
        self, what: str, *, where: object = None, got: object = None, wanted: object = None, next_step: str = ""
    ):
        self.what, self.where, self.got, self.wanted, self.next_step = what, where, got, wanted, next_step
        parts = [what if where is None else f"{what} [{where}]"]
        facts = [f"{name} {value}" for name, value in (("got", got), ("wanted", wanted)) if value is not None]
        if facts:
            parts.append(", ".join(facts))
        if next_step:
            parts.append(f"Next: {next_step}")
        message = ". ".join(part.rstrip(".") for part in parts)
        super().__init__(redact_secrets(message if message.endswith("?") else f"{message}."))

    def _render_traceback_(self) -> list[str]:
        """Render for notebooks: the message alone, without a stack trace."""
        return [f"{type(self).__name__}: {self}"]


class SettingsError(FactoryError):
    """A setting, parameter or name that cannot be used."""


class BarsError(FactoryError):
    """Raw bars that violate the contract."""


class WorkspaceError(FactoryError):
    """A folder, file or disk that cannot be used."""


class FileError(WorkspaceError):
    """A file that is missing or damaged, or that its disk refuses."""


class UnresponsiveMountError(WorkspaceError):
    """A mount or bucket that does not answer: the state of its files is unknown, and nothing was lost."""


class CheckpointError(FactoryError):
    """A state that cannot be saved or loaded."""


class NonFiniteError(CheckpointError):
    """A weight or an optimizer tensor is not finite: such a state is never saved."""


class NotPreparedError(FactoryError):
    """Output of an earlier step that does not exist yet."""


class DatabaseError(FactoryError):
    """A database that cannot be reached, refuses a question, or whose rows are not those of the file."""


class MissingPackageError(FactoryError):
    """A package that an extra of this library would have installed."""


class LookAheadError(FactoryError):
    """A computation that reads future values."""


class SessionOverError(FactoryError):
    """The session ends; the work was saved and stopped before."""


MORE_MEMORY = "close other programs or kernels, or use a machine with more memory, and run again"


@contextmanager
def refuse_damaged_content(kind: type[FactoryError], what: str, *, where: object = None, next_step: str) -> Iterator:
    """Raise `kind` where the values of a file are not those that its reader expects: names that are missing, other
    types or shapes, numbers out of range. Raises WorkspaceError where memory or the disk failed, not the content.
    """
    try:
        yield
    except FactoryError:
        raise
    except (
        LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError, MemoryError,
        OSError,
    ) as error:  # fmt: skip
        got = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if isinstance(error, MemoryError) or "out of memory" in got.lower():
            raise WorkspaceError("This content needs more memory than there is", where=where, got=got,
                                 next_step=MORE_MEMORY) from error  # fmt: skip
        if isinstance(error, OSError) and error.errno is not None:
            raise WorkspaceError("A file could not be read", where=where, got=got,
                                 next_step="check that its disk or mount answers") from error  # fmt: skip
        raise kind(what, where=where, got=got, next_step=next_step) from error


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return 'did you mean X?' for the closest option, else the list of options; "" where there are none."""
    options = sorted(options)
    if not options:
        return ""
    close = difflib.get_close_matches(str(name), options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "use one of " + ", ".join(options)


def check_known(what: str, where: object, name: str, known: Collection[str]) -> str:
    """Return a name that is one of the known ones. Raises SettingsError with the nearest, or all of them, for another.

    what : the error's first sentence.
    """
    if name not in known:
        raise SettingsError(what, where=where, got=repr(name), next_step=did_you_mean(name, known))
    return name
