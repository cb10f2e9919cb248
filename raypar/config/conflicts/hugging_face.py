"""Check that weights and PEFT adapters in folders of Hugging Face fit a model, and that a layout can have adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.conversions import PEFT, POSITIONS, adapters_converted, converted, is_ignored
from raypar.actors.hugging_face.folder import ADAPTER_CONFIG, adapters_in, model_type_of, read_config, tensors_in
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.safetensors_header import ITEM, FileTensor
from raypar.actors.specs.lora import LAYERS, LORA, OF_PARTS, Adaptable, Lora, Targets, is_adapter
from raypar.actors.specs.model import GPT, Layers, Llama, Transformer
from raypar.config.conflicts.named_settings import ADAPTERS, GRID, TILES
from raypar.config.fields import short_repr
from raypar.config.rules import Conflict, Examined, RunRule

_MOST_NAMED = 5  # tensors that are named for each kind of fault
# Settings of PEFT with the values that raypar's adapters have.
_SAME: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "lora_bias": (False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),  # others change the model, too
}
# Settings that change nothing, or are compared with the tensors. Any other one must be empty.
_FREE = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "target_modules",
    "exclude_modules",
    "lora_alpha",
    "lora_dropout",
    "fan_in_fan_out",
    "use_rslora",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
    "runtime_config",
    "ensure_weight_tying",
}


def adapter_folder_faults(model: Transformer, skeleton: Skeleton) -> Iterator[str]:
    """Yield why a model's adapters can't begin with those of a folder.

    Args:
        model: The model, whose sizes fit each other.
        skeleton: Its skeleton.
    """
    lora = model.lora
    if lora is None or lora.hf is None:
        return
    if model.hf is None:
        yield "model.lora.hf is given, and adapters belong to the weights of a model: give model.hf, or leave it out"
        return
    what, folder, faults = f"model.lora.hf {lora.hf!r}", Path(lora.hf), list[str]()
    try:
        model_type = model_type_of(Path(model.hf))
    except CheckpointError:  # the check of the model reports it
        return
    config, kept, base = dict[str, Any](), dict[str, FileTensor](), ""
    try:
        config = read_config(folder, ADAPTER_CONFIG)
        kept, base = adapters_in(folder)
    except CheckpointError as error:
        faults += error.faults
    if config:
        faults += _setting_faults(config, lora)
    if kept:
        faults += _tensor_faults(config, kept, model_type, lora, skeleton)
        if base and base != _fingerprint(model.hf):
            text = f"it was trained on other weights than those of model.hf {model.hf!r}"
            faults.append(f"{text}: give the folder of that model, or a copy of it")
    yield from (f"{what}: {fault}" for fault in faults)


def _setting_faults(config: Mapping[str, Any], lora: Lora) -> Iterator[str]:
    """Yield the settings of an adapter's config that raypar's adapters do not have."""
    for name, same in _SAME.items():
        if (value := config.get(name)) not in same and (name in config or name == "peft_type"):
            yield f"{name} is {value!r}, and raypar's adapters have {same[0]!r}: merge it into its model with peft"
    for name, value in config.items():
        if name not in _SAME and name not in _FREE and value not in (None, False, "", {}, []):
            what = f"{name} is {short_repr(value)}"
            yield f"{what}, and raypar's adapters have nothing like it: merge it into its model with peft"
    rank, alpha = _positive(config.get("r")), _positive(config.get("lora_alpha"))
    if rank is None or alpha is None:
        text = f"r {config.get('r')!r} and lora_alpha {config.get('lora_alpha')!r}"
        yield f"{ADAPTER_CONFIG} has {text}, which must be numbers above 0: copy it again"
        return
    if rank != lora.rank:
        yield f"its rank is {rank:g}, and model.lora.rank is {lora.rank}: set model.lora.rank to {rank:g}"
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if not math.isclose(scale, lora.scale if rank == lora.rank else lora.alpha / rank):
        fix = f"set model.lora.alpha to {scale * rank:g}"
        yield f"it adds its product times {scale:g}, and model.lora.alpha / rank is {lora.alpha / rank:g}: {fix}"


def _tensor_faults(
    config: Mapping[str, Any], kept: Mapping[str, FileTensor], model_type: str, lora: Lora, skeleton: Skeleton
) -> Iterator[str]:
    """Yield the tensors that differ between an adapter and a model."""
    weights = {name: tuple(weight.shape) for name, weight in skeleton.weights.items() if is_adapter(name)}
    conversions = adapters_converted(model_type, weights)
    if parts := [name for name in weights if name not in conversions]:
        layer = f"{parts[0].rpartition(LORA)[0]}.weight"
        theirs = next((one.theirs for one in converted(model_type, [layer]).values()), "another")
        text = f"a {model_type} has {layer} as a part of {theirs}, and PEFT no adapter of a part"
        yield f"{text}: leave out model.lora.hf"
        return
    wanted = {one.theirs: weights[name] for name, one in conversions.items()}
    missing, extra = sorted(wanted.keys() - kept.keys()), sorted(kept.keys() - wanted.keys())
    if (missing or extra) and (there := _targets(model_type, kept, skeleton)) not in (None, lora.targets):
        yield f"it has the adapters of {there!r}, and model.lora.targets is {lora.targets!r}: set it to {there!r}"
        return
    fix = "train it on the same linear layers of every block"
    wrong = [
        f"{name} is {kept[name].dtype} {list(kept[name].shape)} and the model has {list(shape)}"
        for name, shape in wanted.items()
        if name in kept and (kept[name].shape != shape or kept[name].dtype not in ITEM)
    ]
    if config.get("r") != lora.rank:
        wrong = []  # the fault of the rank says it
    unlike = {f"tensors are missing ({fix})": missing, f"it has tensors that the model has not ({fix})": extra}
    yield from _named_by_fault(unlike | {"tensors are of another model (give its own)": wrong})


def _named_by_fault(tensors: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield each fault that tensors have, with the first of their names."""
    for what, names in tensors.items():
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            yield f"{what}: {', '.join(names[:_MOST_NAMED])}{more}"


