"""The file of a calibration: where it is, how it is written, and what is wrong with one that can't be used."""

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
_TOLD = 20  # faults of a file
_AGAIN = "measure again with raypar calibrate"


def default_path() -> Path | None:
    """Return the file that predictions use: what RAYPAR_CALIBRATION names, else ~/.raypar/calibration.json.

    None if RAYPAR_CALIBRATION is empty: then predictions use none.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        return expanded(DEFAULT)
    return expanded(named) if named else None


def place_faults(path: Path) -> Iterator[str]:
    """Yield why a calibration can't be written to a file, before it is measured. Its folder is made."""
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
        file = path.resolve()  # of a link what it names
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
        told = f"the calibration {str(path)!r} has format {has}, and this raypar reads {FORMAT}"
        raise ConfigError([f"{told}: {_AGAIN}"])
    try:
        return TypeAdapter(Calibration).validate_json(text)
    except ValidationError as error:
        found = error.errors()
        wrong = [_wrong(one) for one in found[:_TOLD]]
        if len(found) > _TOLD:
            wrong.append(f"{len(found) - _TOLD:,} more values are wrong")
        raise ConfigError([f"the calibration {str(path)!r}: {one}: {_AGAIN}" for one in wrong]) from error


def found_calibration() -> Calibration | None:
    """Return the calibration that predictions use; None if there is no file, or none is wanted.

    Raises:
        ConfigError: There is a file, and it has faults; or the one that RAYPAR_CALIBRATION names is not there.
    """
    path = default_path()
    if path is None or (VARIABLE not in os.environ and not os.path.lexists(path)):
        return None
    return read_calibration(path)


def calibration_faults(path: Path | None) -> Iterator[str]:
    """Yield what is wrong with the calibration that a flag names; nothing if it names none."""
    if path is not None:
        try:
            read_calibration(path)
        except ConfigError as error:
            yield from error.faults


@contextmanager
def calibration_named(path: Path | None) -> Iterator[None]:
    """Have predictions use the calibration of a file, as if RAYPAR_CALIBRATION named it; None: the one they would."""
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
    """Say what is wrong at a place of the text: what is there, and what it must be."""
    place, said = _place(found["loc"]), found["msg"]
    if found["type"] == "missing":
        return f"{place} is missing"
    must = said.removeprefix("Input should be ")
    return f"{place} is {reprlib.repr(found['input'])}, and must be {must}" if must != said else f"{place}: {said}"


def _place(path: tuple[int | str, ...]) -> str:
    """Spell where a fault is: ``products[3].forward``."""
    text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in path).lstrip(".")
    return text or "its text"
