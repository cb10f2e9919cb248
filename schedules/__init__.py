"""Pipeline schedules as data: generate, lower, check, simulate, draw. Standard library only.

from raypar.schedules import build, check, lower, text

schedule = lower(build("1f1b", ranks=4, microbatches=8))
check(schedule, max_in_flight=4)
print(text(schedule))
"""

from __future__ import annotations

from raypar.schedules.action import Action, Op
from raypar.schedules.catalog import CATALOG, build, names, register
from raypar.schedules.checking.check import check
from raypar.schedules.checking.counterexample import demand_sound
from raypar.schedules.checking.errors import CheckError, Fault
from raypar.schedules.drawing.chrome_trace import chrome_trace
from raypar.schedules.drawing.files import save_drawing
from raypar.schedules.drawing.overlay import Overlay
from raypar.schedules.drawing.svg import svg
from raypar.schedules.drawing.text import text
from raypar.schedules.generators.automatic import automatic
from raypar.schedules.generators.entry import Entry
from raypar.schedules.passes.gather_weights import gather_weights
from raypar.schedules.passes.lower import lower
from raypar.schedules.passes.reduce_gradients import reduce_gradients
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.reading.torch_csv import from_csv, to_csv
from raypar.schedules.schedule import Drawer, Schedule, ScheduleError, register_drawer
from raypar.schedules.simulation.measured_costs import costs_of
from raypar.schedules.simulation.simulate import Costs, simulate
from raypar.schedules.timeline import Event, Timeline

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
    "automatic",
    "build",
    "check",
    "chrome_trace",
    "costs_of",
    "demand_sound",
    "from_csv",
    "gather_weights",
    "lower",
    "names",
    "reduce_gradients",
    "register",
    "simulate",
    "split_backward",
    "svg",
    "text",
    "to_csv",
]

register_drawer(Drawer(text, svg, save_drawing))
