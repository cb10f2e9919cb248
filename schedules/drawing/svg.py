"""The SVG drawing of a schedule or timeline: a lane for each rank, a box to scale for each action."""

from __future__ import annotations

import colorsys
import html
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from raypar.schedules.action import COMPUTE, Action, Op
from raypar.schedules.drawing.text import plain, slot_length, spelling, summary
from raypar.schedules.float_sum import float_sum
from raypar.schedules.rules import gathers
from raypar.schedules.schedule import MOST_DRAWN, Schedule
from raypar.schedules.simulation.simulate import UNIT, simulate
from raypar.schedules.timeline import Event, Timeline

_ROUND = (1.0, 2.0, 5.0, 10.0)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Choose round positions for the ticks of an axis.

    Args:
        low: Start of the axis.
        high: End of the axis.
        most: The most ticks wanted.

    Returns:
        Multiples of 1, 2 or 5 times a power of ten between ``low`` and ``high``; none if the range is empty or not
        finite.
    """
    span = high - low
    if not (math.isfinite(low) and math.isfinite(high) and span > 0 and most >= 1):
        return []
    finest = span / most
    power = 10.0 ** math.floor(math.log10(finest))
    step = next(power * factor for factor in _ROUND if power * factor >= finest * (1 - 1e-9))
    while (found := _multiples(low, high, step)) and len(found) > most:
        step *= 2  # if both ends are round numbers there is one tick too many
    return found


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


LANE = 26
GAP = 6
MARGIN = 84
HEADING = 22
SLOT = 28
FINEST = 1
PAGE, LEAST = 1000, 15  # pixels: the width that a picture is fitted to, unless slots became narrower than LEAST
# pixels: of the type; between two ticks; a letter; around a key
_TYPE = 14
_TICK = 90
_LETTER = 8.6
_KEY = 36
# Hue and saturation of each op; the chunks of a rank differ in lightness.
_HUES = {Op.F: (0.59, 0.62), Op.B: (0.38, 0.45), Op.I: (0.48, 0.50), Op.W: (0.11, 0.75)}
_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "its input half", Op.W: "its weight half"}
_GREY = "#868e96"
_THIN = 4  # pixels: height of the line of a bucket's reduction, and of one that shows how long a stage is whole
_CALL = 9  # pixels: height of communication within an action
_FAINT, _PALE = 0.45, 0.4
_PAPER, _INK = 'class="raypar-paper" fill="#ffffff"', 'class="raypar-ink" fill="#343a40"'
_DARK = (
    "<style>@media (prefers-color-scheme: dark) "
    "{ .raypar-paper { fill: #16181d } .raypar-ink { fill: #dee2e6 } }</style>"
)


def svg(drawn: Schedule | Timeline, *, done: Collection[Action] | None = None, cursor: Action | None = None) -> str:
    """Draw a schedule or a timeline as standalone SVG.

    In a schedule every action is one slot long; a timeline is drawn to scale, with a time axis. Boxes are
    coloured by op, lighter for later chunks of a rank. The number in a box is the microbatch, and a tooltip gives the
    details. Waiting for a value, gradient reduction (a thin line for each bucket) and STEP are grey. If the schedule
    gathers weights, each stage has a thin line below its rank: grey while they are gathered, and in the stage's colour
    while they are whole. Beyond MOST_DRAWN events the picture is cut, and a heading says so. The background is light or
    dark, like the reader's page.

    Args:
        drawn: The schedule or timeline.
        done: The actions of a step under way that are done; the others are drawn pale. None draws all alike.
        cursor: The action that comes next, which gets a frame.

    Returns:
        The SVG.
    """
    if isinstance(drawn, Schedule):
        timeline = simulate(drawn, UNIT)
        return LanesPicture({"": timeline}, [summary(timeline, in_slots=True)], None, done, cursor).svg()
    return LanesPicture({"": drawn}, [summary(drawn)], spelling(drawn), done, cursor).svg()


@dataclass
class LanesPicture:
    """A picture of timelines of one schedule: each rank has a lane for each timeline, on one time axis.

    Attributes:
        timelines: The timelines by name. The first is drawn in full colour, the others pale.
        headings: Lines of text above the lanes.
        spelled: Formats the times of the axis. None draws no axis.
        done: As in ``svg``.
        cursor: As in ``svg``.
    """

    timelines: Mapping[str, Timeline]
    headings: Sequence[str]
    spelled: Callable[[float], str] | None
    done: Collection[Action] | None = None
    cursor: Action | None = None

    def __post_init__(self) -> None:
        """Compute the boxes, the scale and the sizes in pixels."""
        self._timelines, self._names = list(self.timelines.values()), list(self.timelines)
        self._schedule = self._timelines[0].schedule
        span, slot = max(timeline.makespan for timeline in self._timelines), slot_length(self._timelines[0])
        self._scale = min(SLOT / slot, max(LEAST / slot, (PAGE - MARGIN - GAP) / span)) if span else 1.0
        visible = [
            (event.start - zero, lane, event)
            for lane, (timeline, zero) in enumerate((one, one.start) for one in self._timelines)
            for event in timeline.events
            if (event.end - event.start) * self._scale > FINEST
        ]
        self._boxes = nsmallest(MOST_DRAWN, visible, key=lambda box: box[0])
        if len(self._boxes) < len(visible):
            self.headings = [*self.headings, f"(the first {MOST_DRAWN} of {len(visible)} boxes)"]
            span = max(start + event.end - event.start for start, _, event in self._boxes)
        self._span, self._top = span, 18 + HEADING * len(self.headings)
        ranks = range(self._schedule.num_ranks)
        most = max(len(self._schedule.stages_of(rank)) for rank in ranks) if gathers(self._schedule) else 0
        self._strip = most * (_THIN + 1)  # height of the lines that show what is whole
        self._bottom = self._top + self._schedule.num_ranks * self._pitch
        drawn = {event.action.op for _, _, event in self._boxes}
        self._keys = list(self._shades(drawn))
        keys = float_sum(_KEY + _LETTER * len(name) for _, _, name in self._keys)
        least = max(_LETTER * max(map(len, self.headings)) + 2 * GAP, MARGIN + keys)
        self._width = max(MARGIN + self._scale * span + GAP, least)

    def _shades(self, drawn: Collection[Op]) -> Iterator[tuple[str, float, str]]:
        """Yield colour, opacity and meaning of each kind of box in the picture."""
        for op, name in _NAMES.items():
            if op in drawn:
                yield _color(op, 0), 1.0, f"{op.value} {name}"
        if set(drawn) - COMPUTE:
            yield _GREY, _FAINT, "waiting, gathering, reducing, STEP" if self._strip else "waiting, reducing, STEP"
        if self._strip:
            yield _color(Op.F, 0), 1.0, "thin line: weights whole"
        if any(event.calls for _, _, event in self._boxes if event.action.op in COMPUTE):
            yield _color(Op.F, 0), 0.3, "light foot: communication within"
        if any(len(self._schedule.stages_of(rank)) > 1 for rank in range(self._schedule.num_ranks)):
            yield _color(Op.F, 0.5), 1.0, "lighter: later chunk"
        if len(self._names) > 1:
            yield _color(Op.F, 0), _PALE, f"pale: {self._names[1]}"
        elif self.done is not None:
            yield _color(Op.F, 0), _PALE, "pale: to come"

    @property
    def _pitch(self) -> int:
        """Return the height of one rank's lanes and the gap below them, in pixels."""
        return len(self._timelines) * (LANE + 2 + self._strip) - 2 + GAP * len(self._timelines)

    def svg(self) -> str:
        """Return the SVG."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        axis = 0 if self.spelled is None else 22
        width, height, title = round(self._width), self._bottom + axis + 26, html.escape("; ".join(self.headings))
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" '
            f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="{_TYPE}" '
            f'style="max-width: 100%; height: auto">'
        )
        yield f"<title>{title}</title>"
        yield _DARK
        yield f'<rect {_PAPER} width="{width}" height="{height}" rx="8"/>'
        for line, heading in enumerate(self.headings):
            font = f'x="{2 * GAP}" y="{24 + line * HEADING}" font-weight="{400 if line else 600}"'
            yield f"<text {_INK} {font}>{html.escape(heading)}</text>"
        yield from self._axis()
        yield from self._lanes()
        yield from self._whole()
        for start, lane, event in sorted(self._boxes, key=lambda box: box[2].bucket is not None):  # thin lines on top
            yield self._box(start, lane, event)
        yield from self._legend(height - 10)
        yield "</svg>"

    def _axis(self) -> Iterator[str]:
        if self.spelled is None:
            return
        width = self._scale * self._span
        for tick in ticks(0.0, self._span, 1 + int(width / _TICK)):
            x = MARGIN + tick * self._scale
            yield (
                f'<path d="M{x:.1f} {self._top - 4}V{self._bottom}" stroke="{_GREY}" stroke-opacity="0.35"/>'
                f'<text {_INK} x="{x:.1f}" y="{self._bottom + 16}" '
                f'text-anchor="{"middle" if x < self._width - 24 else "end"}">{html.escape(self.spelled(tick))}</text>'
            )

    def _lanes(self) -> Iterator[str]:
        wide = self._scale * self._span
        for rank in range(self._schedule.num_ranks):
            for lane, name in enumerate(self._names):
                y, label = self._y(rank, lane), name if lane else self._schedule.label(rank)
                yield f'<text {_INK} x="{2 * GAP}" y="{y + 18}">{html.escape(label)}</text>'
                yield (
                    f'<rect class="raypar-lane" x="{MARGIN}" y="{y}" width="{wide:.1f}" height="{LANE}" rx="4" '
                    f'fill="{_GREY}" fill-opacity="0.13"/>'
                )

    def _whole(self) -> Iterator[str]:
        """Yield a thin line for each time in which a stage is whole, below the lane of its rank."""
        for lane, timeline in enumerate(self._timelines if self._strip else []):
            since: dict[int, Event] = {}
            for event in timeline.events:
                stage, op, _, _ = event.action
                if stage is None or (timeline.measured and event.bucket is not None):
                    continue
                if op is Op.UNSHARD:
                    since.setdefault(stage, event)
                elif op is Op.RESHARD and stage in since:
                    first = since.pop(stage)
                    start, end = (at - timeline.start for at in (first.end, event.end))
                    if start < self._span:
                        x, y = MARGIN + start * self._scale, self._line(first, lane)
                        width = max(0.0, (min(end, self._span) - start) * self._scale - FINEST)
                        tip = html.escape(f"stage {stage} is whole on {first.actor}")
                        yield (
                            f'<g><title>{tip}</title><rect class="raypar-whole" x="{x:.1f}" y="{y}" '
                            f'width="{width:.1f}" height="{_THIN}" rx="1" fill="{self._shade(stage)}"/></g>'
                        )

    def _line(self, event: Event, lane: int) -> int:
        """Return the y of the thin line of an event's stage."""
        assert event.action.stage is not None
        chunk = self._schedule.stages_of(event.rank).index(event.action.stage)
        return self._y(event.rank, lane) + LANE + 1 + chunk * (_THIN + 1)

    def _box(self, start: float, lane: int, event: Event) -> str:
        """Draw the box of one event, which is in lane number ``lane`` of its rank."""
        x, y = MARGIN + start * self._scale, self._y(event.rank, lane)
        length = event.end - event.start
        width = length * self._scale - FINEST
        computes, height = event.action.op in COMPUTE, LANE if event.bucket is None else _THIN
        top = self._line(event, lane) if event.part and event.action.op is Op.UNSHARD else y + LANE - height
        pale = lane > 0 or (self.done is not None and event.action not in self.done)
        label, ink = str(event.action.microbatch) if computes else "", _INK if pale else 'fill="#fff"'
        number = f'<text {ink} x="{x + width / 2:.1f}" y="{y + 18}" text-anchor="middle">{label}</text>'
        opacity = (1.0 if computes else _FAINT) * (_PALE if pale else 1.0)
        faint = "" if opacity == 1.0 else f' fill-opacity="{opacity:.2g}"'
        frame = f' stroke="{_GREY}" stroke-width="3"' if event.action == self.cursor else ""
        size = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="3"'
        outline = f"M{x:.1f} {top}h{width:.1f}v{height}h{-width:.1f}z"
        below = f'<path {_PAPER} d="{outline}"/>' if faint and self.spelled else ""  # hides the lines of the axis
        return (
            f"<g><title>{self._tip(start, lane, event)}</title>{below}<rect {size} "
            f'fill="{self._fill(event)}"{faint}{frame}/>{"".join(self._calls(start, lane, event))}'
            f"{number if 0 < 8 * len(label) <= width else ''}</g>"
        )

    def _calls(self, start: float, lane: int, event: Event) -> Iterator[str]:
        """Draw communication within an action as light parts at the foot of its box; parts that adjoin become one."""
        spans = list[tuple[float, float, str]]()
        for name, begin, end in event.calls:
            left, right = (start + max(0.0, min(at, event.end) - event.start) for at in (begin, end))
            if spans and (left - spans[-1][1]) * self._scale < FINEST and spans[-1][2] == name:
                left = spans.pop()[0]
            spans.append((left, right, name))
        y, height = self._y(event.rank, lane) + LANE - _CALL, _CALL
        for left, right, name in spans:
            if (width := (right - left) * self._scale) >= FINEST:
                x, times = MARGIN + left * self._scale, (self.spelled or plain)(right - left)
                yield (
                    f"<g><title>{html.escape(f'{name} within {event.action} on {event.actor}: {times}')}</title>"
                    f'<rect class="raypar-call" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" '
                    f'fill="#fff" fill-opacity="0.7"/></g>'
                )

    def _tip(self, start: float, lane: int, event: Event) -> str:
        spelled, name = self.spelled or plain, self._names[lane]
        part = f" ({event.part})" if event.part else ""
        who = f"{event.action}{part} on {event.actor}{f', {name}' if name else ''}"
        return html.escape(f"{who}: {spelled(start)} to {spelled(start + event.end - event.start)}")

    def _fill(self, event: Event) -> str:
        stage, op, _, _ = event.action
        if stage is None or op not in _HUES:
            return _GREY
        return self._shade(stage, op)

    def _shade(self, stage: int, op: Op = Op.F) -> str:
        """Return the colour of a stage's op: lighter for a later chunk of its rank."""
        stages = self._schedule.stages_of(self._schedule.row_of(stage, 0))
        return _color(op, stages.index(stage) / len(stages))

    def _legend(self, y: float) -> Iterator[str]:
        x = float(MARGIN)
        for color, opacity, name in self._keys:
            faint = "" if opacity == 1.0 else f' fill-opacity="{opacity:.2g}"'
            yield (
                f'<rect class="raypar-key" x="{x:.1f}" y="{y - 10}" width="12" height="12" rx="2" '
                f'fill="{color}"{faint}/>'
                f'<text {_INK} x="{x + 17:.1f}" y="{y}">{html.escape(name)}</text>'
            )
            x += _KEY + _LETTER * len(name)

    def _y(self, rank: int, lane: int) -> int:
        return self._top + rank * self._pitch + lane * (LANE + 2 + self._strip)


def _color(op: Op, later: float) -> str:
    """Return the colour of an op, lighter for a later chunk: ``later`` is 0 for a rank's first chunk and below 1."""
    hue, saturation = _HUES[op]
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, 0.38 + 0.2 * later, saturation))
    return f"#{red:02x}{green:02x}{blue:02x}"
