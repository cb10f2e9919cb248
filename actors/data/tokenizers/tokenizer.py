"""A tokenizer in a Hugging Face folder: text to ids and back, special tokens, its chat template, bytes of each id.

It needs the tokenizers package, and for a chat template jinja2; both are imported where they are used.
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

from raypar.actors.data.tokenizers.example_shapes import ExampleError, ExampleText, Template
from raypar.actors.machine.files import expanded, open_named, read_named
from raypar.actors.machine.hub_names import download_hint

Ids: TypeAlias = npt.NDArray[np.uint32]
Mask: TypeAlias = npt.NDArray[np.uint8]
Sizes: TypeAlias = npt.NDArray[np.int64]

_FILE = "tokenizer.json"
_SETTINGS, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_CONFIGS = ("generation_config.json", "config.json")  # files with the ids that end a text
_NAMED_TEMPLATES = "additional_chat_templates"
_SPECIAL = "special_tokens_map.json"
_MOST_BYTES = 1 << 30  # of a file

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of SentencePiece that is one byte
_SPACE = "\u2581"  # of SentencePiece
_LITERAL = {"Metaspace", "ByteFallback"}  # decoders of tokens that are spelled as in the text, but for spaces


def bytes_of_ids(model: Any) -> Sizes | None:
    """Return the number of bytes of text of each token id, to convert losses per token to bits per byte.

    Special tokens have none.

    Args:
        model: The tokenizer of the tokenizers package.

    Returns:
        The numbers of bytes (ids,); None if they do not follow from the tokens: WordPiece, say, leaves spaces out.
    """
    settings = json.loads(model.to_str())
    decoders = [*_decoders(settings.get("decoder"))]
    kinds = {one["type"] for one in decoders}
    spaces = any(one["type"] == "Replace" and _SPACE in json.dumps(one, ensure_ascii=False) for one in decoders)
    vocab: dict[str, int] = model.get_vocab()
    sizes = np.zeros(max(vocab.values(), default=-1) + 1, np.int64)
    if "ByteLevel" in kinds:
        for token, number in vocab.items():
            sizes[number] = len(token)  # a character for each byte
    elif kinds & _LITERAL or spaces:
        for token, number in vocab.items():
            sizes[number] = 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
    else:
        return None
    for added in settings.get("added_tokens") or ():
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
        ids: Token ids (n,).
        loss_mask: 1 for tokens that are targets, else 0, (n,).
    """

    ids: Ids
    loss_mask: Mask


class Added(NamedTuple):
    """The ids that the post-processor of a tokenizer.json adds around a text.

    Attributes:
        front: Ids before the text, such as that of ``<bos>``.
        end: Ids after the text.
    """

    front: tuple[int, ...]
    end: tuple[int, ...]


