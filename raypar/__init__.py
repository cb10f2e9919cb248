"""raypar: train PyTorch models in parallel with Ray actors.

Importing it starts nothing and imports neither torch nor ray; names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypar.actors.disk import CheckpointError
    from raypar.actors.mesh import Mesh
    from raypar.actors.plan import NonFiniteError
    from raypar.actors.specs import GPT, SGD, AdamW, Batches, Layers, Llama, Text
    from raypar.config import ConfigError, Run
    from raypar.driver import Job
    from raypar.errors import ActorDiedError, JobError, StalledError
    from raypar.parity import Verdict, verify
    from raypar.recipes import recipe
    from raypar.report import Evaluation, Report
    from raypar.schedules.catalog import register as register_schedule
    from raypar.start import launch
    from raypar.stepping.repl import tab_completion
    from raypar.stepping.replay import Replayed, replay
    from raypar.stepping.stepper import Stepper

_HOMES = {
    "raypar.actors.disk": ("CheckpointError",),
    "raypar.actors.mesh": ("Mesh",),
    "raypar.actors.plan": ("NonFiniteError",),
    "raypar.actors.specs": ("GPT", "SGD", "AdamW", "Batches", "Layers", "Llama", "Text"),
    "raypar.config": ("ConfigError", "Run"),
    "raypar.driver": ("Job",),
    "raypar.errors": ("ActorDiedError", "JobError", "StalledError"),
    "raypar.recipes": ("recipe",),
    "raypar.report": ("Evaluation", "Report"),
    "raypar.schedules.catalog": ("register as register_schedule",),
    "raypar.start": ("launch",),
    "raypar.stepping.repl": ("tab_completion",),
    "raypar.stepping.replay": ("Replayed", "replay"),
    "raypar.stepping.stepper": ("Stepper",),
    "raypar.parity": ("Verdict", "verify"),
}
_HOME_OF = {words.split()[-1]: (module, words.split()[0]) for module, names in _HOMES.items() for words in names}

__all__ = [
    "GPT",
    "SGD",
    "ActorDiedError",
    "AdamW",
    "Batches",
    "CheckpointError",
    "ConfigError",
    "Evaluation",
    "Job",
    "JobError",
    "Layers",
    "Llama",
    "Mesh",
    "NonFiniteError",
    "Replayed",
    "Report",
    "Run",
    "StalledError",
    "Stepper",
    "Text",
    "Verdict",
    "launch",
    "recipe",
    "register_schedule",
    "replay",
    "tab_completion",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'raypar' has no attribute {name!r}")
    module, there = _HOME_OF[name]
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
