"""The colours: kinds differ for each kind of colour blindness, chunks in lightness, and text is legible on them."""

import re
from itertools import combinations, product

import pytest

from raypar.schedules.action import Op
from raypar.schedules.drawing.palette import TERMINAL, color

# Machado, Oliveira and Fernandes 2009, severity 1, for linear RGB.
SEEN = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)
OPS = (Op.F, Op.B, Op.I, Op.W)
INKS = ("#343a40", "#dee2e6")  # of text, on a light page and on a dark one


def times(matrix, vector):
    return [sum(one * other for one, other in zip(row, vector, strict=True)) for row in matrix]


def linear(css):
    parts = [int(part, 16) / 255 for part in re.findall("[0-9a-f]{2}", css)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(css, seen="all colours"):
    light = [min(1.0, max(0.0, part)) for part in times(SEEN[seen], linear(css))]
    shares = [part / white for part, white in zip(times(XYZ, light), WHITE, strict=True)]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one, other, seen):
    return sum((a - b) ** 2 for a, b in zip(lab(one, seen), lab(other, seen), strict=True)) ** 0.5


def contrast(one, other):
    dark, light = sorted(times(XYZ, linear(css))[1] + 0.05 for css in (one, other))
    return light / dark


@pytest.mark.parametrize("seen", SEEN)
def test_kinds_differ_for_all_kinds_of_colour_blindness(seen):
    shades = {op: [color(op, later) for later in (0, 0.5, 1)] for op in OPS}
    shades |= {op: [color(op)] for op in (Op.SEND_F, Op.RECV_F, Op.STEP)}
    for one, other in combinations(shades, 2):
        nearest = min(distance(*pair, seen) for pair in product(shades[one], shades[other]))
        assert nearest >= 18, (one, other)


@pytest.mark.parametrize("op", OPS)
def test_chunks_differ_in_lightness_and_numbers_are_legible_on_all(op):
    shades = [color(op, later) for later in (0, 0.5, 1)]
    lightness = [lab(shade)[0] for shade in shades]
    assert lightness == sorted(lightness) and lightness[-1] - lightness[0] >= 8
    assert all(contrast(shade, "#000000") >= 4.5 for shade in shades)
    number = int(re.search(r"48;5;(\d+)", TERMINAL[op])[1]) - 16
    red, green, blue = (0 if one == 0 else 55 + 40 * one for one in (number // 36, number // 6 % 6, number % 6))
    assert contrast(f"#{red:02x}{green:02x}{blue:02x}", "#000000") >= 4.5, "of the 256 colours of a terminal"


def test_text_is_legible_on_the_page_and_on_boxes_that_are_pale():
    for ink, page in zip(INKS, ("#ffffff", "#16181d"), strict=True):
        assert contrast(ink, page) >= 4.5
        for op, later in product(OPS, (0, 1)):
            over = zip(re.findall("[0-9a-f]{2}", color(op, later)), re.findall("[0-9a-f]{2}", page), strict=True)
            pale = "#" + "".join(f"{round(0.3 * int(a, 16) + 0.7 * int(b, 16)):02x}" for a, b in over)
            assert contrast(ink, pale) >= 4.5, (op, page)
