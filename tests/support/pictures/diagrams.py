"""The diagrams of docs/pictures, and the pictures of schedules there."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from raypar.schedules import CATALOG, Costs, Schedule, Timeline, build, gather_weights, lower, simulate, svg
from raypar.schedules.action import Op
from raypar.schedules.drawing.palette import color

_STYLE = Path(__file__).with_name("diagram.css")
WIDTH = 760  # of a diagram: about that of a page's column
BLUE, GREEN, PINK, ORANGE = (color(op) for op in (Op.F, Op.B, Op.I, Op.W))
FAMILIES = {  # by family, the one that is drawn
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zero-bubble": "zb-h1",
    "v": "zb-v",
    "dualpipe": "dualpipe-v",
    "pipedream": "pipedream",
}
RANKS, MICROBATCHES, STEPS = 4, 8, 3


@dataclass
class Diagram:
    """A diagram under construction.

    Attributes:
        title: Its name, for those who can't see it.
        what: What it shows, for the same readers.
        height: Its height.
        parts: The elements.
    """

    title: str
    what: str
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """Write a line of text, centred at x or starting there."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{html.escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, words: str = "", fill: str = "") -> None:
        """Draw a box with lines of text in its middle; one without a colour is an outline."""
        look = f'fill="{fill}"' if fill else 'class="outline"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" {look}/>')
        lines = words.split("\n")
        for number, line in enumerate(lines):
            middle = y + height / 2 + 5 + 17 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, "on" if fill else "")

    def arrow(self, x: float, y: float, to_x: float, to_y: float, dashed: bool = False) -> None:
        """Draw a straight arrow."""
        kind = "arrow dashed" if dashed else "arrow"
        self.parts.append(f'<path class="{kind}" marker-end="url(#head)" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')

    def svg(self) -> str:
        """Return the SVG."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {self.height}" width="100%" '
            f'style="display: block; height: auto; max-width: {2 * WIDTH}px">'
        )
        return "\n".join(
            [
                head,
                f"<title>{html.escape(self.title)}</title>",
                f"<desc>{html.escape(self.what)}</desc>",
                f"<style>{_STYLE.read_text()}</style>",
                '<marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
                '<path class="head" d="M0 0L9 4L0 8z"/></marker>',
                f'<rect class="paper" width="{WIDTH}" height="{self.height}" rx="8"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def mesh() -> Diagram:
    """The driver and the eight actors of a mesh."""
    it = Diagram(
        "A mesh and its actors",
        "The driver sends rows of actions to eight actors, pp=2 x dp=2 x tp=2. Groups along the axes pp, dp and tp "
        "connect them.",
        404,
    )
    it.box(250, 12, 260, 48, "driver: your process\nrows of actions, data, checkpoints", PINK)
    for dp in range(2):
        left = 40 + 380 * dp
        it.arrow(340 + 80 * dp, 60, left + 150, 88)
        it.box(left - 20, 90, 340, 252)
        it.text(left + 150, 110, f"replica dp={dp}", "strong")
        for pp in range(2):
            for tp in range(2):
                words = f"pp={pp} dp={dp} tp={tp}\nhalf {tp} of stage {pp}"
                it.box(left + 160 * tp, 124 + 130 * pp, 140, 76, words, BLUE if pp == 0 else GREEN)
            it.arrow(left + 142, 150 + 130 * pp, left + 157, 150 + 130 * pp)
            it.arrow(left + 158, 174 + 130 * pp, left + 143, 174 + 130 * pp)
        for tp in range(2):
            it.arrow(left + 50 + 160 * tp, 202, left + 50 + 160 * tp, 251)
            it.arrow(left + 90 + 160 * tp, 252, left + 90 + 160 * tp, 203)
    for pp in range(2):
        it.arrow(342, 162 + 130 * pp, 418, 162 + 130 * pp)
        it.arrow(418, 162 + 130 * pp, 342, 162 + 130 * pp)
    it.text(20, 366, "pp, downwards: activations go to the next stage, gradients come back.", "small", "start")
    it.text(20, 388, "tp, side by side: parts of a layer's result are summed.", "small", "start")
    it.text(400, 388, "dp, across: gradients of equal weights are summed.", "small", "start")
    return it


def step() -> Diagram:
    """One microbatch of a step through the groups of four actors."""
    it = Diagram(
        "A step through the groups",
        "Two replicas of two stages: forwards send activations in the group pp, backwards send gradients back, then "
        "the group dp sums the gradients of each stage, and every actor updates its weights.",
        316,
    )
    heads = (("forward", 155), ("backward", 345), ("sum over dp", 528), ("update", 673))
    for words, x in heads:
        it.text(x, 26, words, "strong")
    tops = [44, 106, 188, 250]
    for number, (dp, pp) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        y = tops[number]
        it.text(12, y + 27, f"pp={pp} dp={dp}", anchor="start")
        it.box(100 + 70 * pp, y, 56, 42, f"{pp}F0", BLUE)
        it.box(372 - 88 * pp, y, 66, 42, f"{pp}B0", GREEN)
        it.box(474, y, 108, 42, f"gradients\nof stage {pp}", PINK)
        it.box(630, y, 86, 42, "STEP", ORANGE)
        it.arrow(440, y + 21, 471, y + 21)
        it.arrow(584, y + 21, 627, y + 21)
        if pp == 0:
            it.arrow(150, y + 43, 184, y + 61)
            it.arrow(330, y + 61, 386, y + 43)
            it.text(130, y + 57, "SEND_F", "small", "end")
            it.text(400, y + 58, "SEND_B", "small", "start")
        else:
            it.arrow(228, y + 21, 281, y + 21)
            it.arrow(352, y + 21, 436, y + 21, dashed=True)
    for x, top, end in ((590, 65, 209), (605, 127, 271)):
        it.parts.append(f'<path class="arrow" d="M{x - 6} {top}H{x}V{end}H{x - 6}"/>')
    it.text(12, 308, "Right of the gradients: the two groups dp, one for each stage.", "small", "start")
    return it


def zero() -> Diagram:
    """What each of two replicas holds at each level of ZeRO."""
    it = Diagram(
        "The levels of ZeRO",
        "What each of two replicas holds. Level 0: all weights, gradients and optimizer state. Level 1 divides the "
        "optimizer state, level 2 the gradients too, level 3 the weights too, which are gathered for use unit by unit.",
        316,
    )
    parts = (("weights", BLUE, 3), ("gradients", GREEN, 2), ("optimizer", ORANGE, 1))
    lefts, wide = (110, 436), 100
    for dp, left in enumerate(lefts):
        it.text(left + 1.5 * wide, 26, f"replica dp={dp}", "strong")
    for level in range(4):
        y = 42 + 56 * level
        it.text(12, y + 26, f"zero={level}", "strong", "start")
        for dp, left in enumerate(lefts):
            for number, (name, fill, divided) in enumerate(parts):
                x = left + number * (wide + 4)
                it.box(x, y, wide, 42)
                half = level >= divided
                it.box(
                    x + (wide / 2 if half and dp else 0), y, wide / 2 if half else wide, 42, "" if half else name, fill
                )
                if half:
                    it.text(x + wide * (0.25 if dp else 0.75), y + 26, "with 1" if dp == 0 else "with 0", "small")
    for number, (name, fill, _) in enumerate(parts):
        it.box(110 + 150 * number, 274, 14, 14, "", fill)
        it.text(132 + 150 * number, 286, name if number < 2 else "optimizer state", "small", "start")
    it.text(110, 308, "zero=3: a unit's weights are gathered before its F or B, and freed after it.", "small", "start")
    return it


def experts() -> Diagram:
    """Tokens to experts on two actors and back."""
    it = Diagram(
        "Experts on several actors",
        "On each of two actors a router chooses experts for its tokens. An all_to_all sends each token to the actor of "
        "its expert, the experts compute, and a second all_to_all sends the results back.",
        262,
    )
    heads = (
        ("tokens", 112),
        ("router", 212),
        ("all_to_all", 318),
        ("experts", 440),
        ("all_to_all", 562),
        ("sums", 678),
    )
    for words, x in heads:
        it.text(x, 26, words, "strong")
    fills = (BLUE, GREEN, PINK, ORANGE)
    for actor in range(2):
        top = 44 + 108 * actor
        it.text(12, top + 48, f"ep={actor}", anchor="start")
        it.box(180, top, 64, 88, "scores,\ntop k")
        for row in range(4):
            y = top + 23 * row
            it.box(84, y, 56, 19, f"t{4 * actor + row}", fills[(row + actor) % 4])
            it.arrow(141, y + 9, 178, y + 9)
            expert = (row + actor) % 4
            arrives = 44 + 108 * (expert // 2) + 48 * (expert % 2) + 12 + 18 * actor
            it.arrow(246, y + 9, 388, arrives)
            it.arrow(492, arrives, 634, y + 9)
            it.box(637, y, 84, 19, f"t{4 * actor + row}", fills[expert])
        for expert in (2 * actor, 2 * actor + 1):
            it.box(390, 44 + 108 * actor + 48 * (expert % 2), 100, 42, f"expert {expert}", fills[expert])
    it.text(84, 254, "A token has the colour of its expert. Each expert's weights are on one actor.", "small", "start")
    return it


def relayout() -> Diagram:
    """From pp=2 to tp=2."""
    it = Diagram(
        "A relayout from pp=2 to tp=2",
        "Before, each actor holds two whole layers of four. After, each holds one half of all four layers. The halves "
        "that the other actor needs move; the others stay.",
        262,
    )
    it.text(168, 26, "Mesh(pp=2), step 3", "strong")
    it.text(592, 26, "Mesh(tp=2), step 4", "strong")
    for actor in range(2):
        top = 40 + 100 * actor
        it.box(12, top, 312, 88)
        it.text(26, top + 22, f"actor {actor}: pp={actor}", "small", "start")
        it.box(436, top, 312, 88)
        it.text(450, top + 22, f"actor {actor}: tp={actor}", "small", "start")
        for layer in (2 * actor, 2 * actor + 1):
            it.box(28 + 148 * (layer % 2), top + 32, 132, 44, f"layer {layer}", BLUE if actor == 0 else GREEN)
        for layer in range(4):
            half = f"layer {layer}\nhalf {actor}"
            it.box(446 + 75 * layer, top + 32, 66, 44, half, BLUE if layer < 2 else GREEN)
        it.arrow(328, top + 44, 432, top + 44, dashed=True)
    it.arrow(328, 100, 432, 178)
    it.arrow(328, 178, 432, 100)
    it.text(
        12, 254, "Solid: halves of weights and optimizer state that move. Dashed: those that stay.", "small", "start"
    )
    return it


def recovery() -> Diagram:
    """An actor dies in step 4."""
    it = Diagram(
        "A failure and a recovery",
        "Each actor keeps its state after the last step in a memory file, which outlives it. Actor pp=1 dies in step "
        "4. Another actor replaces it, both go back to the state after step 3, and the step is taken again.",
        254,
    )
    heads = (("steps 1 to 3", 172), ("step 4", 323), ("repair", 464), ("step 4 again", 604), ("step 5", 705))
    for words, x in heads:
        it.text(x, 26, words, "strong")
    for pp in range(2):
        y = 42 + 62 * pp
        it.text(12, y + 27, f"pp={pp}", anchor="start")
        for number in range(3):
            it.box(80 + 62 * number, y, 58, 42, str(number + 1), BLUE)
        it.box(550, y, 108, 42, "4", BLUE)
        it.box(662, y, 86, 42, "5", BLUE)
    it.text(12, 198, "memory", anchor="start")
    for number in range(3):
        it.box(80 + 62 * number, 172, 58, 42, f"after {number + 1}", GREEN)
        it.arrow(109 + 62 * number, 148, 109 + 62 * number, 169)
    it.box(270, 42, 106, 42, "4, given up")
    it.box(270, 104, 60, 42, "4, 1B3")
    it.text(352, 131, "dies", "strong")
    it.box(384, 42, 160, 42, "goes back")
    it.box(384, 104, 116, 42, "another actor", ORANGE)
    it.box(384, 172, 160, 42, "state after step 3", GREEN)
    it.arrow(442, 171, 442, 149)
    it.arrow(522, 171, 522, 87)
    it.arrow(264, 193, 381, 193, dashed=True)
    it.text(12, 242, "The bits of all losses and weights are those of a run without the failure.", "small", "start")
    return it


def family(name: str) -> Timeline:
    """Return the schedule that is drawn of a family, simulated with durations of all layers of a rank."""
    chunks = CATALOG[name].default_chunks
    costs = Costs(*(cost / chunks for cost in (1.0, 2.0, 1.0, 1.0)))
    return simulate(build(name, RANKS, MICROBATCHES, steps=STEPS), costs)


def families() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the file and the picture of each family, those of one step on one time axis."""
    timelines = {file: family(name) for file, name in FAMILIES.items()}
    span = max(timeline.makespan for timeline in timelines.values() if not timeline.schedule.stream)
    for file, timeline in timelines.items():
        yield f"family-{file}.svg", lambda timeline=timeline: svg(timeline, span=span) + "\n"


def pictures() -> dict[str, Callable[[], str]]:
    """Return all pictures: by file a function that returns its text."""
    gathered: Schedule = gather_weights(build("1f1b", 2, 4), "microbatch")
    return {
        **{
            f"{make.__name__}.svg": lambda make=make: make().svg()
            for make in (mesh, step, zero, experts, relayout, recovery)
        },
        **dict(families()),
        "lowered.svg": lambda: svg(lower(build("1f1b", 3, 4))) + "\n",
        "gathers.svg": lambda: svg(simulate(gathered, Costs(unshard=0.5))) + "\n",
    }
