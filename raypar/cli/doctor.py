"""``raypar doctor``: what is wrong with the nodes, the network and the Ray that a run would use."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypar.cli.words.arguments import Arguments, parse_command
from raypar.doctor.examination import examined
from raypar.doctor.finding import as_dicts, is_sound


@dataclass(frozen=True)
class DoctorArgs(Arguments):
    """The flags of ``raypar doctor``."""

    json: bool = False
    """one list of JSON instead of lines"""
    sweep: bool = False
    """end processes that raypar's own Rays left on this machine, yours only, and remove their folders"""
    times: bool = True
    """measure an all_reduce of 4 KiB, 4 MiB and 64 MiB in every node and between nodes"""


def run_doctor(words: Sequence[str], say: Callable[[str], object]) -> bool:
    """Run ``raypar doctor``.

    Args:
        words: The words after ``doctor``.
        say: Prints a line.

    Returns:
        Whether nothing is wrong or dangerous.

    Raises:
        ConfigError: The words have mistakes.
    """
    what = "Examine this machine and the cluster at RAY_ADDRESS, and say what is wrong, with advice."
    args = parse_command(DoctorArgs(), words, "doctor", what)
    found, doing = [], logging.getLogger("raypar").debug if args.json else logging.getLogger("raypar").info
    for finding in examined(sweeps=args.sweep, times=args.times, doing=lambda what: doing("%s ...", what)):
        found.append(finding)
        if not args.json:
            say(str(finding))
    if args.json:
        say(json.dumps(as_dicts(found), indent=1))
    else:
        sick = sum(not is_sound([one]) for one in found)
        slow = sum(one.level == "slow" for one in found)
        say(f"{len(found)} findings: {sick} wrong or dangerous, {slow} slow")
    return is_sound(found)
