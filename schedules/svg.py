"""The schedule as a picture: ranks are lanes, actions are boxes to scale."""

from __future__ import annotations

import colorsys
import html
from collections.abc import Iterator

from raypar.schedules.action import COMPUTE, Op
from raypar.schedules.draw import slot_length, summary
from raypar.schedules.schedule import MOST_DRAWN, Schedule
from raypar.schedules.simulate import UNIT, simulate
from raypar.schedules.timeline import Event, Timeline

LANE, GAP, MARGIN, HEADER, SLOT, FINEST = 26, 6, 64, 40, 28, 1
# Hue and saturation; a rank's chunks differ in lightness. Grey of middle lightness is read on white and on black.
_HUES = {Op.F: (0.59, 0.62), Op.B: (0.38, 0.45), Op.I: (0.48, 0.50), Op.W: (0.11, 0.75)}
_GREY = "#868e96"
_THIN = 4  # of what goes on beside the actions
_FAINT = ' fill-opacity="0.45"'


def svg(drawn: Schedule | Timeline) -> str:
    """Draw a schedule, or a timeline, as standalone SVG without background, for light and dark pages.

    A schedule is drawn with every action one slot long, a timeline to its own scale. Boxes are coloured by op, and
    lighter for later chunks of a rank; the number is the microbatch, and pointing at a box tells the rest. Waiting
    for a value, reducing gradients (a thin line for each bucket) and STEP are grey. Beyond ``MOST_DRAWN`` events the
    picture is cut, and says so.
    """
    timeline = simulate(drawn, UNIT) if isinstance(drawn, Schedule) else drawn
    schedule = timeline.schedule
    zero, scale = timeline.start, SLOT / slot_length(timeline)
    visible = (event for event in timeline.events if (event.end - event.start) * scale > FINEST)
    boxes = sorted(visible, key=lambda event: event.start)
    note = "" if len(boxes) <= MOST_DRAWN else f" (the first {MOST_DRAWN} of {len(boxes)} boxes)"
    boxes = boxes[:MOST_DRAWN]
    width = MARGIN + scale * (max((box.end for box in boxes), default=zero) - zero) + GAP
    height = HEADER + schedule.num_ranks * (LANE + GAP)
    title = html.escape(summary(timeline) + note)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
            f'viewBox="0 0 {width:.0f} {height}" font-family="system-ui, sans-serif" font-size="12">',
            f"<title>{title}</title>",
            f'<text x="{GAP}" y="22" font-size="14" font-weight="600" fill="{_GREY}">{title}</text>',
            *_lanes(schedule, width),
            *(_box(box, schedule, zero, scale) for box in boxes),
            "</svg>",
        ]
    )


def _lanes(schedule: Schedule, width: float) -> Iterator[str]:
    for rank in range(schedule.num_ranks):
        y = _top(rank)
        yield f'<text x="{GAP}" y="{y + 17}" fill="{_GREY}">rank {rank}</text>'
        yield (
            f'<rect x="{MARGIN}" y="{y}" width="{width - MARGIN - GAP:.1f}" height="{LANE}" rx="4" '
            f'fill="{_GREY}" fill-opacity="0.13"/>'
        )


def _box(event: Event, schedule: Schedule, zero: float, scale: float) -> str:
    x, y = MARGIN + (event.start - zero) * scale, _top(event.rank)
    width = (event.end - event.start) * scale - FINEST
    computes = event.action.op in COMPUTE
    label = str(event.action.microbatch) if computes else ""
    number = (
        f'<text x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle" fill="#fff">{label}</text>'
        if 0 < 7 * len(label) <= width
        else ""
    )
    bucket = "" if event.bucket is None else f" (bucket {event.bucket})"
    tip = html.escape(f"{event.action}{bucket} on {event.actor}: {event.start:.6g} to {event.end:.6g}")
    height = LANE if event.bucket is None else _THIN
    return (
        f'<g><title>{tip}</title><rect x="{x:.1f}" y="{y + LANE - height}" width="{width:.1f}" height="{height}" '
        f'rx="3" fill="{_fill(event, schedule)}"{"" if computes else _FAINT}/>{number}</g>'
    )


def _fill(event: Event, schedule: Schedule) -> str:
    stage, op, _ = event.action
    if stage is None or op not in _HUES:
        return _GREY
    stages = schedule.stages_of(event.rank)
    hue, saturation = _HUES[op]
    lightness = 0.38 + 0.2 * stages.index(stage) / len(stages)
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(hue, lightness, saturation))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _top(rank: int) -> int:
    return HEADER + rank * (LANE + GAP)
