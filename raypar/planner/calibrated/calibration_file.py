"""The file of a calibration: its path, reading with checks, and writing."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from raypar.actors.machine.files import WholeFile, expanded, read_named, sync_folder, write_whole
from raypar.errors import ConfigError
from raypar.planner.calibrated.calibration import FORMAT, Calibration

VARIABLE = "RAYPAR_CALIBRATION"
DEFAULT = Path("~/.raypar/calibration.json")
_MOST = 16 << 20  # bytes
_MOST_FAULTS = 20  # faults of a file
_AGAIN = "measure again with raypar calibrate"


def default_path() -> Path | None:
    """Return the file that predictions use: what RAYPAR_CALIBRATION names, else ~/.raypar/calibration.json.

    None if RAYPAR_CALIBRATION is empty: then predictions use none.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        return expanded(DEFAULT)
    return expanded(named) if named else None


def unwritable_faults(path: Path) -> Iterator[str]:
    """Yield why a calibration can't be written to a file, before it is measured. Creates its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            yield f"the calibration can't be written to {str(path)!r}, a folder: give a file"
        elif path.exists() and not path.is_file():
            yield f"the calibration can't be written to {str(path)!r}, a device or a pipe: give a file"
        else:
            WholeFile(path.resolve()).close()
    except (OSError, ValueError) as error:
        yield _unwritten(path, error)


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration: aside, synced, then renamed, so that a reader finds the old one or the new one.

    Raises:
        ConfigError: It can't be written.
    """
    text = json.dumps(asdict(calibration), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.resolve()  # the target of a link
        write_whole(file, [memoryview(text.encode())])
        sync_folder(file.parent)
    except (OSError, ValueError) as error:
        raise ConfigError([_unwritten(path, error)]) from error


def _unwritten(path: Path, error: Exception) -> str:
    """Say why a calibration can't be written."""
    reason = getattr(error, "strerror", None) or error
    return f"the calibration {str(path)!r} can't be written ({reason}): give another path"


def read_calibration(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        ConfigError: It can't be read, or has faults, all of which are listed.
    """
    try:
        text = read_named(path, _MOST)
        written = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"the calibration {str(path)!r} can't be read ({reason}): {_AGAIN}"]) from error
    if isinstance(written, dict) and written.get("format") != FORMAT:
        has = reprlib.repr(written.get("format"))
        formats = f"the calibration {str(path)!r} has format {has}, and this raypar reads {FORMAT}"
        raise ConfigError([f"{formats}: {_AGAIN}"])
    try:
        return TypeAdapter(Calibration).validate_json(text)
    except ValidationError as error:
        found = error.errors()
        wrong = [_wrong(one) for one in found[:_MOST_FAULTS]]
        if len(found) > _MOST_FAULTS:
            wrong.append(f"{len(found) - _MOST_FAULTS:,} more values are wrong")
        raise ConfigError([f"the calibration {str(path)!r}: {one}: {_AGAIN}" for one in wrong]) from error


def found_calibration() -> Calibration | None:
    """Return the calibration that predictions use; None if there is no file, or RAYPAR_CALIBRATION is empty.

    Raises:
        ConfigError: There is a file, and it has faults; or the one that RAYPAR_CALIBRATION names is not there.
    """
    path = default_path()
    if path is None or (VARIABLE not in os.environ and not os.path.lexists(path)):
        return None
    return read_calibration(path)


def calibration_faults(path: Path | None) -> Iterator[str]:
    """Yield the faults of the calibration that a flag names; nothing if it names none."""
    if path is not None:
        try:
            read_calibration(path)
        except ConfigError as error:
            yield from error.faults


@contextmanager
def calibration_named(path: Path | None) -> Iterator[None]:
    """Make predictions use the calibration of a file, as if RAYPAR_CALIBRATION named it; None changes nothing."""
    before = os.environ.get(VARIABLE)
    if path is not None:
        os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        if path is not None:
            os.environ.pop(VARIABLE)
            os.environ.update({} if before is None else {VARIABLE: before})


def _wrong(found: ErrorDetails) -> str:
    """Say what is wrong with a value of the file: what it is, and what it must be."""
    path, said = _spelled_path(found["loc"]), found["msg"]
    if found["type"] == "missing":
        return f"{path} is missing"
    must = said.removeprefix("Input should be ")
    return f"{path} is {reprlib.repr(found['input'])}, and must be {must}" if must != said else f"{path}: {said}"


def _spelled_path(path: tuple[int | str, ...]) -> str:
    """Return the path of a value in the file, as ``products[3].forward``."""
    text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).lstrip(".")
    return text or "its text"