def _targets(model_type: str, kept: Mapping[str, FileTensor], skeleton: Skeleton) -> Targets | None:
    """Return the linear layers that an adapter adapts, as ``Lora.targets`` spells them; None if it has none."""
    theirs: dict[Adaptable, set[str]] = {}
    for name in skeleton.whole:
        for layer in LAYERS:
            if name.endswith((f".attn.{layer}.weight", f".mlp.{layer}.weight")):
                found = {one.theirs.removesuffix(".weight") for one in converted(model_type, [name]).values()}
                theirs.setdefault(layer, set()).update(found)
    there = {name.removeprefix(PEFT).rsplit(".", 2)[0] for name in kept}
    adapted = tuple(layer for layer in LAYERS if layer in theirs and theirs[layer] <= there)
    if there != set[str]().union(*(theirs[layer] for layer in adapted)):
        return None
    wholes = (part for part, layers in OF_PARTS.items() if adapted == tuple(one for one in layers if one in theirs))
    return cast(Targets, next(wholes, adapted))


def _fingerprint(folder: str) -> str:
    """Return the fingerprint of a model's weights; "" if they can't be read, which another check reports."""
    from raypar.actors.hugging_face.fingerprint import fingerprint  # imports torch

    try:
        return fingerprint(Path(folder))
    except CheckpointError:
        return ""


def _positive(value: object) -> float | None:
    """Return a value if it is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    return float(value)


def _adapter_rank_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if adapters have a larger rank than a layer has inputs or outputs."""
    model = examined.run.model
    if isinstance(model, Transformer) and model.lora is not None and model.lora.rank > model.hidden:
        text = f"model.lora.rank is {model.lora.rank}, and a layer's inputs or outputs are {model.hidden}"
        yield f"{text}, so no layer has that rank: use {min(8, model.hidden)}, say, or leave out model.lora"


ADAPTER_RULES: tuple[RunRule, ...] = (
    Conflict(ADAPTERS, GRID, "and adapters are not divided over a grid, but {other}"),
    Conflict(ADAPTERS, TILES, "and linear layers in tiles have no adapters, but {other}"),
    _adapter_rank_faults,
)


