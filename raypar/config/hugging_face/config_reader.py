"""Read the config.json in a folder of Hugging Face as a model of raypar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any, get_args

from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.folder import CONFIG, read_config, same_bytes, tensors_in
from raypar.actors.known_fields import unknown_faults
from raypar.actors.machine.hub_names import download_hint
from raypar.actors.safetensors_header import FileTensor
from raypar.actors.specs.model import GPT, Layers, Llama, RopeScaling, ScalingKind
from raypar.actors.specs.moe import MoE
from raypar.config.arguments import checked_arguments
from raypar.config.hugging_face.config_fields import FIELDS_BY_MODEL_TYPE, REQUIRED, Family, Windows
from raypar.config.hugging_face.config_writer import REQUIRED_NAMES, SCALING
from raypar.config.hugging_face.transformers_model import their_model
from raypar.errors import ConfigError
from raypar.paths import absolute, holds_run, run_folder_of

log = logging.getLogger(__name__)

_OF_RUN = "it is a folder of a run: raypar ckpt export {} my-model writes its model as one of Hugging Face: give that"


@checked_arguments
def HF(folder: str | PathLike[str], **changes: Any) -> GPT | Llama | Layers:  # noqa: N802  (it is called like a class)
    """Return the model in a folder of Hugging Face, whose weights a run with it begins with.

    A type of model that raypar has not is one of Layers, made of the modules of transformers, which must be installed.

    Only config.json and the headers of safetensors files are read; nothing of the folder is run. When the run starts,
    every actor reads its own slices of the weights.

    Args:
        folder: A folder that ``save_pretrained`` has written, or that was downloaded whole.
        **changes: Fields of the model to change, such as ``seq``, which is at most 1024 unless it is given.

    Raises:
        ConfigError: The folder holds no model that raypar has, or its files are not sound. Lists all faults.
    """
    path, faults = absolute(folder), list[str]()
    model: GPT | Llama | Layers | None = None
    try:
        config = read_config(path)
        kind = config.get("model_type")
        read = model_of_config if kind in FIELDS_BY_MODEL_TYPE or not isinstance(kind, str) else their_model
        model, faults = read(config, changes)
        if model is not None:
            kept = tensors_in(path, config["model_type"])
            model = _with_own_head(model, path, kept)
    except CheckpointError as error:
        faults = [*faults, *(error.faults if not _is_of_run(path) else [_OF_RUN.format(quote(str(folder)))])]
        faults = [f"{fault}{download_hint(str(folder))}" for fault in faults]
    ConfigError.raise_if(f"model.hf {str(folder)!r}: {fault}" for fault in faults)
    assert model is not None
    return replace(model, hf=str(path))


def _is_of_run(path: Path) -> bool:
    """Return whether a folder is a run folder, or a checkpoint in one."""
    return holds_run(path) or run_folder_of(path) is not None


def _with_own_head(model: GPT | Llama | Layers, folder: Path, kept: Mapping[str, FileTensor]) -> GPT | Llama | Layers:
    """Return the model untied, as transformers loads it, where the folder has another head than its embedding."""
    head = kept.get("lm_head.weight")
    if isinstance(model, Layers) or not model.tied or head is None:
        return model
    embedding = kept.get("transformer.wte.weight" if isinstance(model, GPT) else "model.embed_tokens.weight")
    if embedding is None or same_bytes(folder, head, embedding):
        return model
    log.warning(
        "%s has a head of its own beside tie_word_embeddings: it is kept, and the model is untied, as in transformers",
        folder,
    )
    return replace(model, tied=False)


def model_of_config(config: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[GPT | Llama | None, list[str]]:
    """Return the model that a config.json describes.

    Args:
        config: The content of the file.
        changes: Fields of the model to change. What the file says of these is not looked at.

    Returns:
        The model, or None if there is none like it; and what in the file no model of raypar can do.
    """
    kind = config.get("model_type")
    family = FIELDS_BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
    if family is None:
        return None, [f"{CONFIG} has no model_type: give a model's folder"]
    reader = ConfigReader({**family.defaults, **config}, changes)
    reader.same("is_causal", True)
    if "quantization_config" in config:
        reader.faults.append("its weights are quantized: save it in float32 or bfloat16 first, with transformers")
    fields = reader.fields_of(family)
    if unknown := [*unknown_faults(family.model.__name__, changes)]:
        return None, unknown
    if reader.faults:
        return None, list(dict.fromkeys(reader.faults))
    experts = {name.removeprefix("moe."): fields.pop(name) for name in [*fields] if name.startswith("moe.")}
    if experts:
        fields["moe"] = MoE(**experts)
    return family.model(**fields | dict(changes)), []


class ConfigReader:
    """Reads the values of a config.json, and notes what no model of raypar can do.

    Attributes:
        faults: What was noted.
    """

    def __init__(self, config: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        self._config, self._changes = config, changes
        self.faults: list[str] = []

    def fields_of(self, family: Family) -> dict[str, Any]:
        """Return the fields of a model of a family; those of its experts begin with "moe."."""
        for name, values in family.activations.items():
            self.demand(name, self.get(name, default=values[0]), values)
        for name, wanted in family.fixed.items():
            self.same(name, wanted)
        fields = dict(family.fields)
        for one in family.settings:
            value = getattr(self, one.kind)(*one.theirs, *one.older, default=one.default)
            try:
                fields[one.ours] = value if one.kept is None else one.kept(value, fields)
            except ValueError as error:
                self.faults.append(str(error))
        if fields.get("attention_cap") is not None:
            fields["attention"] = "materialised"
        if family.model is Llama:
            fields |= self.rope()
        return fields | self.window(family.windows, fields["layers"])

    def get(self, *names: str, default: Any = REQUIRED) -> Any:
        """Return the first of these values that is there and not null, else the default."""
        for name in names:
            if (value := self._config.get(name)) is not None:
                return value
        if default is REQUIRED:
            self.faults.append(f"{CONFIG} has no {names[0]}: copy it again")
            return 1
        return default

    def _fitting(self, names: Sequence[str], default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
        """Return a value that fits, or the default; note it if it does not fit."""
        value = self.get(*names, default=default)
        if value is default or fits(value):
            return value
        self.faults.append(f"{names[0]} is {value!r}, and must be {wanted}")
        return 1 if default is REQUIRED else default

    def count(self, *names: str, default: Any = REQUIRED) -> Any:
        """Return a whole number of at least 1, or the default."""
        return self._fitting(names, default, lambda value: _is_int(value) and value > 0, "a whole number above 0")

    def number(self, *names: str, default: float) -> float:
        """Return a number above 0."""
        return float(self._fitting(names, default, lambda value: _is_real(value) and value > 0, "a number above 0"))

    def real(self, *names: str, default: float) -> float:
        """Return a number."""
        return float(self._fitting(names, default, _is_real, "a number"))

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        return bool(self.demand(name, self.get(name, default=default), (True, False)))

    def cap(self, name: str, *, default: float) -> float | None:
        """Return a number above 0, or None if the file says null, and not just nothing."""
        return None if name in self._config and self._config[name] is None else self.number(name, default=default)

    def padding(self, name: str, *, default: int | None) -> int | None:
        """Return the token of padding; negative ones count from the end, and null is none."""
        found, vocab = self._config.get(name, default), self._config.get("vocab_size")
        return found + vocab if isinstance(found, int) and isinstance(vocab, int) and found < 0 else found

    def demand(self, name: str, value: Any, wanted: tuple[Any, ...]) -> Any:
        """Note it if a value is none of those that raypar's models have."""
        if value not in wanted:
            self.faults.append(f"{name} is {value!r}, and raypar's models have {' or '.join(map(repr, wanted))}")
        return value

    def same(self, name: str, wanted: Any) -> None:
        """Note it if the file has another value than this one."""
        self.demand(name, self.get(name, default=wanted), (wanted,))

    def dropout(self, *names: str, default: float) -> float:
        """Return the one dropout probability that these values have."""
        found = {name: self.get(name, default=default) for name in names}
        first = found[names[0]]
        if "dropout" in self._changes or all(value == first for value in found.values()):
            return float(first) if isinstance(first, int | float) else 0.0
        listed = ", ".join(f"{name} {value!r}" for name, value in found.items())
        self.faults.append(f"dropout differs between places ({listed}): give one for all, as dropout=0.0")
        return 0.0

    def rope(self) -> dict[str, Any]:
        """Return the base of the angles, and how they are scaled."""
        given = self._config.get("rope_scaling") or self._config.get("rope_parameters")
        table = dict(given) if isinstance(given, dict) else {}
        if "original_max_position_embeddings" in self._config:  # as Phi has it, goes before what is in the table
            table["original_max_position_embeddings"] = self._config["original_max_position_embeddings"]
        self.demand("partial_rotary_factor", table.get("partial_rotary_factor", 1.0), (1.0,))
        inside = table.get("rope_theta")
        base = float(inside) if isinstance(inside, int | float) else self.number("rope_theta", default=10_000.0)
        return {"rope_base": base, "rope_scaling": self._scaling(table)}

    def _scaling(self, table: Mapping[str, Any]) -> RopeScaling | None:
        """Return how the angles are scaled; None for not at all."""
        kind = self.demand(
            "the type of rope",
            table.get("rope_type", table.get("type", "default")),
            ("default", *get_args(ScalingKind)),
        )
        if kind not in get_args(ScalingKind):
            return None
        for name in ("mscale", "mscale_all_dim"):
            self.demand(name, table.get(name), (None,))
        if missing := [name for name in REQUIRED_NAMES[kind] if name not in table]:
            self.faults.append(f"rope_scaling of type {kind!r} has no {' and no '.join(missing)}: copy it again")
            return None
        fields = {ours: table[theirs] for theirs, ours in SCALING.items() if table.get(theirs) is not None}
        fields["kind"] = kind
        if kind == "dynamic":  # theirs goes by the model's positions, whatever else is given
            fields["trained"] = self.count("max_position_embeddings")
        elif kind != "linear":
            fields.setdefault("trained", self.count("max_position_embeddings"))
        if kind == "yarn" and table.get("factor") is None:
            fields["factor"] = self.count("max_position_embeddings") / fields["trained"]
        return RopeScaling(**fields)

    def window(self, windows: Windows | None, layers: int) -> dict[str, int | None]:
        """Return the window of blocks, and which of so many have it."""
        if windows is None or (windows.flagged and not self.get("use_sliding_window", default=False)):
            return {}
        window, kinds = self.count("sliding_window", default=None), self.get("layer_types", default=None)
        if window is None or windows.uniform:
            return {"window": window}
        first = self.get("max_window_layers", default=28) if windows.begins else 0
        skips = windows.skips
        if isinstance(kinds, list):
            slides = [kind == "sliding_attention" for kind in kinds]
            first = slides.index(True) if True in slides else layers
            fitting = [every for every in (None, *range(2, layers + 1)) if slides == _slides(layers, first, every)]
            if not fitting:
                limits = "windows begin at one block, and leave out every n-th"
                self.faults.append(f"layer_types do not change regularly: raypar's {limits}")
            skips = fitting[0] if fitting else None
        if first >= layers:
            return {}
        return {"window": window, "window_first": first} | ({} if skips is None else {"window_skips": skips})


def _slides(layers: int, first: int, skips: int | None) -> list[bool]:
    """Return which blocks have a window."""
    return [block >= first and not (skips and (block + 1) % skips == 0) for block in range(layers)]


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
