"""raypar: train PyTorch models in parallel with Ray actors.

``import raypar`` starts nothing and imports neither torch nor ray. Each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypar.actors.errors import CheckpointError, NonFiniteError
    from raypar.actors.expert_parallel.auxiliary_loss import AuxiliaryLoss
    from raypar.actors.expert_parallel.experts import run_experts
    from raypar.actors.expert_parallel.router_load import RouterLoad
    from raypar.actors.layers import masks
    from raypar.actors.layers.chunked_attention import chunked_attention
    from raypar.actors.layers.flex_attention import flex_attention
    from raypar.actors.layers.linear_attention import LinearAttention
    from raypar.actors.layers.relative_attention import RelativeAttention
    from raypar.actors.layers.time_mixing import TimeMixing
    from raypar.actors.mesh.mesh import Mesh
    from raypar.actors.specs.data import Batches, Examples, Text
    from raypar.actors.specs.lora import Lora
    from raypar.actors.specs.model import GPT, Layers, Llama
    from raypar.actors.specs.moe import MoE
    from raypar.actors.specs.optim import SGD, AdamW, Muon
    from raypar.actors.specs.precision import LossScale, Precision
    from raypar.actors.specs.resources import Resources
    from raypar.actors.specs.rope_scaling import RopeScaling
    from raypar.actors.specs.run import Run
    from raypar.cli.repl import tab_completion
    from raypar.config.automatic import Planned, plan
    from raypar.config.depth import depth
    from raypar.config.expert_layout_names import layout
    from raypar.config.hugging_face import HF
    from raypar.config.recipes import recipe
    from raypar.errors import (
        ActorDiedError,
        CallError,
        ConfigError,
        JobError,
        RelayoutLostError,
        StalledError,
        StepLostError,
    )
    from raypar.job.job import Job
    from raypar.job.launch import launch
    from raypar.job.lm_eval import lm_eval_model
    from raypar.job.microbatch import fit_microbatch
    from raypar.job.recover.relayout import Relayout
    from raypar.job.start.before_launch import faults
    from raypar.job.text.growing_text import Continuation
    from raypar.job.text.scoring import Scored
    from raypar.parity.verify import Verdict, verify
    from raypar.planner import formulas
    from raypar.recovery import chaos
    from raypar.recovery.failures import Failure
    from raypar.reporting.evaluation import Evaluation
    from raypar.reporting.expert_table import expert_table
    from raypar.reporting.report import Report
    from raypar.schedules.catalog import register as register_schedule
    from raypar.stepping.replay import Replayed, replay
    from raypar.stepping.stepper import Stepper

_HOMES = {
    "raypar.actors.errors": ("CheckpointError", "NonFiniteError"),
    "raypar.actors.expert_parallel.auxiliary_loss": ("AuxiliaryLoss",),
    "raypar.actors.expert_parallel.experts": ("run_experts",),
    "raypar.actors.expert_parallel.router_load": ("RouterLoad",),
    "raypar.actors.layers": ("masks",),
    "raypar.actors.layers.chunked_attention": ("chunked_attention",),
    "raypar.actors.layers.flex_attention": ("flex_attention",),
    "raypar.actors.layers.linear_attention": ("LinearAttention",),
    "raypar.actors.layers.relative_attention": ("RelativeAttention",),
    "raypar.actors.layers.time_mixing": ("TimeMixing",),
    "raypar.actors.mesh.mesh": ("Mesh",),
    "raypar.actors.specs.data": ("Batches", "Examples", "Text"),
    "raypar.actors.specs.model": ("GPT", "Layers", "Llama"),
    "raypar.actors.specs.lora": ("Lora",),
    "raypar.actors.specs.moe": ("MoE",),
    "raypar.actors.specs.optim": ("SGD", "AdamW", "Muon"),
    "raypar.actors.specs.precision": ("LossScale", "Precision"),
    "raypar.actors.specs.resources": ("Resources",),
    "raypar.actors.specs.rope_scaling": ("RopeScaling",),
    "raypar.actors.specs.run": ("Run",),
    "raypar.cli.repl": ("tab_completion",),
    "raypar.config.depth": ("depth",),
    "raypar.config.automatic": ("Planned", "plan"),
    "raypar.config.hugging_face": ("HF",),
    "raypar.config.expert_layout_names": ("layout",),
    "raypar.config.recipes": ("recipe",),
    "raypar.errors": (
        "ActorDiedError",
        "CallError",
        "ConfigError",
        "JobError",
        "RelayoutLostError",
        "StalledError",
        "StepLostError",
    ),
    "raypar.job.start.before_launch": ("faults",),
    "raypar.job.text.growing_text": ("Continuation",),
    "raypar.job.lm_eval": ("lm_eval_model",),
    "raypar.job.microbatch": ("fit_microbatch",),
    "raypar.job.text.scoring": ("Scored",),
    "raypar.job.job": ("Job",),
    "raypar.job.launch": ("launch",),
    "raypar.job.recover.relayout": ("Relayout",),
    "raypar.parity.verify": ("Verdict", "verify"),
    "raypar.planner": ("formulas",),
    "raypar.recovery": ("chaos",),
    "raypar.recovery.failures": ("Failure",),
    "raypar.reporting.evaluation": ("Evaluation",),
    "raypar.reporting.expert_table": ("expert_table",),
    "raypar.reporting.report": ("Report",),
    "raypar.schedules.catalog": ("register as register_schedule",),
    "raypar.stepping.replay": ("Replayed", "replay"),
    "raypar.stepping.stepper": ("Stepper",),
}
_HOME_OF = {words.split()[-1]: (module, words.split()[0]) for module, names in _HOMES.items() for words in names}

__all__ = [
    "GPT",
    "HF",
    "SGD",
    "ActorDiedError",
    "AdamW",
    "AuxiliaryLoss",
    "Batches",
    "CallError",
    "CheckpointError",
    "ConfigError",
    "Continuation",
    "Evaluation",
    "Examples",
    "Failure",
    "Job",
    "JobError",
    "Layers",
    "LinearAttention",
    "Llama",
    "Lora",
    "LossScale",
    "Mesh",
    "MoE",
    "Muon",
    "NonFiniteError",
    "Planned",
    "Precision",
    "RelativeAttention",
    "Relayout",
    "RelayoutLostError",
    "Replayed",
    "Report",
    "Resources",
    "RopeScaling",
    "RouterLoad",
    "Run",
    "Scored",
    "StalledError",
    "StepLostError",
    "Stepper",
    "Text",
    "TimeMixing",
    "Verdict",
    "chaos",
    "chunked_attention",
    "depth",
    "expert_table",
    "faults",
    "fit_microbatch",
    "flex_attention",
    "formulas",
    "launch",
    "layout",
    "lm_eval_model",
    "masks",
    "plan",
    "recipe",
    "register_schedule",
    "replay",
    "run_experts",
    "tab_completion",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'raypar' has no attribute {name!r}{_meant(name)}")
    module, there = _HOME_OF[name]
    return getattr(importlib.import_module(module), there)


def _meant(name: str) -> str:
    """Name the nearest public name, if one is near."""
    from raypar.schedules.nearest_name import nearest  # only after a mistake

    meant = None if name.startswith("_") else nearest(name, __all__)
    return "" if meant is None else f": it has {meant!r}"


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
