"""Model FLOPs: the FLOPs of a model's step in any layout, and the peak FLOP/s of devices by their data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from pydantic import ValidationError

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import transformer_costs
from raypar.actors.specs.model import GPT, Llama, RopeScaling
from raypar.actors.specs.moe import MoE
from raypar.planner.hardware.data_sheets import DEVICES
from raypar.reporting.run_folder.damage import reader_of
from raypar.schedules.float_sum import float_sum

_KINDS: dict[str, Any] = {"gpt": GPT, "llama": Llama}
DeviceName = Literal["v100", "t4", "a10", "a100", "l4", "l40s", "rtx4090", "h100-pcie", "h100", "h200", "b200"]
_OTHERS: Mapping[str, float] = {  # of which no plan needs more than this
    "v100": 125e12,  # fp16, as it has no bf16; so has the T4
    "t4": 65e12,
    "a10": 125e12,
    "l40s": 362e12,
    "rtx4090": 165e12,
    "h100-pcie": 756e12,
}


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
        model = reader_of(kind).validate_python(_known(kind, table))
        return 3.0 * float_sum(transformer_costs(model))
    except (ValidationError, ArithmeticError):
        return None


def actors_of(config: dict[str, Any]) -> int | None:
    """Return the number of actors of a run that compute; None if its mesh can't be read."""
    try:
        mesh: Mesh = reader_of(Mesh).validate_python(_known(Mesh, config.get("mesh", {})))
        return mesh.actors
    except (ValidationError, ValueError):
        return None


def _known(kind: type[Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that this version of raypar knows. An older one may have had others."""
    names = {one.name for one in fields(kind)}
    tables = {"moe": MoE, "rope_scaling": RopeScaling}
    inner = {name: _known(of, table[name]) for name, of in tables.items() if isinstance(table.get(name), dict)}
    return {name: None if value == "none" else value for name, value in (table | inner).items() if name in names}


def peak_of(peak: float | DeviceName | None) -> float | None:
    """Return peak FLOP/s, of a device or as they are; None for None.

    Args:
        peak: Name of a device, or FLOP/s.

    Source: NVIDIA's data sheets.
    """
    if not isinstance(peak, str):
        return peak
    return DEVICES[peak].half if peak in DEVICES else _OTHERS[peak]
