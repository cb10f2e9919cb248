"""Place experts by their load: those of each actor have about as many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from raypar.actors.specs.run import Run
from raypar.errors import ConfigError
from raypar.reporting.report import Report
from raypar.schedules.float_sum import float_sum

Loads = Mapping[str, Sequence[int]]  # tokens of each expert, by the list's logical name


def balanced(loads: Sequence[int], parts: int) -> tuple[int, ...]:
    """Order experts so that equal slices of them have about as many tokens: largest first, to the slice with least.

    Args:
        loads: Tokens of each expert.
        parts: Number of slices, a divisor of the number of experts.
    """
    size = len(loads) // parts
    slices: list[list[int]] = [[] for _ in range(parts)]
    for number in sorted(range(len(loads)), key=lambda number: (-loads[number], number)):
        free = [one for one in slices if len(one) < size]
        min(free, key=lambda one: float_sum(loads[number] for number in one)).append(number)
    return tuple(number for one in slices for number in sorted(one))


def rebalanced(run: Run, loads: Loads | None, last: Report | None) -> Run:
    """Return a run whose experts are placed by their load.

    Args:
        run: The run.
        loads: Tokens of each expert; None for those of the last step, if the model is a GPT or Llama.
        last: The report of the last step; None if there was none.

    Raises:
        ConfigError: Experts are not divided, or it is not known how many tokens they have.
    """
    if not run.mesh.divides_experts:
        raise ConfigError(["rebalance: every replica has all experts: set mesh.ep"])
    if loads is None:
        if last is None or last.loads is None:
            raise ConfigError(["rebalance: no step has reported the loads of experts: take one, or give loads"])
        loads = {f"{layer.layer}.experts": layer.asked for layer in last.loads.layers}
    parts = run.mesh.expert_parts
    uneven = [name for name, counts in loads.items() if len(counts) % parts]
    if uneven:
        raise ConfigError([f"rebalance: loads of {name} are of no multiple of {parts} experts" for name in uneven])
    orders = {name: " ".join(map(str, balanced(counts, parts))) for name, counts in loads.items()}
    return replace(run, expert_order={**run.expert_order, **orders})
