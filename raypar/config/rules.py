"""Rules of a run: declared conflicts of two settings, functions, and the loop over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.schedules.schedule import Schedule


class UnsoundError(Exception):
    """A rule has read a field whose value is wrong by itself, and so can't be compared with others."""


@dataclass(frozen=True)
class Examined:
    """A run that is checked, as rules see it.

    Attributes:
        run: The run, of which a field with a wrong value can't be read: the rule that tries ends there.
        right: Returns whether the fields with some paths have sound values by themselves.
        whole: The model without weights, whether its fields are sound or not.
        resumed: The checkpoint that the run goes on from; None for a new run.
        overwrite: Whether the run may replace one that is in its folder.
        converts: Whether data that the cache has not are converted to look for faults in them.
        lowered: The schedule of its training steps; None if there is none.
        num_stages: Number of stages that it has, or would have if its schedule were sound; None if that is not known.
        misfits: What is wrong with its schedule by itself.
    """

    run: Run
    right: Callable[..., bool]
    whole: Skeleton
    resumed: Path | None = None
    overwrite: bool = False
    converts: bool = False
    lowered: Schedule | None = None
    num_stages: int | None = None
    misfits: Sequence[str] = ()

    @property
    def skeleton(self) -> Skeleton:
        """The model without weights, which can be built. Raises UnsoundError if it can't."""
        self.demand("model")
        if isinstance(self.run.model, Layers) and not builds(self.whole):
            raise UnsoundError
        return self.whole

    @property
    def train(self) -> Schedule:
        """The schedule of its training steps. Raises UnsoundError if there is none."""
        if self.lowered is None:
            raise UnsoundError
        return self.lowered

    def demand(self, *paths: str) -> None:
        """Raise UnsoundError if a field among these has a wrong value by itself."""
        if not self.right(*paths):
            raise UnsoundError

    def value(self, path: str) -> Any:
        """Return the value of a field or property, as ``mesh.tp``, None if the part has no such field.

        Args:
            path: The path; ``run`` is all of the run, and ``train`` the schedule of its training steps.
        """
        first, _, _ = path.partition(".")
        part: Any = self if first in ("run", "train") else self.run
        for name in path.split("."):
            part = getattr(part, name, None)
        return part

    def sound(self, path: str, otherwise: Any) -> Any:
        """Return the value of a field, or another one if the field's is wrong by itself."""
        return self.value(path) if self.right(path) else otherwise


RunRule = Callable[[Examined], Iterable[str]]


@dataclass(frozen=True)
class RunSetting:
    """A setting of a run that is in conflict with others.

    Attributes:
        path: Its field or a property, as ``Examined.value`` takes it.
        chosen: The value of the field with which a run has this setting, or a predicate of values; bool for all
            values that are true.
        said: The words of a message for it, with ``{run}`` and ``{train}``; "" for the field and its value.
        undo: How to do without it, in the words of a message; "" to leave the field out.
    """

    path: str
    chosen: object = bool
    said: str = ""
    undo: str = ""

    def is_in(self, examined: Examined) -> bool:
        """Return whether a run has this setting. Raises UnsoundError if its field has a wrong value."""
        value = examined.value(self.path)
        return bool(self.chosen(value)) if callable(self.chosen) else value == self.chosen

    def words(self, examined: Examined) -> str:
        """Return the words of a message for it."""
        value = examined.value(self.path)
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        return self.said.format(run=examined.run, train=examined.lowered) or f"{self.path} is {shown}"

    @property
    def without(self) -> str:
        """What to do in order not to have it."""
        return self.undo or f"leave {self.path} out"


def several(count: int) -> bool:
    """Return whether a count is more than one: of the setting of an axis, say."""
    return count > 1


def unusual(name: str) -> RunSetting:
    """Return the setting of a run's field that has another value than the usual one."""
    return RunSetting(name, lambda value: value != getattr(Run, name))


@dataclass(frozen=True)
class Conflict:
    """Two settings that a run can't have together: a rule.

    Attributes:
        one: A setting.
        other: The other one.
        because: The rest of the sentence, with ``{run}``, and ``{other}`` for the words of the other setting.
        fix: What to do about it, with ``{run}``; "" to do without one of the two.
    """

    one: RunSetting
    other: RunSetting
    because: str = "but {other}"
    fix: str = ""

    def __call__(self, examined: Examined) -> Iterator[str]:
        """Yield the fault if a run has both settings."""
        if self.one.is_in(examined) and self.other.is_in(examined):
            rest = f"{self.because}: {self.fix or f'{self.one.without}, or {self.other.without}'}"
            yield f"{self.one.words(examined)}, {rest.format(run=examined.run, other=self.other.words(examined))}"


def faults_by(rules: Iterable[RunRule], examined: Examined) -> Iterator[str]:
    """Yield what rules find in a run. A rule ends where it reads a field that has a wrong value by itself.

    Args:
        rules: Conflicts and functions.
        examined: The run.
    """
    for rule in rules:
        try:
            yield from rule(examined)
        except UnsoundError:
            continue


def guarded(part: Any, right: Callable[..., bool], below: str = "") -> Any:
    """Return a run, or a part of one, of which fields with values that are wrong by themselves raise UnsoundError.

    Args:
        part: The dataclass instance.
        right: Returns whether the fields with some paths have sound values.
        below: Prefix of the fields' paths, such as ``model.``.
    """
    if right(*(f"{below}{field.name}" for field in fields(part))):
        return part
    kept, wrong = dict[str, Any](), list[str]()
    for name, value in ((field.name, getattr(part, field.name)) for field in fields(part)):
        path = f"{below}{name}"
        if right(path):
            kept[name] = value
        elif is_dataclass(value) and right(f"{path}."):  # something in it is wrong, and not its type
            kept[name] = guarded(value, right, f"{path}.")
        else:
            wrong.append(name)
    twin: Any = object.__new__(
        type(part.__class__.__name__, (part.__class__,), dict.fromkeys(wrong, property(_unsound)))
    )
    vars(twin).update(kept)
    return twin


def _unsound(_: object) -> None:
    """Raise UnsoundError instead of returning a field's value."""
    raise UnsoundError


def builds(skeleton: Skeleton) -> bool:
    """Return whether a model can be built. Where the user's own function fails, the faults of the layers say so."""
    try:
        return bool(skeleton.model)
    except Exception:
        return False
