"""Layouts of experts by name: ``ep2_dp2`` names a mesh, and ``ep2_dp2_zero3`` a mesh and a level of ZeRO."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from raypar.actors.mesh.mesh import Mesh
from raypar.config.arguments import checked_arguments
from raypar.errors import ConfigError

LAYOUTS: Mapping[str, str] = {
    "ep2_dp2": "two groups of two actors, each with all experts",
    "ep2_tp2_dp2": "the same on the tensor ranks of two replicas",
    "ep2_dp2_zero3": "the first one, with all weights sharded",
    "ep4": "four actors, each with a quarter of the experts",
    "dp2_experts2": "two replicas, and two actors with half of the experts each",
}
_AXES = ("ep", "dp", "tp", "cp", "pp", "etp", "experts", "zero")
_MOST_ZERO = 3


@checked_arguments
def layout(name: str) -> dict[str, Any]:
    """Return the fields of a run that a layout's name sets: ``mesh``, and ``zero`` if the name has it.

    A name is words joined by underscores, each an axis and a number. ``ep`` is the number of parts of the experts, and
    ``dp`` the number of actors that hold the same part: ep x dp actors are a pipeline stage, or ep x dp x etp
    with ``etp`` tensor ranks of an expert. Over ``tp`` and ``cp`` they divide the other weights and the sequence;
    ``pp`` is the number of stages. With ``experts``, a number of actors of their own, ``dp`` is the number of replicas.

    Args:
        name: The name, such as ``ep2_dp2`` or ``ep4_tp2_pp2_zero1``.

    Raises:
        ConfigError: The name has no meaning.

    Example:
        ``rp.recipe("moe-tiny", **rp.layout("ep2_dp2_zero3"))``
    """
    words = [re.fullmatch(r"([a-z]+)([0-9]{1,6})", word) for word in name.split("_")]
    known = f"known are {', '.join(LAYOUTS)}, and others of such words ({', '.join(_AXES)}) with a number each"
    if wrong := [part for part, word in zip(name.split("_"), words, strict=True) if not word or word[1] not in _AXES]:
        raise ConfigError([f"layout {name!r} has {', '.join(map(repr, wrong))}: {known}"])
    ways = [(word[1], int(word[2])) for word in words if word is not None]
    faults = [
        f"layout {name!r} has {word} {times} times: leave one out"
        for word, times in Counter(word for word, _ in ways).items()
        if times > 1
    ]
    if {"experts", "ep"} <= {word for word, _ in ways}:
        faults.append(f"layout {name!r} has ep and experts: experts are on actors of their own or on ranks, use one")
    faults += [f"layout {name!r} has {word}0: use 1 at least" for word, count in ways if not count and word != "zero"]
    of = dict.fromkeys(_AXES, 1) | dict(ways)
    if "zero" in dict(ways) and of["zero"] > _MOST_ZERO:
        faults.append(f"layout {name!r} has zero{of['zero']}: use 0 to {_MOST_ZERO}")
    apart = of["experts"] if "experts" in dict(ways) else 0
    inner = of["tp"] * of["cp"]
    stage = of["dp"] * inner if apart else of["ep"] * of["etp"] * of["dp"]
    if not faults and stage % inner:
        made = " x ".join(f"{word} {of[word]}" for word in ("ep", "etp", "dp") if of[word] > 1) or "1"
        faults.append(
            f"layout {name!r} has {stage} actors a stage ({made}), which tp x cp = {inner} does not divide: "
            f"use dp{of['dp'] * inner}, or smaller tp and cp"
        )
    ConfigError.raise_if(faults)
    dp, etp = stage // inner, of["etp"] if "etp" in dict(ways) else None
    mesh = Mesh(of["pp"], dp, of["cp"], of["tp"], ep=of["ep"], etp=etp, expert_actors=apart)
    return {"mesh": mesh} | ({"zero": of["zero"]} if "zero" in dict(ways) else {})
