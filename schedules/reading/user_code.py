"""Schedule generators of the user, named by a word.

A word is ``path/to/file.py:function``, ``package.module:function``, or a name of the entry point group
``raypar.schedules``. Naming a generator runs the user's code.
"""

from __future__ import annotations

import importlib
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from importlib.util import decode_source
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from raypar.schedules.generators.entry import Entry, exception_phrase
from raypar.schedules.nearest_name import did_you_mean
from raypar.schedules.schedule import ScheduleError

GROUP = "raypar.schedules"

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def names_code(word: str) -> bool:
    """Return whether a word names a function rather than a schedule of the catalog."""
    return ":" in word or word.endswith(".py")


def user_entry(word: str) -> Entry:
    """Load the generator that a word names. A file is executed again at each call, so edits take effect at once.

    Args:
        word: ``path/to/file.py:function`` or ``package.module:function``.

    Returns:
        The generator's catalog entry.

    Raises:
        ScheduleError: If the file, module or function can't be found, or if the user's code fails (the text names the
            line).
    """
    where, _, function = word.rpartition(":")
    is_file = where.endswith(".py")
    if not _MODULE.fullmatch(function) or not (is_file or _MODULE.fullmatch(where)):
        fix = "write path/to/file.py:function or package.module:function"
        raise ScheduleError(f"schedule {word!r} names no function: {fix}")
    module = _run(Path(where).expanduser(), word) if is_file else _imported(where, word)
    found: Any = module
    for part in function.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ScheduleError(f"schedule {word!r}: {where} has no function {function!r}{_others(function, module)}")
    try:
        return Entry.of(found)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {word!r}: {error}") from error


def installed() -> Mapping[str, Callable[[], Any]]:
    """Return the generators of installed packages: for each entry point name, a function that loads it."""
    from importlib.metadata import entry_points  # imported here because it is slow and needed only for unknown names

    return {point.name: point.load for point in entry_points(group=GROUP)}


def _run(path: Path, word: str) -> ModuleType:
    """Execute a file as a module with a private name, so that it shadows no other module and writes no cache file."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ScheduleError(f"schedule {word!r}: {path} is no plain file: correct the path")
    try:
        source = decode_source(path.read_bytes())
    except OSError as error:
        raise ScheduleError(f"schedule {word!r}: {path} can't be read ({error.strerror}): correct the path") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ScheduleError(
            f"schedule {word!r}: {path} is not a text of Python ({error}): write it in UTF-8"
        ) from error
    file = str(path.absolute())
    module = ModuleType(f"_raypar_{path.stem}_{zlib.crc32(file.encode()):08x}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    try:
        exec(compile(source, file, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise ScheduleError(f"schedule {word!r}: {path} {exception_phrase(error, file)}") from error
    return module


def _imported(name: str, word: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            fix = f"install it, or name its file: {name.replace('.', '/')}.py:{word.rpartition(':')[2]}"
            raise ScheduleError(f"schedule {word!r}: there is no module {name!r}: {fix}") from error
        file = error.filename if isinstance(error, SyntaxError) else extract_tb(error.__traceback__)[-1].filename
        raise ScheduleError(f"schedule {word!r}: {name} {exception_phrase(error, file)}") from error


def _others(function: str, module: ModuleType) -> str:
    """Say which functions of the module the user may have meant; only those that the module itself defines count."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    own = [name for name in own if callable(getattr(module, name))]
    otherwise = f"it has {', '.join(own[:8])}" if own else "define it there, at the top level"
    return ": " + did_you_mean(function, own, otherwise, spelled=repr)
