"""The planner: what a run costs, computed before it starts."""

from raypar.planner import formulas as formulas
