"""A tokenizer in a folder of Hugging Face: text to ids and back, special tokens, and its chat template.

It needs the tokenizers package, and for a chat template jinja2; both are imported where they are used.

How many bytes of text every id of a tokenizer stands for, by which losses a token become bits a byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from raypar.actors.data.example_shapes import ExampleError, ExampleText, Template
from raypar.actors.files import expanded, open_named, read_named

Ids: TypeAlias = npt.NDArray[np.uint32]


Mask: TypeAlias = npt.NDArray[np.uint8]


_FILE, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


_ENDS = ("generation_config.json", "config.json")  # which say what ids end a text


_NAMED_TEMPLATES = "additional_chat_templates"


_SPECIAL = "special_tokens_map.json"


_MOST_BYTES = 1 << 30


Sizes = npt.NDArray[np.int64]


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of SentencePiece that is one byte


_SPACE = "\u2581"  # of SentencePiece


_WRITTEN = {"Metaspace", "ByteFallback"}  # decoders of tokens that are written as the text is, but for spaces


def bytes_of_ids(model: Any) -> Sizes | None:
    """Return the bytes that each id of a tokenizer stands for; special tokens stand for none.

    Args:
        model: The tokenizer of the tokenizers package.

    Returns:
        The numbers (ids,); None if the tokens do not say: those of WordPiece, say, leave spaces out.
    """
    told = json.loads(model.to_str())
    decoders = [*_decoders(told.get("decoder"))]
    kinds = {one["type"] for one in decoders}
    spaces = any(one["type"] == "Replace" and _SPACE in json.dumps(one, ensure_ascii=False) for one in decoders)
    vocab: dict[str, int] = model.get_vocab()
    sizes = np.zeros(max(vocab.values(), default=-1) + 1, np.int64)
    if "ByteLevel" in kinds:
        for token, number in vocab.items():
            sizes[number] = len(token)  # a character for each byte
    elif kinds & _WRITTEN or spaces:
        for token, number in vocab.items():
            sizes[number] = 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
    else:
        return None
    for added in told.get("added_tokens") or ():
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return sizes


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each decoder."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for one in decoder["decoders"]:
            yield from _decoders(one)
    else:
        yield decoder


class Tokenized(NamedTuple):
    """An example as tokens.

    Attributes:
        ids: Their ids (n,).
        learned: 1 for those that are targets, else 0, (n,).
    """

    ids: Ids
    learned: Mask


class Added(NamedTuple):
    """What the post-processor of a tokenizer.json puts around a text.

    Attributes:
        front: Ids in front, such as that of ``<bos>``.
        behind: Ids behind.
    """

    front: tuple[int, ...]
    behind: tuple[int, ...]


class Tokenizer:
    """A tokenizer.

    Args:
        path: Folder with a tokenizer.json, or that file; None for bytes.
        template: File with a chat template; None for the folder's.

    Attributes:
        num_ids: Its ids are below that.

    Raises:
        ExampleError: A file can't be read, or a package is missing.
    """

    def __init__(self, path: str | None, template: str | None = None) -> None:
        home = None if path is None else expanded(path)
        self._folder = home if home is None or home.is_dir() else home.parent
        self._file = home if home is None or not home.is_dir() else home / _FILE
        self._settings = self._read_json(_SETTINGS)
        self._source = self._read_template(template)
        self._model = None if self._file is None else _model(self._file)
        ids = [] if self._model is None else self._model.get_vocab().values()
        self.num_ids = 256 if self._model is None else max(ids, default=-1) + 1

    @cached_property
    def tokens(self) -> Mapping[str, str]:
        """The special tokens by their names, such as ``eos_token``."""
        found = {**self._read_json(_SPECIAL), **self._settings}
        named = {name: one for name, one in found.items() if name.endswith("_token")}
        texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in named.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @property
    def special(self) -> tuple[str, ...]:
        """All special tokens of its tokenizer.json."""
        if self._model is None:
            return ()
        return tuple(one.content for one in self._model.get_added_tokens_decoder().values() if one.special)

    @cached_property
    def end(self) -> str:
        """The token that ends a text; "" if there is none.

        It is the folder's ``eos_token``, else what its configurations say, else what the post-processor puts behind.
        """
        if "eos_token" in self.tokens or self._model is None:
            return self.tokens.get("eos_token", "")
        found = (self._model.id_to_token(one) for one in (*self._told_ends(), *reversed(self.added.behind)))
        return next((token for token in found if token is not None), "")

    @cached_property
    def begin(self) -> int | None:
        """The id of the folder's ``bos_token``; None if there is none."""
        name = self.tokens.get("bos_token")
        found = None if self._model is None or name is None else self._model.token_to_id(name)
        return found if isinstance(found, int) else None

    @cached_property
    def added(self) -> Added:
        """The ids that the post-processor puts around a text."""
        if self._model is None:
            return Added((), ())
        found = self._model.encode("a")
        inner = [place for place, is_special in enumerate(found.special_tokens_mask) if not is_special] or [0]
        return Added(tuple(found.ids[: inner[0]]), tuple(found.ids[inner[-1] + 1 :]))

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end a generated text: that of ``end``, and those that the folder's configurations say."""
        own = None if self._model is None or not self.end else self._model.token_to_id(self.end)
        return frozenset([*([own] if isinstance(own, int) else []), *self._told_ends()])

    @cached_property
    def id_bytes(self) -> Sizes | None:
        """The bytes (ids,) that each id stands for; see ``bytes_of_ids``."""
        return np.ones(self.num_ids, np.int64) if self._model is None else bytes_of_ids(self._model)

    @cached_property
    def template(self) -> Template | None:
        """The chat template; None if there is none. Raises ExampleError if it is broken, or jinja2 is missing."""
        if self._source is None:
            return None
        try:
            from raypar.actors.data.chat_template import ChatTemplate  # imports jinja2
        except ImportError as error:
            raise ExampleError("a chat template needs the jinja2 package: pip install jinja2") from error
        return ChatTemplate(self._source, self.tokens, self.special)

    @cached_property
    def key(self) -> str:
        """A hash of all that the ids of an example depend on."""
        file = b"" if self._file is None else read_named(self._file, _MOST_BYTES)
        depends = hashlib.sha256(file).digest(), self._source, self.tokens, self.end
        return hashlib.sha256(repr(depends).encode()).hexdigest()

    def tokenized(self, examples: Sequence[ExampleText]) -> Iterator[Tokenized]:
        """Yield examples as tokens; several are encoded in parallel.

        A token is a target if any of its characters is learned. Around a text is what the post-processor puts in
        front, once; what it puts behind is left out, since a text has its end already.
        """
        if self._model is None:
            yield from map(_as_bytes, examples)
            return
        chats = self._encoded([one.text for one in examples if one.is_chat], special=False)
        texts = self._encoded([one.text for one in examples if not one.is_chat], special=True)
        for one in examples:
            found = next(chats if one.is_chat else texts)
            own = slice(0, None) if one.is_chat else self._own(found.ids)
            offsets = np.array(found.offsets[own], np.int64).reshape(-1, 2)
            learned = np.zeros(len(offsets), np.uint8)
            for start, stop in one.learned:
                learned |= ((offsets[:, 1] > start) & (offsets[:, 0] < stop)).astype(np.uint8)
            yield Tokenized(np.array(found.ids[own], np.uint32), learned)

    def encoded(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, in which special tokens may be written; none is added."""
        if self._model is None:
            return tuple(text.encode())
        return tuple(self._model.encode(text, add_special_tokens=False).ids)

    def prompted(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text to go on with: behind what the post-processor puts in front, and without an end.

        A text that begins with that already, as one that a chat template wrote, gets it once.
        """
        if self._model is None:
            return self.encoded(text)
        ids = self._model.encode(text).ids
        return tuple(ids[self._own(ids)])

    def _own(self, ids: Sequence[int]) -> slice:
        """Return which ids, of a text and what the post-processor adds, belong to a text: once those in front."""
        front, behind = self.added
        has_two = bool(front) and tuple(ids[len(front) : 2 * len(front)]) == front
        return slice(len(front) if has_two else 0, len(ids) - len(behind))

    def decoded(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of ids, special tokens too unless these are to be left out; of bytes, ids below 256."""
        if self._model is None:
            return bytes(one for one in ids if one < 256).decode(errors="replace")
        text: str = self._model.decode(list(ids), skip_special_tokens=not special)
        return text

    def _encoded(self, texts: Sequence[str], *, special: bool) -> Iterator[Any]:
        assert self._model is not None
        return iter(self._model.encode_batch(list(texts), add_special_tokens=special) if texts else [])

    def _told_ends(self) -> list[int]:
        """Return the ids that the folder's configurations say to end a text."""
        told = (self._read_json(name).get("eos_token_id") for name in _ENDS)
        return [one for ids in told for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)]

    def _read_json(self, name: str) -> Mapping[str, Any]:
        """Read a file of the folder that holds an object; {} if there is none. Raises ExampleError."""
        if self._folder is None or not (self._folder / name).is_file():
            return {}
        try:
            found = json.loads(read_named(self._folder / name, _MOST_BYTES))
        except (OSError, ValueError) as error:
            raise ExampleError(f"tokenizer: {name} can't be read ({error}): copy it again") from error
        return found if isinstance(found, dict) else {}

    def _read_template(self, template: str | None) -> str | dict[str, str] | None:
        """Return the source of the chat template: the file's that is given, the folder's, or those of its settings.

        As in transformers, files of the folder, of which several have names, go before its settings.
        """
        if template is not None:
            return _template_text(expanded(template))
        files = dict[str, str]()
        if self._folder is not None:
            if (self._folder / _TEMPLATE).is_file():
                files["default"] = _template_text(self._folder / _TEMPLATE)
            for path in sorted(path for path in (self._folder / _NAMED_TEMPLATES).glob("*.jinja") if path.is_file()):
                files[path.stem] = _template_text(path)
        if files:
            return files["default"] if [*files] == ["default"] else files
        found = self._settings.get("chat_template")
        if isinstance(found, list):  # several, by name
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = {name: one for name, one in named.items() if isinstance(name, str) and isinstance(one, str)}
        return found if found and isinstance(found, str | dict) else None


def _template_text(path: Path) -> str:
    """Read the file of a chat template. Raises ExampleError."""
    try:
        return read_named(path, _MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ExampleError(f"template: {str(path)!r} can't be read ({error}): correct the file or its path") from error


def _model(path: Path) -> Any:
    """Read a tokenizers JSON file. Raises ExampleError."""
    if not path.exists():
        fix = (
            "give a folder that has it (save_pretrained writes it), or set data.tokenizer to none for a model of bytes"
        )
        raise ExampleError(f"tokenizer: {str(path.parent)!r} has no {path.name}: {fix}")
    try:
        from tokenizers import Tokenizer as Model

        with open_named(path) as file:
            model = Model.from_buffer(file.read())
    except ImportError as error:
        raise ExampleError("tokenizer: it needs the tokenizers package: pip install tokenizers") from error
    except Exception as error:  # tokenizers raises Exception itself
        raise ExampleError(
            f"tokenizer: {str(path)!r} is not a tokenizers JSON file ({error}): give a folder"
        ) from error
    model.no_truncation()
    model.no_padding()
    return model


def _as_bytes(example: ExampleText) -> Tokenized:
    """Return the UTF-8 bytes of an example as tokens."""
    ids = np.frombuffer(example.text.encode(), np.uint8).astype(np.uint32)
    learned = np.zeros(len(ids), np.uint8)
    for start, stop in example.learned:
        first = len(example.text[:start].encode())
        learned[first : first + len(example.text[start:stop].encode())] = 1
    return Tokenized(ids, learned)


def fix_of_vocab(num_ids: int, folder: str | None) -> str:
    """Return what to do where a tokenizer has larger ids than a model: the embedding of a folder has its own size.

    Args:
        num_ids: The number of ids that the data can have.
        folder: The folder of Hugging Face that the model is from; None if it is from none.
    """
    if folder is None:
        return f"set model.vocab to {num_ids}, or use a tokenizer with fewer ids"
    return (
        f"use the tokenizer in {folder!r}, or resize the embedding in transformers first "
        f"(model.resize_token_embeddings({num_ids}), and save_pretrained)"
    )
