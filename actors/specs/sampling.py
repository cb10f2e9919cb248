"""How the next token is chosen, and the prompts of one actor, as plain data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its probabilities: a pure function of seed, prompt and position.

    Attributes:
        temperature: What logits are divided by; 0 takes the likeliest token.
        top_k: Only so many of the likeliest tokens may be chosen; None: all.
        top_p: Only the fewest tokens may be chosen that are together at least so likely (Holtzman et al. 2020).
        seed: Seed of the choices.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Prompt:
    """A sequence to continue.

    Attributes:
        number: Its number among all prompts; with the seed it determines what is chosen.
        tokens: Its token ids, at least one.
    """

    number: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Prompts:
    """The prompts of one replica, in groups that pass the pipeline stages one after the other.

    Attributes:
        schedule: The lowered schedule of a step, with forwards only; its microbatch i is group i.
        groups: The prompts of each group.
        slots: Positions of the caches of each group.
        sampling: How tokens are chosen.
        scored: Whether the prompts are scored instead of continued.
    """

    schedule: Schedule
    groups: tuple[tuple[Prompt, ...], ...]
    slots: tuple[int, ...]
    sampling: Sampling
    scored: bool = False
