"""The SVG drawing of a schedule or timeline: a lane for each rank, a box to scale for each action."""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from raypar.schedules.action import COMPUTE, RECVS, SENDS, Action, Op
from raypar.schedules.drawing.boxes import Box, timeline_boxes
from raypar.schedules.drawing.palette import GREY, INK, color
from raypar.schedules.drawing.text import deadlock_lines, plain, slot_length, spelling, summary
from raypar.schedules.rules import gathers
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs, simulate_to_deadlock
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


_TYPE, _NUMBER = 14, 12  # of the text, and of microbatches
LANE = 26
GAP = 6
MARGIN = 84
HEADING = 20
SLOT = 36  # the widest that the shortest kind of action is drawn
PAGE = 1000  # the width of a picture, unless slots became wider than SLOT
RULER = 14  # height of the line of numbers below a lane whose boxes are too narrow for them
LEAST = 1.45  # width of the narrowest box: more than 2 pixels where a picture is 1,440 wide
WIDEST = 66  # of a box of joined actions: each has its range below it, less than 100 pixels from the next one
MOST_BOXES = 8_000  # of a picture: beyond it, wider boxes are joined too
_TICK = 90  # between two ticks
_LETTER, _DIGIT, _BOLD = 7.7, 6.9, 8.6
_KEY = 36  # around a key
_NAMES = {
    Op.F: "F forward",
    Op.B: "B backward",
    Op.I: "I its input half",
    Op.W: "W its weight half",
    Op.SEND_F: "SEND",
    Op.RECV_F: "RECV, with waiting",
    Op.STEP: "STEP",
}
_THIN = 4  # height of the line of a bucket's reduction, and of one that shows how long a stage is whole
_CALL = 9  # height of communication within an action
_FAINT, _PALE = 0.45, 0.3
_PAPER, _INK = 'class="raypar-paper" fill="none"', 'class="raypar-ink"'
_COSTS = Costs()
_EXCHANGE = 0.3  # of a forward: how wide a SEND or a RECV is drawn in a schedule that has them


def svg(
    drawn: Schedule | Timeline,
    *,
    done: Collection[Action] | None = None,
    cursor: Action | None = None,
    span: float = 0.0,
) -> str:
    """Draw a schedule or a timeline as standalone SVG, as wide as what contains it.

    In a schedule F, I and W are one unit long and B two, and a lowered one has its SEND, RECV and STEP; a timeline is
    drawn to scale, with a time axis. Boxes are coloured by op, lighter for later chunks of a rank. The number in a box
    is the microbatch; where boxes are too narrow for it, a line below the lane has every n-th one. Adjoining actions of
    a kind that would be narrower than 2 pixels become one box with their range. A tooltip gives the details. If the
    schedule gathers weights, each stage has a thin line below its rank: grey while they are gathered, and in the
    stage's colour while they are whole. A page's picture has the page's colours; a file's is light or dark, like the
    reader's system.

    Args:
        drawn: The schedule or timeline. A schedule that deadlocks is drawn as far as it goes.
        done: The actions of a step under way that are done; the others are drawn pale. None draws all alike.
        cursor: The action that comes next, which gets a frame.
        span: The least length of the time axis, so that several pictures can have the same.

    Returns:
        The SVG.
    """
    if isinstance(drawn, Timeline):
        return LanesPicture({"": drawn}, [summary(drawn)], spelling(drawn), done, cursor, span).svg()
    timeline, deadlock = simulate_to_deadlock(drawn, _COSTS)
    used = {event.action.op for event in timeline.events}
    costs = ", ".join(f"{op.value} {_COSTS.of(Action(None, op, None)):g}" for op in _NAMES if op in COMPUTE & used)
    headings = [summary(timeline, named=f"{drawn.name} ({costs})"), *deadlock_lines(timeline, deadlock)]
    if drawn.lowered:
        ends = {(stage, op): _EXCHANGE for stage in range(drawn.num_stages) for op in SENDS | RECVS}
        timeline, _ = simulate_to_deadlock(drawn, Costs(step=1.0, of_stage=ends))
    return LanesPicture({"": timeline}, headings, None, done, cursor, span).svg()


