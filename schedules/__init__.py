"""Pipeline schedules as data: generate, lower, check, simulate, draw. Standard library only.

from raypar.schedules import build, check, lower, text

schedule = lower(build("1f1b", ranks=4, microbatches=8))
check(schedule, max_in_flight=4)
print(text(schedule))
"""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.catalog import CATALOG, build, names, register
from raypar.schedules.check import check
from raypar.schedules.draw import text
from raypar.schedules.entry import Entry
from raypar.schedules.faults import CheckError, Fault
from raypar.schedules.lower import lower
from raypar.schedules.measure import costs_of
from raypar.schedules.overlay import Overlay
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.shrink import demand_sound
from raypar.schedules.simulate import Costs, simulate
from raypar.schedules.svg import svg
from raypar.schedules.table import from_csv, to_csv
from raypar.schedules.timeline import Event, Timeline
from raypar.schedules.trace import chrome_trace

__all__ = [
    "CATALOG",
    "Action",
    "CheckError",
    "Costs",
    "Entry",
    "Event",
    "Fault",
    "Op",
    "Overlay",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "build",
    "check",
    "chrome_trace",
    "costs_of",
    "demand_sound",
    "from_csv",
    "lower",
    "names",
    "register",
    "simulate",
    "svg",
    "text",
    "to_csv",
]
