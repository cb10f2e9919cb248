"""Check that the weights in a Hugging Face folder are those of a model, before any actor starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.conversions import converted, is_ignored
from raypar.actors.hugging_face.folder import model_type_of, tensors_in
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.safetensors_header import ITEM, FileTensor
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.config.rules import Examined, RunRule
from raypar.config.validate.adapter_folder import adapter_folder_faults

_MOST_TOLD = 5  # tensors that are named for each kind of fault


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
    for what, names in _differing(model_type, kept, skeleton).items():
        if names:
            more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
            yield f"model.hf {model.hf!r}: {what}: {', '.join(names[:_MOST_TOLD])}{more}"


def _cause(model_type: str, kept: Mapping[str, FileTensor], skeleton: Skeleton) -> str | None:
    """Return why a folder of a type that transformers computes has other tensors than its modules; None if it has not.

    Or if it is not known.
    """
    from raypar.actors.models.their_layers import renames  # imports torch

    wanted = {one.theirs for one in converted(model_type, skeleton.whole).values()}
    if not wanted <= kept.keys() and renames(model_type):
        return (
            f"transformers renames the tensors of a {model_type!r} when it reads them, and raypar reads those that its "
            "modules have: write them with model.save_pretrained(folder, save_original_format=False)"
        )
    buffers = [one.theirs for one in converted(model_type, skeleton.buffers).values() if one.theirs in kept]
    if buffers:
        return (
            f"a {model_type!r} keeps buffers in its files ({', '.join(buffers[:_MOST_TOLD])}), and raypar reads "
            "weights alone: train it with transformers, or build it from its modules as rp.Layers"
        )
    return None


def _differing(model_type: str, kept: Mapping[str, FileTensor], skeleton: Skeleton) -> dict[str, list[str]]:
    """Return the tensors that differ between a folder and a model, by what is wrong with them."""
    from raypar.actors.hugging_face.weights import fits, shape_in  # imports torch

    weights = skeleton.whole
    conversions = converted(model_type, weights)
    missing, wrong, unread = list[str](), list[str](), list[str]()
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
            wrong.append(f"{conversion.theirs} is {there.dtype} {list(there.shape)} and the model has {wanted}")
    tied = {one.theirs for one in converted(model_type, skeleton.originals).values()}  # some folders have copies too
    extra = [name for name in kept if name not in used | tied and not is_ignored(model_type, name)]
    return {
        "tensors are missing": list(dict.fromkeys(missing)),
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