@dataclass
class LanesPicture:
    """A picture of timelines of one schedule: each rank has a lane for each timeline, on one time axis.

    Attributes:
        timelines: The timelines by name. The first is drawn in full colour, the others pale.
        headings: Lines of text above the lanes.
        spelled: Formats the times of the axis. None draws no axis.
        done: As in ``svg``.
        cursor: As in ``svg``.
        span: As in ``svg``.
    """

    timelines: Mapping[str, Timeline]
    headings: Sequence[str]
    spelled: Callable[[float], str] | None
    done: Collection[Action] | None = None
    cursor: Action | None = None
    span: float = 0.0

    def __post_init__(self) -> None:
        """Compute the boxes, the scale and the sizes."""
        self._timelines, self._names = list(self.timelines.values()), list(self.timelines)
        self._schedule = self._timelines[0].schedule
        self.span = max(self.span, *(timeline.makespan for timeline in self._timelines))
        slot = slot_length(self._timelines[0])
        self._scale = min(SLOT / slot, (PAGE - MARGIN - GAP) / self.span) if self.span else 1.0
        computed = (event.action for event in self._timelines[0].events if event.action.op in COMPUTE)
        digits = max((len(str(action.microbatch)) for action in computed), default=0)
        self._ruler = RULER if slot * self._scale < _DIGIT * digits + 2 else 0
        least = LEAST / self._scale
        while len(boxes := list(self._boxes(least))) > MOST_BOXES and least < self.span:
            least *= 2
        self._drawn = boxes
        ranks = range(self._schedule.num_ranks)
        most = max(len(self._schedule.stages_of(rank)) for rank in ranks) if gathers(self._schedule) else 0
        self._strip = most * (_THIN + 1)  # height of the lines that show what is whole
        self._width = max(min(PAGE, MARGIN + self._scale * self.span + GAP), PAGE / 2)
        self._headings = [line for text in self.headings for line in wrap(text, int((self._width - 2 * GAP) / _BOLD))]
        self._keys = list(self._rows_of_keys())
        self._top = 14 + HEADING * len(self._headings)
        self._bottom = self._top + self._schedule.num_ranks * self._pitch

    def _boxes(self, least: float) -> Iterator[tuple[int, Box]]:
        """Yield each box with the number of its lane; its times are from the start of its timeline on."""
        widest = max(least, WIDEST / self._scale)
        for lane, timeline in enumerate(self._timelines):
            yield from ((lane, box) for box in timeline_boxes(timeline, least, widest))

    def _rows_of_keys(self) -> Iterator[list[tuple[float, str, float, str]]]:
        """Yield rows of x, colour, opacity and meaning: one for each kind of box in the picture."""
        row, x = list[tuple[float, str, float, str]](), float(MARGIN)
        for fill, opacity, name in self._shades():
            if x + _KEY + _LETTER * len(name) > self._width and row:
                yield row
                row, x = [], float(MARGIN)
            row.append((x, fill, opacity, name))
            x += _KEY + _LETTER * len(name)
        yield row

    def _shades(self) -> Iterator[tuple[str, float, str]]:
        """Yield colour, opacity and meaning of each kind of box in the picture."""
        drawn = {event.action.op for _, box in self._drawn for event in box.events}
        shades = {color(op) for op in drawn}
        for op, name in _NAMES.items():
            if color(op) in shades:
                yield color(op), 1.0, name
        if GREY in shades or self._strip:
            yield GREY, _FAINT, "gathering, reducing" if self._strip else "reducing, moving"
        if self._strip:
            yield color(Op.F), 1.0, "thin line: weights whole"
        if any(event.calls for _, box in self._drawn for event in box.events if event.action.op in COMPUTE):
            yield color(Op.F), 0.3, "light foot: communication within"
        if any(len(self._schedule.stages_of(rank)) > 1 for rank in range(self._schedule.num_ranks)):
            yield color(Op.F, 1.0), 1.0, "lighter: later chunk"
        if len(self._names) > 1:
            yield color(Op.F), _PALE, f"pale: {self._names[1]}"
        elif self.done is not None:
            yield color(Op.F), _PALE, "pale: to come"

    @property
    def _lane_pitch(self) -> int:
        return LANE + 2 + self._strip + self._ruler

    @property
    def _pitch(self) -> int:
        """Return the height of one rank's lanes and the gap below them."""
        return len(self._timelines) * (self._lane_pitch + GAP) - 2

    def svg(self) -> str:
        """Return the SVG."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        keys = self._bottom + (26 if self.spelled is None else 44)
        width, height = round(self._width), keys + HEADING * (len(self._keys) - 1) + 10
        shown = f"{self._schedule.num_ranks} ranks, {self._schedule.num_microbatches} microbatches"
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="100%" '
            f'font-family="system-ui, sans-serif" font-size="{_TYPE}" '
            f'style="display: block; height: auto; max-width: {width if width < PAGE else 2 * PAGE}px">'
        )
        yield f"<title>{html.escape('; '.join(self.headings))}</title>"
        yield f"<desc>{shown}: a lane for each rank, time from left to right, a box for each action.</desc>"
        yield f"<style>{Path(__file__).with_name('svg.css').read_text(encoding='utf-8')}</style>"
        yield f'<rect {_PAPER} width="{width}" height="{height}" rx="8"/>'
        for line, heading in enumerate(self._headings):
            font = f'x="{2 * GAP}" y="{22 + line * HEADING}" font-weight="{400 if line else 600}"'
            yield f"<text {_INK} {font}>{html.escape(heading)}</text>"
        yield from self._axis()
        yield from self._lanes()
        yield from self._whole()
        for lane, box in sorted(self._drawn, key=lambda drawn: drawn[1].first.bucket is not None):  # thin lines on top
            yield self._box(lane, box)
        yield from self._rulers() if self._ruler else ()
        for row, found in enumerate(self._keys):
            yield from self._legend(keys + HEADING * row, found)
        yield "</svg>"

    def _axis(self) -> Iterator[str]:
        if self.spelled is None:
            return
        for tick in ticks(0.0, self.span, 1 + int(self._scale * self.span / _TICK)):
            x = MARGIN + tick * self._scale
            yield (
                f'<path d="M{x:.1f} {self._top - 4}V{self._bottom}" stroke="{GREY}" stroke-opacity="0.35"/>'
                f'<text {_INK} x="{x:.1f}" y="{self._bottom + 16}" '
                f'text-anchor="{"middle" if x < self._width - 24 else "end"}">{html.escape(self.spelled(tick))}</text>'
            )

    def _lanes(self) -> Iterator[str]:
        wide = self._scale * self.span
        for rank in range(self._schedule.num_ranks):
            for lane, name in enumerate(self._names):
                y, label = self._y(rank, lane), name if lane else self._schedule.label(rank)
                yield f'<text {_INK} x="{2 * GAP}" y="{y + 18}">{html.escape(label)}</text>'
                yield (
                    f'<rect class="raypar-lane" x="{MARGIN}" y="{y}" width="{wide:.1f}" height="{LANE}" rx="2" '
                    f'fill="{GREY}" fill-opacity="0.13"/>'
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
                    if start < self.span:
                        x, y = MARGIN + start * self._scale, self._line(first, lane)
                        width = max(0.0, (min(end, self.span) - start) * self._scale - LEAST / 2)
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

    def _box(self, lane: int, box: Box) -> str:
        """Draw a box in lane number ``lane`` of its rank."""
        event, op = box.first, box.first.action.op
        x, y = MARGIN + box.start * self._scale, float(self._y(event.rank, lane))
        width = max(LEAST, (box.end - box.start) * self._scale - (LEAST / 2 if len(box.events) == 1 else 0))
        height = LANE / box.bands
        top = y + box.band * height
        if event.bucket is not None:
            height = _THIN
            top = self._line(event, lane) if event.part and op is Op.UNSHARD else y + LANE - height
        elif op in SENDS | RECVS and box.bands == 1:
            height = LANE / 2
            top = y + (LANE / 2 if op in RECVS else 0)
        pale = lane > 0 or (self.done is not None and any(one.action not in self.done for one in box.events))
        label = str(event.action.microbatch) if op in COMPUTE and not self._ruler else ""
        kind = "raypar-ink raypar-pale" if pale else "raypar-number"
        number = f'<text class="{kind}" x="{x + width / 2:.1f}" y="{y + 18:g}">{label}</text>'
        opacity = (_FAINT if self._fill(event) == GREY else 1.0) * (_PALE if pale else 1.0)
        faint = "" if opacity == 1.0 else f' fill-opacity="{opacity:.2g}"'
        frame = f' stroke="{INK}" stroke-width="3"' if event.action == self.cursor else ""
        size = f'x="{x:.1f}" y="{top:.4g}" width="{width:.1f}" height="{height:.3g}"'
        return (
            f"<g><title>{self._tip(lane, box)}</title><rect {size} "
            f'fill="{self._fill(event)}"{faint}{frame}/>{"".join(self._calls(lane, box))}'
            f"{number if label and _DIGIT * len(label) <= width else ''}</g>"
        )

    def _calls(self, lane: int, box: Box) -> Iterator[str]:
        """Draw communication within an action as light parts at the foot of its box; parts that adjoin become one."""
        if len(box.events) > 1 or box.first.action.op not in COMPUTE:
            return
        event, spans = box.first, list[tuple[float, float, str]]()
        for name, begin, end in event.calls:
            left, right = (box.start + max(0.0, min(at, event.end) - event.start) for at in (begin, end))
            if spans and (left - spans[-1][1]) * self._scale < 1.0 and spans[-1][2] == name:
                left = spans.pop()[0]
            spans.append((left, right, name))
        y, height = self._y(event.rank, lane) + LANE - _CALL, _CALL
        for left, right, name in spans:
            if (width := (right - left) * self._scale) >= 1.0:
                x, times = MARGIN + left * self._scale, (self.spelled or plain)(right - left)
                yield (
                    f"<g><title>{html.escape(f'{name} within {event.action} on {event.actor}: {times}')}</title>"
                    f'<rect class="raypar-call" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" '
                    f'fill="#fff" fill-opacity="0.7"/></g>'
                )

    def _tip(self, lane: int, box: Box) -> str:
        spelled, name, event = self.spelled or plain, self._names[lane], box.first
        part = f" ({event.part})" if event.part else ""
        who = f"{box.name}{part} on {event.actor}{f', {name}' if name else ''}"
        return html.escape(f"{who}: {spelled(box.start)} to {spelled(box.end)}")

    def _rulers(self) -> Iterator[str]:
        """Yield the line of numbers below each lane, as many as have room."""
        free = defaultdict[tuple[int, int], float](float)
        for lane, box in sorted(self._drawn, key=lambda drawn: drawn[1].start):
            event, x = box.first, MARGIN + box.start * self._scale
            if event.action.op not in COMPUTE or x < free[event.rank, lane]:
                continue
            name = f"{event.action.op.value}{box.microbatches}"
            if _DIGIT * len(name) > WIDEST:
                name = f"{event.action.op.value}{event.action.microbatch}"
            wide = _DIGIT * (len(name) + 1)  # a W is two digits wide
            free[event.rank, lane] = x + wide + GAP / 2
            y = self._y(event.rank, lane) + LANE
            yield (
                f'<path d="M{x + LEAST / 2:.1f} {y}v4" stroke="{INK}"/>'
                f'<text {_INK} font-size="{_NUMBER}" x="{min(x, self._width - wide):.1f}" y="{y + RULER}">{name}</text>'
            )

    def _fill(self, event: Event) -> str:
        stage, op, _, _ = event.action
        return color(op) if stage is None else self._shade(stage, op)

    def _shade(self, stage: int, op: Op = Op.F) -> str:
        """Return the colour of a stage's op: lighter for a later chunk of its rank."""
        stages = self._schedule.stages_of(self._schedule.row_of(stage, 0))
        return color(op, stages.index(stage) / max(1, len(stages) - 1))

    def _legend(self, y: float, keys: Sequence[tuple[float, str, float, str]]) -> Iterator[str]:
        for x, fill, opacity, name in keys:
            faint = "" if opacity == 1.0 else f' fill-opacity="{opacity:.2g}"'
            yield (
                f'<rect class="raypar-key" x="{x:.1f}" y="{y - 11}" width="12" height="12" fill="{fill}"{faint}/>'
                f'<text {_INK} x="{x + 17:.1f}" y="{y}">{html.escape(name)}</text>'
            )

    def _y(self, rank: int, lane: int) -> int:
        return self._top + rank * self._pitch + lane * (self._lane_pitch + 2)
