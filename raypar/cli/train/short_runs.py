"""The commands that take a few steps: ``raypar verify`` and ``raypar step``. Their flags are the fields of Run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import raypar
from raypar.actors.specs.run import Run
from raypar.cli.train.mesh_origins import mesh_origins, too_many_actors
from raypar.cli.words.parsing import Parsed, parse
from raypar.cli.words.run_args import RunArgs
from raypar.config.fields import field_faults, right_fields
from raypar.config.run import unrecorded
from raypar.job.start.launchable import check_launch
from raypar.planner.resource_needs import actors_text

_VERIFIED_STEPS = 5


def run_verify(words: Sequence[str]) -> raypar.Verdict:
    """Run ``raypar verify``: compare a run on actors with the same run in one plain process.

    The run may be that of a run folder, which is only read. Raises what ``train`` raises.
    """
    what = "Train a few steps on actors and in one plain process, and compare all losses, gradients and weights."
    parsed = parse(RunArgs, words, "verify", what, "gpt-tiny", {"steps": _VERIFIED_STEPS})
    run = unrecorded(parsed.args.run())
    _check(run, parsed, words)
    figures = run.steps, actors_text(run), run.schedule, run.microbatches
    logging.getLogger("raypar").info("%d steps in this process, then on actors: %s; %s of %d microbatches", *figures)
    return raypar.verify(run)


def step(words: Sequence[str]) -> None:
    """Run ``raypar step``: a REPL for the run's first step. Raises what ``train`` raises."""
    what = "Step through a schedule by hand, on actors, in a Python REPL."
    parsed = parse(RunArgs, words, "step", what, "gpt-tiny")
    run = parsed.args.run()
    _check(run, parsed, words)
    from raypar.cli.repl import interact
    from raypar.job.launch import launch

    with launch(run) as job:
        interact(job)


def _check(run: Run, parsed: Parsed[RunArgs], words: Sequence[str]) -> None:
    """Raise ConfigError if a run has faults, with those of the words, or if this machine has no room for its actors."""
    right = right_fields([*parsed.wrong, *field_faults(run)])
    sized = right("mesh", "data_parallel", "servers", "zero")
    others = too_many_actors(run, mesh_origins(parsed.args, words)) if sized else ()
    check_launch(run, wrong=parsed.wrong, others=[*others])
