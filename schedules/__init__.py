"""Pipeline schedules as data: generate, lower, check, simulate, draw. Standard library only.

from raypar.schedules import build, check, lower, text

schedule = lower(build("1f1b", ranks=4, microbatches=8))
check(schedule, max_in_flight=4)
print(text(schedule))
"""

from raypar.schedules.action import Action as Action
from raypar.schedules.action import Op as Op
from raypar.schedules.catalog import CATALOG as CATALOG
from raypar.schedules.catalog import build as build
from raypar.schedules.catalog import names as names
from raypar.schedules.catalog import register as register
from raypar.schedules.checking.check import check as check
from raypar.schedules.checking.counterexample import demand_sound as demand_sound
from raypar.schedules.checking.errors import CheckError as CheckError
from raypar.schedules.checking.errors import Fault as Fault
from raypar.schedules.drawing.chrome_trace import chrome_trace as chrome_trace
from raypar.schedules.drawing.files import save_drawing
from raypar.schedules.drawing.overlay import Overlay as Overlay
from raypar.schedules.drawing.svg import svg as svg
from raypar.schedules.drawing.text import text as text
from raypar.schedules.generators.automatic import automatic as automatic
from raypar.schedules.generators.entry import Entry as Entry
from raypar.schedules.passes.gather_weights import gather_weights as gather_weights
from raypar.schedules.passes.lower import lower as lower
from raypar.schedules.passes.reduce_gradients import reduce_gradients as reduce_gradients
from raypar.schedules.passes.split_backward import split_backward as split_backward
from raypar.schedules.reading.torch_csv import from_csv as from_csv
from raypar.schedules.reading.torch_csv import to_csv as to_csv
from raypar.schedules.schedule import Drawer, register_drawer
from raypar.schedules.schedule import Schedule as Schedule
from raypar.schedules.schedule import ScheduleError as ScheduleError
from raypar.schedules.simulation.measured_costs import costs_of as costs_of
from raypar.schedules.simulation.simulate import Costs as Costs
from raypar.schedules.simulation.simulate import simulate as simulate
from raypar.schedules.timeline import Event as Event
from raypar.schedules.timeline import Timeline as Timeline

register_drawer(Drawer(text, svg, save_drawing))
