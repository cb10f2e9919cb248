"""Files of examples in blocks: read in order by this process, and parsed by the process that converts them.

A block is a line of JSON, with its kind, file and position, followed by its bytes: lines of a .jsonl file, a list in
JSON, or a record batch of Arrow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raypar.actors.data.tokenizers.example_shapes import ExampleError
from raypar.actors.machine.files import open_named, to_utf8

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".txt")
_EXAMPLES = 1000  # of a block, at most
_BYTES = 1 << 20  # of a block of long examples, approximately
_MOST_LINE = 1 << 26  # bytes of an example
_PYARROW = "needs the pyarrow package: pip install 'raypar[datasets]'"


class FoundExample(NamedTuple):
    """An example of a block.

    Attributes:
        where: Its file and number, for messages.
        record: The parsed example, or an ExampleError if it can't be parsed.
    """

    where: str
    record: Any


def blocks_of_examples(files: Iterable[Path], read: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the examples of files in blocks, in order.

    Args:
        files: The files.
        read: Called with the number of further bytes of the files that were read.

    Raises:
        ExampleError: A file is broken, or pyarrow is missing.
        OSError: A file can't be read.
    """
    for file in files:
        if file.suffix in (".parquet", ".arrow"):
            yield from _rows(file, read)
        elif file.suffix == ".jsonl":
            yield from _lines(file, read)
        else:
            is_text = file.suffix == ".txt"
            yield from _values(file.name, [{"text": _text(file)}]) if is_text else _json(file)
            read(file.stat().st_size)


def _text(file: Path) -> str:
    """Return a file's text, without a byte order mark. Raises ExampleError if it is no UTF-8."""
    try:
        with open_named(file) as source:
            return source.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte {error.start} ({error.object[error.start]:#04x})"
        fix = f"convert it, if it is latin-1 with {to_utf8(file, 'LATIN1')}"
        raise ExampleError(f"{file.name} is no UTF-8 text: {where} is not UTF-8: {fix}") from error


def examples_in(block: bytes) -> Iterator[FoundExample]:
    """Yield the examples of a block. Raises ExampleError if pyarrow is missing."""
    raw, _, body = block.partition(b"\n")
    head = json.loads(raw)
    file, number = head["file"], head["number"]
    if head["kind"] == "wrong":
        yield FoundExample(file, ExampleError(body.decode()))
    elif head["kind"] == "lines":
        for line, text in enumerate(body.split(b"\n"), number):
            if text.strip():
                yield _parsed(text, f"line {line} of {file}")
    else:
        records = _batch(body) if head["kind"] == "rows" else json.loads(body)
        yield from (FoundExample(f"example {number + i} of {file}", record) for i, record in enumerate(records))


def _block(kind: str, file: str, body: bytes, number: int = 1) -> bytes:
    """Return a block of a kind, whose first line of the file or whose first example has this number."""
    head = {"kind": kind, "file": file, "number": number}
    return json.dumps(head).encode() + b"\n" + body


def _lines(file: Path, read: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the lines of a file in blocks, each with the number of its first line."""
    line = 1
    with open_named(file) as source:
        while lines := [*_some(source.readline)]:
            body = b"".join(lines)
            yield _block("lines", file.name, body, line)
            line += len(lines)
            read(len(body))


def _some(readline: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the lines of a block. It ends at the end of the file, or with the first part of a line that is too long."""
    size = 0
    for _ in range(_EXAMPLES):
        if not (line := readline(_MOST_LINE)):
            return
        yield line
        size += len(line)
        if size >= _BYTES or not line.endswith(b"\n"):
            return


def _parsed(line: bytes, where: str) -> FoundExample:
    try:
        return FoundExample(where, json.loads(line))
    except json.JSONDecodeError as error:  # its text counts lines within this one
        return FoundExample(where, ExampleError(f"is not JSON ({error.msg}: column {error.colno})"))
    except (ValueError, RecursionError) as error:
        return FoundExample(where, ExampleError(f"is not JSON ({error})"))


def _json(file: Path) -> Iterator[bytes]:
    """Yield the values of a JSON file in blocks: the items of a list, or the one value."""
    try:
        with open_named(file) as source:
            found = json.loads(source.read())
    except (ValueError, RecursionError) as error:
        yield _block("wrong", file.name, f"is not JSON ({error})".encode())
        return
    yield from _values(file.name, found if isinstance(found, list) else [found])


def _values(file: str, values: Sequence[Any]) -> Iterator[bytes]:
    for first in range(0, len(values), _EXAMPLES):
        body = json.dumps(values[first : first + _EXAMPLES]).encode()
        yield _block("values", file, body, first + 1)


def _rows(file: Path, read: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the rows of a file of Parquet or Arrow in blocks; a few of them are in memory at a time."""
    try:
        import pyarrow  # type: ignore[import-untyped,import-not-found,unused-ignore]
        from pyarrow import parquet  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise ExampleError(f"{file.name} {_PYARROW}") from error
    size, reported, example = file.stat().st_size, 0, 1
    try:
        with open_named(file):  # refuses a pipe, on which pyarrow would wait
            pass
        if file.suffix == ".parquet":
            opened = parquet.ParquetFile(file)
            batches, rows = opened.iter_batches(_EXAMPLES), opened.metadata.num_rows
        else:
            source = pyarrow.memory_map(str(file))
            batches, rows = pyarrow.ipc.open_stream(source), 0
        for whole in batches:
            for first in range(0, whole.num_rows, _EXAMPLES):
                batch = whole.slice(first, _EXAMPLES)
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, batch.schema) as out:
                    out.write_batch(batch)
                yield _block("rows", file.name, sink.getvalue().to_pybytes(), example)
                example += batch.num_rows
            now = size * (example - 1) // rows if rows else source.tell()
            read(now - reported)
            reported = now
    except (pyarrow.ArrowException, OSError) as error:  # OSError: the file is truncated
        raise ExampleError(f"{file.name} is broken, or of another kind ({error}): copy or save it again") from error


def _batch(body: bytes) -> Iterator[Any]:
    """Yield the rows of a block, each without its columns that are null."""
    try:
        import pyarrow
    except ImportError as error:
        raise ExampleError(_PYARROW) from error
    for row in pyarrow.ipc.open_stream(body).read_all().to_pylist():
        yield {name: value for name, value in row.items() if value is not None}