def weight_folder_faults(model: GPT | Llama | Layers, skeleton: Skeleton) -> Iterator[str]:
    """Yield what is wrong in the folder that a model's weights come from: its files, or tensors of other models.

    Args:
        model: The model, whose sizes fit each other.
        skeleton: Its skeleton.
    """
    if model.hf is None:
        return
    try:
        model_type = model_type_of(Path(model.hf))
        kept = tensors_in(Path(model.hf), model_type)
    except CheckpointError as error:
        yield from (f"model.hf {model.hf!r}: {fault}" for fault in error.faults)
        return
    if isinstance(model, Layers) and (cause := _cause(model_type, kept, skeleton)):
        yield f"model.hf {model.hf!r}: {cause}"
        return
    yield from (f"model.hf {model.hf!r}: {fault}" for fault in _named_by_fault(_differing(model_type, kept, skeleton)))


def _cause(model_type: str, kept: Mapping[str, FileTensor], skeleton: Skeleton) -> str | None:
    """Return why the tensors in a folder differ from those of the modules of transformers; None if unknown."""
    from raypar.actors.models.own.their_layers import renames  # imports torch

    wanted = {one.theirs for one in converted(model_type, skeleton.whole).values()}
    if not wanted <= kept.keys() and renames(model_type):
        return (
            f"transformers renames the tensors of a {model_type!r} when it reads them, and raypar reads those that its "
            "modules have: write them with model.save_pretrained(folder, save_original_format=False)"
        )
    buffers = [one.theirs for one in converted(model_type, skeleton.buffers).values() if one.theirs in kept]
    if buffers:
        return (
            f"a {model_type!r} keeps buffers in its files ({', '.join(buffers[:_MOST_NAMED])}), and raypar reads "
            "weights alone: train it with transformers, or build it from its modules as rp.Layers"
        )
    return None


def _differing(model_type: str, kept: Mapping[str, FileTensor], skeleton: Skeleton) -> dict[str, list[str]]:
    """Return the tensors that differ between a folder and a model, by what is wrong with them."""
    from raypar.actors.hugging_face.weights import fits, shape_in  # imports torch

    weights = skeleton.whole
    conversions = converted(model_type, weights)
    missing, wrong = list[str](), list[str]()
    unread, short = list[str](), list[str]()
    unnamed = [name for name in weights if name not in conversions]
    used = set[str]()
    for name, conversion in conversions.items():
        used.add(conversion.theirs)
        shape = tuple(weights[name].shape)
        there = kept.get(conversion.theirs)
        if there is None:
            missing.append(conversion.theirs)
        elif there.dtype not in ITEM:
            unread.append(f"{conversion.theirs} is {there.dtype}")
        elif not fits(conversion, there, shape):
            wanted = list(shape_in(conversion, shape))
            if name == POSITIONS and there.shape[1:] == tuple(wanted[1:]):
                short.append(f"{conversion.theirs} has {there.shape[0]}, and {wanted[0]} are needed")
                continue
            wrong.append(f"{conversion.theirs} is {there.dtype} {list(there.shape)} and the model has {wanted}")
    tied = {one.theirs for one in converted(model_type, skeleton.originals).values()}  # some folders have copies too
    extra = [name for name in kept if name not in used | tied and not is_ignored(model_type, name)]
    return {
        "tensors are missing": list(dict.fromkeys(missing)),
        "its positions are fewer than those of model.seq, so lower that": short,
        "tensors are of another model": list(dict.fromkeys(wrong)),
        f"tensors are of no dtype that is read, so save it in {', '.join(ITEM)}": list(dict.fromkeys(unread)),
        "it has tensors that the model has not": extra,
        f"a {model_type} has no tensors for weights of this model": unnamed,
    }


def _begin_faults(examined: Examined) -> Iterator[str]:
    """Yield what is wrong in the folders that weights and adapters begin with, if the model's sizes fit each other.

    A checkpoint of adapters has only what learns: the other weights come from the folder then, too.
    """
    examined.demand("model")
    model, begins = examined.run.model, examined.resumed is None
    if isinstance(model, Layers):
        if begins and model.hf is not None:
            yield from weight_folder_faults(model, examined.skeleton)
    elif (begins or model.lora is not None) and not any(model.faults(examined.right)):
        yield from weight_folder_faults(model, examined.skeleton)
        if begins:
            yield from adapter_folder_faults(model, examined.skeleton)


FOLDER_RULES: tuple[RunRule, ...] = (_begin_faults,)
