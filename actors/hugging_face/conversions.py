"""Which tensor of a Hugging Face model is which of raypar's weights, as data: one table for each type of model.

In a name ``*`` stands for a number: of a block, and then of an expert. Both names have the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from raypar.actors.specs.lora import LORA

POSITIONS = "embed.positions.weight"  # a folder's table may have more rows than the run's
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class WeightPart:
    """A weight of ours, as a part of a tensor of theirs.

    Attributes:
        ours: Logical name of the weight.
        theirs: Name of the tensor.
        transposed: Whether the tensor is (in, out) and the weight (out, in).
        part: Which part of the tensor, along the weight's dim 0, is the weight.
        parts: Number of equal parts that the tensor has along that dim.
        more: Added to the tensor's values: 1 for norms whose folders store the distance from 1.
    """

    ours: str
    theirs: str
    transposed: bool = False
    part: int = 0
    parts: int = 1
    more: float = 0.0

    def numbered(self, numbers: Iterable[str]) -> WeightPart:
        """Return the conversion with the stars of both names replaced by these numbers."""
        ours, theirs = self.ours, self.theirs
        for number in numbers:
            ours, theirs = ours.replace("*", number, 1), theirs.replace("*", number, 1)
        return replace(self, ours=ours, theirs=theirs)


@dataclass(frozen=True)
class Table:
    """The conversions of a type of model.

    Attributes:
        conversions: One for each kind of weight.
        prefix: Prefix of names that some folders leave out.
        ignored: Patterns of tensors that some folders have and that are no weights: masks, tables of positions.
        zeros: Patterns of weights of ours that are zeros if our model has none, as biases are.
    """

    conversions: tuple[WeightPart, ...]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()


def _gpt2() -> Table:
    """Return the table of GPT-2, whose linear layers have transposed weights, and one for queries, keys and values."""
    h, kinds = "transformer.h.*", ("weight", "bias")
    qkv = [
        WeightPart(f"blocks.*.attn.{name}.{kind}", f"{h}.attn.c_attn.{kind}", kind == "weight", part, 3)
        for kind in kinds
        for part, name in enumerate("qkv")
    ]
    linears = {"attn.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    linears = {f"blocks.*.{ours}": f"{h}.{theirs}" for ours, theirs in linears.items()}
    norms = {"blocks.*.norm1": f"{h}.ln_1", "blocks.*.norm2": f"{h}.ln_2", "head.norm": "transformer.ln_f"}
    return Table(
        (
            WeightPart("embed.tokens.weight", "transformer.wte.weight"),
            WeightPart(POSITIONS, "transformer.wpe.weight"),
            *qkv,
            *(
                WeightPart(f"{ours}.{kind}", f"{theirs}.{kind}", ours in linears and kind == "weight")
                for ours, theirs in (linears | norms).items()
                for kind in kinds
            ),
            WeightPart("head.out.weight", "lm_head.weight"),
        ),
        prefix="transformer.",
        ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
        zeros=tuple(f"blocks.*.attn.{name}.bias" for name in "qkv"),
    )


_ATTENTION = {name: f"self_attn.{name}_proj" for name in "qkv"} | {"out": "self_attn.o_proj"}
_MLP = {f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_MIXTRAL = {"mlp.router": "block_sparse_moe.gate"} | {
    f"mlp.experts.*.{ours}": f"block_sparse_moe.experts.*.{theirs}"
    for ours, theirs in {"gate": "w1", "up": "w3", "down": "w2"}.items()
}
_QWEN_MOE = {"mlp.router": "mlp.gate"} | {
    f"mlp.experts.*.{name}": f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")
}


_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_HEAD_NORMS = {f"attn.{name}_norm": f"self_attn.{name}_norm" for name in "qk"}
_GEMMA2 = {
    "norm1": "input_layernorm",
    "attn_norm": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}


def _llama(
    mlp: Mapping[str, str], *, norms: Mapping[str, str] = _NORMS, biases: bool = False, around: float = 0.0
) -> Table:
    """Return the table of a model that is built like Llama.

    Args:
        mlp: The weights of MLPs or experts in a block: ours to theirs.
        norms: The norms of a block: ours to theirs.
        biases: Whether queries, keys and values may have biases.
        around: The value that the folder subtracts from the weights of norms.
    """
    block = {f"attn.{ours}": theirs for ours, theirs in _ATTENTION.items()} | dict(mlp) | dict(norms)
    found = [WeightPart(f"blocks.*.{ours}.weight", f"model.layers.*.{theirs}.weight") for ours, theirs in block.items()]
    if biases:
        found += [WeightPart(f"blocks.*.attn.{n}.bias", f"model.layers.*.self_attn.{n}_proj.bias") for n in "qkv"]
    outside = {"embed.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.out": "lm_head"}
    found += [WeightPart(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in outside.items()]
    found = [replace(one, more=around) if "norm" in one.ours else one for one in found]
    return Table(tuple(found), ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",))


TABLES: Mapping[str, Table] = {  # by the model_type of config.json
    "gemma": _llama(_MLP, around=1.0),
    "gemma2": _llama(_MLP, norms=_GEMMA2, around=1.0),
    "gpt2": _gpt2(),
    "llama": _llama(_MLP),
    "mistral": _llama(_MLP),
    "mixtral": _llama(_MIXTRAL),
    "qwen2": _llama(_MLP, biases=True),
    "qwen3": _llama(_MLP, norms=_NORMS | _HEAD_NORMS),
    "qwen3_moe": _llama(_MLP | _QWEN_MOE, norms=_NORMS | _HEAD_NORMS),
}


PEFT = "base_model.model."  # prefix that PEFT adds to the names of the model
THEIRS = ".net."  # in names of weights of transformers' modules, the tensor's name follows it


def converted(model_type: str, names: Iterable[str]) -> dict[str, WeightPart]:
    """Return the conversion of each weight of ours that the table has, by logical name, its numbers filled in.

    Args:
        model_type: Type of the model. If it is no key of TABLES, the modules are those of transformers.
        names: Logical names of weights.
    """
    if model_type not in TABLES:
        return {name: WeightPart(name, name.partition(THEIRS)[2]) for name in names if THEIRS in name}
    table = {one.ours: one for one in TABLES[model_type].conversions}
    starred = {name: _NUMBER.sub("*", name) for name in names}
    return {name: table[key].numbered(_NUMBER.findall(name)) for name, key in starred.items() if key in table}


def adapters_converted(model_type: str, names: Iterable[str]) -> dict[str, WeightPart]:
    """Return the conversion of each weight of an adapter that PEFT has too, by logical name.

    PEFT has no adapter of a part of a module, as the queries of a GPT-2 are.

    Args:
        model_type: Type of the model that is adapted.
        names: Logical names of adapters' weights.
    """
    found = dict[str, WeightPart]()
    for name in names:
        module, _, half = name.removesuffix(".weight").rpartition(".")
        layer = f"{module.removesuffix(LORA)}.weight"
        one = converted(model_type, [layer]).get(layer)
        if one is not None and one.parts == 1:
            theirs = f"{PEFT}{one.theirs.removesuffix('.weight')}.lora_{half.upper()}.weight"
            found[name] = WeightPart(name, theirs)
    return found


def is_ignored(model_type: str, name: str) -> bool:
    """Return whether a tensor of a folder is not a weight."""
    if model_type not in TABLES:
        return name.endswith(".rotary_emb.inv_freq")
    return _NUMBER.sub("*", name) in TABLES[model_type].ignored


def is_zero(model_type: str, name: str) -> bool:
    """Return whether a weight of ours is zeros in their model if ours has none."""
    return model_type in TABLES and _NUMBER.sub("*", name) in TABLES[model_type].zeros