class Tokenizer:
    """A tokenizer.

    Args:
        path: Folder with a tokenizer.json, or that file; None for bytes.
        template: File with a chat template; None for the folder's.

    Attributes:
        num_ids: Its ids are 0 to num_ids - 1.

    Raises:
        ExampleError: A file can't be read, or a package is missing.
    """

    def __init__(self, path: str | None, template: str | None = None) -> None:
        self._file = None if path is None else tokenizer_file(path)
        self._folder = None if self._file is None else self._file.parent
        self._settings = self._read_json(_SETTINGS)
        self._source = self._read_template(template)
        self._model = None if self._file is None else _model(self._file, has_template=template is not None)
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

        It is the folder's ``eos_token``, else that of its configurations, else the last id of the post-processor.
        """
        if "eos_token" in self.tokens or self._model is None:
            return self.tokens.get("eos_token", "")
        found = (self._model.id_to_token(one) for one in (*self._configured_ends(), *reversed(self.added.end)))
        return next((token for token in found if token is not None), "")

    @cached_property
    def begin(self) -> int | None:
        """The id of the folder's ``bos_token``; None if there is none."""
        name = self.tokens.get("bos_token")
        found = None if self._model is None or name is None else self._model.token_to_id(name)
        return found if isinstance(found, int) else None

    @cached_property
    def added(self) -> Added:
        """The ids that the post-processor adds around a text."""
        if self._model is None:
            return Added((), ())
        found = self._model.encode("a")
        inner = [i for i, is_special in enumerate(found.special_tokens_mask) if not is_special] or [0]
        return Added(tuple(found.ids[: inner[0]]), tuple(found.ids[inner[-1] + 1 :]))

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end a generated text: that of ``end``, and those of the folder's configurations."""
        own = None if self._model is None or not self.end else self._model.token_to_id(self.end)
        return frozenset([*([own] if isinstance(own, int) else []), *self._configured_ends()])

    @cached_property
    def id_bytes(self) -> Sizes | None:
        """The number of bytes (ids,) of each id's text; see ``bytes_of_ids``."""
        return np.ones(self.num_ids, np.int64) if self._model is None else bytes_of_ids(self._model)

    @cached_property
    def template(self) -> Template | None:
        """The chat template; None if there is none. Raises ExampleError if it is broken, or jinja2 is missing."""
        if self._source is None:
            return None
        try:
            from raypar.actors.data.tokenizers.chat_template import ChatTemplate  # imports jinja2
        except ImportError as error:
            raise ExampleError("a chat template needs the jinja2 package: pip install jinja2") from error
        return ChatTemplate(self._source, self.tokens, self.special)

    @cached_property
    def key(self) -> str:
        """A hash of all that the ids of an example depend on."""
        file = b"" if self._file is None else read_named(self._file, _MOST_BYTES)
        depends = hashlib.sha256(file).digest(), self._source, self.tokens, self.end
        return hashlib.sha256(repr(depends).encode()).hexdigest()

    def tokens_with_loss_mask(self, examples: Sequence[ExampleText]) -> Iterator[Tokenized]:
        """Yield examples as tokens; several are encoded in parallel.

        A token is a target if any of its characters is learned. The post-processor's ids are added in front of a text,
        once; those at the end are left out, since a text has its end token already.
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
        """Return the ids of a text, which may contain special tokens; none is added."""
        if self._model is None:
            return tuple(text.encode())
        return tuple(self._model.encode(text, add_special_tokens=False).ids)

    def prompted(self, text: str) -> tuple[int, ...]:
        """Return the ids of a prompt: with the post-processor's ids in front, and without those at the end.

        A text that has those in front already, such as the text of a chat template, does not get them again.
        """
        if self._model is None:
            return self.encoded(text)
        ids = self._model.encode(text).ids
        return tuple(ids[self._own(ids)])

    def _own(self, ids: Sequence[int]) -> slice:
        """Return which ids of a post-processed text to keep: not those at the end, and those in front once."""
        front, end = self.added
        has_two = bool(front) and tuple(ids[len(front) : 2 * len(front)]) == front
        return slice(len(front) if has_two else 0, len(ids) - len(end))

    def decoded(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of ids, with special tokens if ``special``. Of bytes, ids from 256 on are left out."""
        if self._model is None:
            return bytes(one for one in ids if one < 256).decode(errors="replace")
        text: str = self._model.decode(list(ids), skip_special_tokens=not special)
        return text

    def _encoded(self, texts: Sequence[str], *, special: bool) -> Iterator[Any]:
        assert self._model is not None
        return iter(self._model.encode_batch(list(texts), add_special_tokens=special) if texts else [])

    def _configured_ends(self) -> list[int]:
        """Return the ids that end a text by the folder's configurations."""
        values = (self._read_json(name).get("eos_token_id") for name in _CONFIGS)
        return [one for ids in values for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)]

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
        """Return the source of the chat template: of the file ``template``, else of the folder's files or settings.

        As in transformers, template files of the folder take precedence over its settings.
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


def _model(path: Path, *, has_template: bool) -> Any:
    """Read a tokenizers JSON file. Raises ExampleError.

    Args:
        path: The file.
        has_template: Whether the user names a chat template, which bytes have none of.
    """
    if not path.exists():
        fix = (
            "give a folder that has it (save_pretrained writes it), or for a model of bytes set data.tokenizer to none"
        )
        template = "" if has_template else ", and for conversations data.template to a file with a chat template"
        is_in_folder = path.name == _FILE and path.parent.is_dir()
        lack = f"{str(path.parent)!r} has no {path.name}" if is_in_folder else f"there is no {str(path)!r}"
        hint = "" if is_in_folder else download_hint(str(path))
        raise ExampleError(f"tokenizer: {lack}: {fix}{template}{hint}")
    try:
        return read_tokenizer(path)
    except ImportError as error:
        raise ExampleError("tokenizer: it needs the tokenizers package: pip install tokenizers") from error
    except Exception as error:  # tokenizers raises Exception itself
        wrong = f"is not a tokenizers JSON file ({error})"
        raise ExampleError(f"tokenizer: {str(path)!r} {wrong}: give a folder") from error


def tokenizer_file(path: str) -> Path:
    """Return the tokenizers JSON file of a path: the path itself, or tokenizer.json in a Hugging Face folder."""
    found = expanded(path)
    return found / _FILE if found.is_dir() else found


def read_tokenizer(path: Path) -> Any:
    """Read a tokenizers JSON file.

    Args:
        path: The file.

    Raises:
        ImportError: The tokenizers package is missing.
        Exception: The file can't be read, or is no such file: tokenizers raises Exception itself.
    """
    from tokenizers import Tokenizer as Model

    with open_named(path) as file:
        model = Model.from_buffer(file.read())
    model.no_truncation()  # a tokenizer file made for inference may truncate texts to 512 tokens
    model.no_padding()  # or pad them
    return model


def _as_bytes(example: ExampleText) -> Tokenized:
    """Return the UTF-8 bytes of an example as tokens."""
    ids = np.frombuffer(example.text.encode(), np.uint8).astype(np.uint32)
    learned = np.zeros(len(ids), np.uint8)
    for start, stop in example.learned:
        first = len(example.text[:start].encode())
        learned[first : first + len(example.text[start:stop].encode())] = 1
    return Tokenized(ids, learned)


def vocab_faults(setting: str, max_id: int, num_ids: int, vocab: int, folder: str | None) -> list[str]:
    """Return the fault of data with larger ids than the model's embedding, with its fix; [] if there is none.

    Args:
        setting: The user's name of the data.
        max_id: Largest id that occurs in the data.
        num_ids: Number of possible ids of the data.
        vocab: The model's token ids are 0 to vocab - 1.
        folder: The Hugging Face folder from which the model is read; None if there is none.
    """
    fix = f"set model.vocab to {num_ids}, or use a tokenizer with fewer ids"
    if folder is not None:
        fix = f"use the tokenizer in {folder!r}, or resize the embedding in transformers first"
        fix = f"{fix} (model.resize_token_embeddings({num_ids}), and save_pretrained)"
    fault = f"{setting}: the largest token id is {max_id}, but model.vocab is {vocab}: {fix}"
    return [fault] if max_id >= vocab else []
