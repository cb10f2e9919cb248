"""Model FLOPs: what a model's step computes, whatever the layout adds to it, and its share of what a device could."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import transformer_costs
from raypar.actors.specs.model import GPT, Llama, RopeScaling
from raypar.actors.specs.moe import MoE
from raypar.schedules.float_sum import float_sum

_KINDS: dict[str, Any] = {"gpt": GPT, "llama": Llama}


def flops_per_token(config: dict[str, Any]) -> float | None:
    """Return the FLOPs of one token of a training step: a forward, and twice as many in its backward.

    What is recomputed does not count (Chowdhery et al. 2022, appendix B).

    Args:
        config: The configuration of a run, as plain tables.

    Returns:
        The FLOPs; None for the user's own layers, whose FLOPs are not known.
    """
    table = config.get("model", {})
    kind = _KINDS.get(str(table.get("kind", "gpt")))
    if kind is None or "layers" not in table:
        return None
    try:
        model = _reader(kind).validate_python(_known(kind, table))
        return 3.0 * float_sum(transformer_costs(model))
    except (ValidationError, ArithmeticError):
        return None


def actors_of(config: dict[str, Any]) -> int | None:
    """Return the number of actors of a run that compute; None if its mesh can't be read."""
    try:
        mesh: Mesh = _reader(Mesh).validate_python(_known(Mesh, config.get("mesh", {})))
        return mesh.actors
    except (ValidationError, ValueError):
        return None


def _known(kind: type[Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that this version of raypar knows. An older one may have had others."""
    names = {one.name for one in fields(kind)}
    tables = {"moe": MoE, "rope_scaling": RopeScaling}
    inner = {name: _known(of, table[name]) for name, of in tables.items() if isinstance(table.get(name), dict)}
    return {name: None if value == "none" else value for name, value in (table | inner).items() if name in names}


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
