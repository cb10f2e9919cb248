"""A model of the transformers library as a list of layers, for model types that raypar does not implement.

transformers is imported when a model is built. It runs no code of a folder, which gives only the config.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypar.actors.hugging_face.conversions import THEIRS
from raypar.actors.models.base import IGNORED

_BY_LENGTH = ("dynamic", "longrope")  # types of rope
_PLAIN = (str, int, float, bool, type(None))


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, of labels (B, S) int64; those of -100 do not count."""
    total = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels_BS != IGNORED).sum().clamp(min=1)


@dataclass(frozen=True)
class TheirLayers:
    """Builds the layers of a model of transformers: embedding with the first block, other blocks, head.

    Parameters are called ``layers.<i>.net.`` and then as in a folder of the model.

    Attributes:
        config: The content of its config.json.
        is_causal: The output for a token does not depend on later tokens, so the layers can generate text.
    """

    config: str
    is_causal: ClassVar[bool] = True

    @property
    def goes_by_length(self) -> bool:
        """Whether the output for a token depends on the length of the whole input, because the rope angles do."""
        return not rope_types(json.loads(self.config)).isdisjoint(_BY_LENGTH)

    def __call__(self) -> list[nn.Module]:
        """Build the layers, in float32. Raises ValueError if the model's parts are not those that its plan names."""
        whole = _built(json.loads(self.config))
        parts = parts_of(whole.config.base_model_pp_plan or {})
        base = whole.base_model
        blocks = getattr(base, parts.blocks, None)
        apart = [(name, part) for name, part in base.named_children() if name not in parts]
        others = [name for name, part in apart if any(True for _ in part.parameters())]
        beside = [name for name, part in whole.named_children() if part is not base and name != "lm_head"]
        if not isinstance(blocks, nn.ModuleList) or others or beside:
            named = ", ".join([*others, *beside]) or parts.blocks
            raise ValueError(f"its parts are not those that its plan names: {named}")
        return [_Piece(whole, parts, index) for index in range(len(blocks) + 1)]


class Parts(NamedTuple):
    """Names of the modules of a base model: its embedding, its list of blocks, its last norm."""

    embedding: str
    blocks: str
    norm: str


def parts_of(plan: Mapping[str, Any]) -> Parts:
    """Return the parts that a ``base_model_pp_plan`` names. Raises ValueError if they are not three, in this order."""
    names = list(plan)
    if len(names) != 3 or "input_ids" not in plan[names[0]][0]:
        raise ValueError("its base_model_pp_plan has not an embedding, blocks and a norm")
    return Parts(*names)


def _built(config: dict[str, Any]) -> Any:
    """Build a whole model of transformers in float32."""
    return import_module("transformers").AutoModelForCausalLM.from_config(config_object(config), dtype=torch.float32)


