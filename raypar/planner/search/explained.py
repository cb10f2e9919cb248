"""A ranking in words: a table, a picture of a step, why each choice was made, and why each runner-up lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raypar.actors.specs.model import GPT, Llama
from raypar.planner.search.ranking import ALIKE, MICRO_BATCH, Candidate, Ranking
from raypar.planner.search.space import LONG, Space
from raypar.schedules.formatting import text_table, three_digit_seconds

_BAR = 40  # characters of a whole step
SHOWN = 6  # meshes of the table
_GB = 1e9
_AXES = ("dp", "tp", "pp", "cp", "ep")
_UPPER, _LOWER = MICRO_BATCH.split()  # one above the other, so that a row fits 80 columns
_HEADS = (
    ("", *[""] * len(_AXES), "", _UPPER, "", "", "", ""),
    ("", *_AXES, "schedule", _LOWER, "zero", "recompute", "step", "memory"),
)


def mesh_table(ranking: Ranking) -> list[str]:
    """Return a line for each of the best meshes, under two lines of heads.

    A step in closed form among simulated or measured ones is marked with "~".
    """
    shown = ranking.best[:SHOWN]
    exact = [one.simulated is not None or one.calibrated for one in shown]
    about = ["" if here or not any(exact) else "~" for here in exact]
    rows = [*_HEADS, *(_cells(number, one, how) for number, (one, how) in enumerate(zip(shown, about, strict=True), 1))]
    return text_table(rows, ">")


def _cells(number: int, one: Candidate, about: str) -> tuple[str, ...]:
    return (
        str(number),
        *map(str, one.choices.values()),
        about + three_digit_seconds(one.seconds),
        f"{one.need.bytes / _GB:.1f} GB",
    )


def step_bars(one: Candidate) -> list[str]:
    """Return a bar for each part of a step in closed form, which together are as long as that."""
    whole, lines = one.step.seconds, list[str]()
    for name, seconds in one.step.shares.items():
        if seconds:
            bar = "#" * max(1, round(_BAR * seconds / whole))
            lines.append(f"{name:>22}  {three_digit_seconds(seconds):>8}  {seconds / whole:6.1%}  {bar}")
    return lines


def memory_text(one: Candidate, room: float) -> str:
    """Say what takes the memory of the fullest actor, and how much it may take."""
    kinds = zip(one.need._fields, one.need, strict=True)
    text = ", ".join(f"{kind} {size / _GB:.1f}" for kind, size in kinds if size / _GB >= 0.05)
    return f"{one.need.bytes / _GB:.1f} of {room / _GB:.1f} GB: {text}"


def reasons(ranking: Ranking, space: Space) -> Iterator[str]:
    """Yield a sentence for each choice of the best candidate: what the best one with another choice takes.

    Candidates in the table are compared by the seconds in it, others in closed form.

    Args:
        ranking: What was found.
        space: What there was to choose from.
    """
    best = ranking.best[0]
    here = [one for one in (*ranking.all, *ranking.near) if one.family == best.family]  # the table has others' best
    for name, value in best.choices.items():
        others = [one for one in (*ranking.best, *here) if one.choices[name] != value]
        if not others:
            yield f"{name} {value}: {_alone(name, best, space)}"
            continue
        other = min(others, key=lambda one: _longer(one, best, simulated=_is_simulated(one, ranking)))
        text = against(other, best, simulated=_is_simulated(other, ranking))
        yield f"{name} {value}: the best with {name} {other.choices[name]} ({axes(other)}) {text}"


def _is_simulated(one: Candidate, ranking: Ranking) -> bool:
    """Return whether a candidate is compared by the seconds of the table, and not in closed form."""
    return one.simulated is not None or any(one is shown for shown in ranking.best)


def _longer(one: Candidate, best: Candidate, *, simulated: bool) -> float:
    """Return how much longer a step takes than that of the best candidate, as a share of that."""
    return one.seconds / best.seconds - 1 if simulated else one.step.seconds / best.step.seconds - 1


def _alone(name: str, best: Candidate, space: Space) -> str:
    """Return why there is no layout with another choice."""
    if name == "dp":
        return "follows from the devices and the other axes"
    if (name in _AXES and getattr(space, name)) or (name == "zero" and len(space.zero) == 1):
        return "as it was given"
    if name == "cp" and isinstance(best.run.model, GPT | Llama) and best.run.model.seq < LONG:
        return f"context ranks are searched for sequences of {LONG:,} tokens and more; --mesh.cp asks for them"
    if name == "ep" and isinstance(best.run.model, GPT | Llama) and best.run.model.moe is None:
        return "the model has no experts to divide"
    return "nothing else fits, or divides the model, the batch and the devices"


def axes(one: Candidate) -> str:
    """Return the axes of a layout that are split, as "dp 4 x tp 2"."""
    split = (f"{name} {one.choices[name]}" for name in _AXES if one.choices[name] != 1)
    return " x ".join(split) or "one device"


def lost(ranking: Ranking) -> Iterator[str]:
    """Yield a sentence for each runner-up: how much longer its step takes, and what of it does."""
    best = ranking.best[0]
    for number, one in enumerate(ranking.best[1:SHOWN], 2):
        yield f"{number}: {against(one, best, simulated=True)}"


def against(other: Candidate, best: Candidate, *, simulated: bool = False) -> str:
    """Say how a candidate differs from the best one: the time of a step, and the part that grows most.

    Parts are in closed form. They explain a simulated difference only where they are about as far apart.
    """
    whole = _longer(other, best, simulated=simulated)
    apart = other.seconds - best.seconds if simulated else other.step.seconds - best.step.seconds
    more = {name: seconds - best.step.shares[name] for name, seconds in other.step.shares.items()}
    worst = max(more, key=more.__getitem__)
    if abs(whole) < ALIKE:
        return f"takes as long, within {ALIKE:.1%}"
    how = f"takes {whole:.1%} longer" if whole > 0 else f"takes {-whole:.1%} less" + " in closed form" * (not simulated)
    grown = f": {worst} +{three_digit_seconds(more[worst])}" if 0.5 * apart < more[worst] < 2 * apart else ""
    return how + grown


def what_is_missing(ranking: Ranking, size: int) -> Sequence[str]:
    """Say what is missing where nothing fits: the layout that needs least memory, and how much it needs."""
    if ranking.least is None:
        return [f"no layout of {size:,} devices divides the model and the batch"]
    one = ranking.least
    short = (one.need.bytes - ranking.room) / _GB
    text = f"zero {one.run.zero}, recompute {one.choices['recompute']}"
    needs = memory_text(one, ranking.room)
    return [f"no layout fits: the one that needs least, {axes(one)}, {text}, lacks {short:.1f} GB: {needs}"]
