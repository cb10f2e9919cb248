"""Read the flags that give a model a table of settings, such as experts, or take it away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Layers, Llama, RopeScaling, Transformer
from raypar.actors.specs.moe import MoE

_TABLES: Mapping[str, Callable[[], Any]] = {"moe": MoE, "rope_scaling": RopeScaling, "lora": Lora}


def read_tables(model: GPT | Llama | Layers, words: Sequence[str]) -> tuple[GPT | Llama | Layers, list[str]]:
    """Read which tables a model has: ``--model.moe none`` takes its experts away, a flag of their fields gives it some.

    Args:
        model: The model that flags change.
        words: The words of a command line.

    Returns:
        The model with its tables, and the words that are left for the parser.
    """
    left = list(words)
    for field, make in _TABLES.items():
        before, flag = len(left), f"--model.{field.replace('_', '-')}"
        for at in range(len(left) - 1, -1, -1):
            given = [word.lower().replace("_", "-") for word in left[at : at + 2]]
            if given[0] == f"{flag}=none" or given == [flag, "none"]:
                del left[at : at + (1 if "=" in given[0] else 2)]
        if isinstance(model, Transformer):
            table = None if len(left) < before else getattr(model, field)
            if table is None and any(word.replace("_", "-").startswith(f"{flag}.") for word in left):
                table = make()
            changes: dict[str, Any] = {field: table}
            model = replace(model, **changes)
    return model, left