def config_object(config: Mapping[str, Any]) -> Any:
    """Return the config of transformers that a config.json describes. Raises what transformers raises."""
    kept = {name: value for name, value in config.items() if name not in ("auto_map", "quantization_config")}
    return import_module("transformers").CONFIG_MAPPING[kept["model_type"]].from_dict(kept)


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """Return how the angles that a config.json describes are scaled; blocks of several kinds may have several."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    tables = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    return {str(one.get("rope_type", one.get("type"))) for one in tables}


class _Bypass(nn.Module):
    """Replaces a block that another layer computes, and returns its input, or ``held`` if that is set: (B, S, D).

    As the first block it returns the output of the layer before. This drops whatever the model does with embeddings
    before its blocks, because the first layer has done it.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, value in vars(block).items():  # the model chooses the mask by plain attributes of a block
            if isinstance(value, _PLAIN) and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.held: Tensor | None = None

    def forward(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        return hidden_states if self.held is None else self.held


class _Piece(nn.Module):
    """A layer: a copy of the model with only some modules, whose parameters are those of ``whole``.

    Args:
        whole: The model.
        parts: Names of the parts of its base model.
        index: Which layer: 0 has the embedding and the first block, the last one the norm and the head.
    """

    def __init__(self, whole: Any, parts: Parts, index: int) -> None:
        super().__init__()
        base, prefix = whole.base_model, whole.base_model_prefix
        blocks = list(base.get_submodule(parts.blocks))
        self._is_head, self._is_first = index == len(blocks), index == 0
        self._prefix, self._blocks = prefix, f"{prefix}.{parts.blocks}"
        others: list[nn.Module] = [block if at == index else _Bypass(block) for at, block in enumerate(blocks)]
        changes: dict[str, nn.Module] = {parts.blocks: nn.ModuleList(others)}
        if not self._is_first:
            changes[parts.embedding] = nn.Identity()
        if not self._is_head:
            changes[parts.norm] = nn.Identity()
        outside: dict[str, nn.Module] = {prefix: _shell(base, changes)}
        if not self._is_head:
            outside["lm_head"] = nn.Identity()
        self.net = _shell(whole, outside)
        self._forgets = any(map(_grows, self.net.modules()))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer: token ids (B, S) or (B, S, D) -> (B, S, D), or logits (B, S, V)."""
        for module in self.net.modules() if self._forgets else ():
            if _grows(module):
                _forget(module)
        if self._is_first:
            out: Tensor = self.net.get_submodule(self._prefix)(input_ids=x, use_cache=False).last_hidden_state
            return out
        first = self.net.get_submodule(f"{self._blocks}.0")
        assert isinstance(first, _Bypass)
        first.held = x
        try:
            if self._is_head:
                out = self.net(inputs_embeds=x, use_cache=False).logits
            else:
                out = self.net.get_submodule(self._prefix)(inputs_embeds=x, use_cache=False).last_hidden_state
        finally:
            first.held = None
        return out


def _grows(module: nn.Module) -> bool:
    """Return whether a module has angles of the kind ``dynamic``, which stay those of the longest input so far."""
    kind = getattr(module, "rope_type", None)
    return "dynamic" in (kind.values() if isinstance(kind, dict) else (kind,))


def _forget(angles: nn.Module) -> None:
    """Reset angles of the kind ``dynamic``, so that they depend on the next input alone."""
    for name, plain in list(angles.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            angles.register_buffer(name.replace("original_", ""), plain.clone(), persistent=False)
    for name in [name for name in vars(angles) if name.endswith("max_seq_len_cached")]:
        setattr(angles, name, angles.original_max_seq_len)


def _shell(module: nn.Module, changes: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a module that shares its tensors and children, with some children replaced."""
    made = copy.copy(module)
    for name in ("_parameters", "_buffers"):
        vars(made)[name] = dict(vars(module)[name])
    vars(made)["_modules"] = {**module._modules, **changes}
    return made


def plan_of(config: Any) -> dict[str, str]:
    """Return the plan of tensor parallelism that a config declares, for the names of ``TheirLayers``.

    Args:
        config: The config of transformers.

    Raises:
        ValueError: It declares none, or one with a style that raypar does not have.
    """
    declared = config.base_model_tp_plan or {}
    if not declared:
        raise ValueError("its config declares no base_model_tp_plan")
    if unknown := sorted({style for style in declared.values() if style not in _STYLES}):
        raise ValueError(f"its base_model_tp_plan has styles that raypar has not: {', '.join(unknown)}")
    first = parts_of(config.base_model_pp_plan or {}).embedding  # is in the first layer alone
    layers = {name: "0" if name == first else "*" for name in declared}
    return {f"layers.{layers[name]}{THEIRS}model.{name}": _STYLES[style] for name, style in declared.items()}


def renames(model_type: str) -> bool:
    """Return whether transformers renames tensors of a type when it reads and writes files."""
    try:
        mapping = import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping(model_type)
    except (ImportError, AttributeError):
        return False
    return bool(mapping)


_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "column_gather_output",
    "colwise_rep": "column_gather_output",
    "rowwise_split_input": "row_split_input",
    "rowwise_rep": "row_split_input",
    "replicated_with_grad_allreduce": "shared",
    "embedding_rowwise": "embedding",
}
