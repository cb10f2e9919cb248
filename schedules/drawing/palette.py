"""The colours of actions: each kind differs for all kinds of colour blindness, and black text is legible on each."""

from __future__ import annotations

from raypar.schedules.action import RECVS, SENDS, Op

GREY = "#868e96"  # waiting, gathering, reducing; text on it is never drawn
INK = "currentColor"  # of text and frames: dark on a light page, light on a dark one

# The colour of a rank's first chunk and of its last one, which is lighter. Found by a search for the largest least
# distance in CIELAB, as tests/schedules/drawing/test_palette.py measures it.
_FIRST_AND_LAST = {
    Op.F: ((0x30, 0x7E, 0xF2), (0x6D, 0x98, 0xFE)),
    Op.B: ((0xAA, 0xDA, 0x97), (0xCB, 0xF5, 0xBA)),
    Op.I: ((0xDD, 0xAF, 0xE5), (0xF6, 0xCD, 0xFC)),
    Op.W: ((0xE1, 0x8A, 0x00), (0xF9, 0xA8, 0x45)),
}
_SEND, _RECV, _STEP = "#1d6215", "#826585", "#7800ff"
#: The nearest of the 256 colours of a terminal, as a background of black text.
TERMINAL = {op: f"\x1b[38;5;16;48;5;{number}m" for op, number in {Op.F: 69, Op.B: 150, Op.I: 183, Op.W: 172}.items()}


def color(op: Op, later: float = 0.0) -> str:
    """Return the colour of an op as CSS.

    Args:
        op: The op.
        later: 0 for the first chunk of a rank, 1 for its last one, which is lighter.
    """
    if op in _FIRST_AND_LAST:
        first, last = _FIRST_AND_LAST[op]
        mixed = (round(one + later * (other - one)) for one, other in zip(first, last, strict=True))
        return "#" + "".join(f"{part:02x}" for part in mixed)
    return _SEND if op in SENDS else _RECV if op in RECVS else _STEP if op is Op.STEP else GREY
