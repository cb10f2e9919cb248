"""The flags of the commands that take a run: the fields of Run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated

import tyro

from raypar.actors.specs.data import Examples, Text
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.optim import AdamW, AnyOptimizer
from raypar.actors.specs.run import Run


@dataclass(frozen=True)
class RunArgs(Run):
    """A Run restricted to what a command line can express, without functions, plus the run to start from."""

    model: GPT | Llama = field(default_factory=GPT)
    schedule: str = "1f1b"
    """1f1b, interleaved, zb-v, or another of raypar gallery; a CSV file, or code of yours as my.py:function"""
    data: Text | Examples = field(default_factory=Text)
    optim: AnyOptimizer = field(default_factory=AdamW)
    base: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|FILE.toml")] = ""
    """the run that the flags change: gpt-tiny, gpt-small, gpt-124m, llama-tiny, llama-small, moe-tiny, moe-small, or a
    TOML file"""

    layout: str = ""
    """a layout of experts by name, which other flags change: ep2_dp2, ep2_tp2_dp2, ep2_dp2_zero3, ep4, dp2_experts2
    and others of such words"""

    depth: int = 0
    """number of layers from which sizes, tokens, batch and learning rates follow, which other flags change; of the
    recipe or file only the data are kept then; 0: all is that of the recipe or file"""

    verbose: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(aliases=("-v",))] = False
    """show on a terminal all that is logged before the first step, as files have it, and not the shortest form"""

    def run(self) -> Run:
        """Return the Run alone."""
        return Run(**{field.name: getattr(self, field.name) for field in fields(Run)})
