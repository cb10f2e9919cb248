"""Recipes: named runs to start from, and ``depth``, a run whose sizes follow from its number of layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import Llama
from raypar.actors.specs.optim import Muon
from raypar.actors.specs.run import Run
from raypar.config.arguments import checked_arguments
from raypar.config.expert_layout_names import layout as fields_of
from raypar.config.recipe_tables import recipe_table
from raypar.config.toml import run_of
from raypar.errors import ConfigError
from raypar.planner.sizes.parameters import num_parameters

DEEPEST = 512
_WIDTH, _HEAD, _SEQ = 64, 128, 2048
_BATCH = 1 << 19  # tokens of a step of all replicas
_TOKENS = 20  # for each parameter
# learning rates at a width of _AT
_MATRICES = 0.02
_EMBEDDING = 0.2
_HEAD_RATE = 0.004
_AT = 768
_COOLING = 0.2  # share of the steps


def recipe(name: str, layout: str | None = None, **changes: Any) -> Run:
    """Return the run of a recipe.

    Args:
        name: Name of the recipe: gpt-tiny, gpt-small, gpt-124m, llama-tiny, llama-small, moe-tiny or moe-small.
        layout: Name of a layout of experts, such as ep2_dp2: see ``raypar.layout``.
        **changes: Fields of the run to change.

    Raises:
        ConfigError: There is no such recipe, or no such layout, or a field is given that the layout sets.
    """
    started = _begun(name) if isinstance(name, str) else run_of(recipe_table(name))
    laid_out = {} if layout is None else fields_of(layout)
    both = (field for field in laid_out if field in changes)
    ConfigError.raise_if(f"layout {layout!r} sets {field}, which is given too: leave one of them out" for field in both)
    return replace(started, **laid_out, **changes)


@cache
def _begun(name: str) -> Run:
    """Return the run of a recipe, without changes."""
    return run_of(recipe_table(name))


@checked_arguments
def depth(layers: int, *, dp: int = 1, vocab: int = 256) -> Run:
    """Return the run of a model with so many layers: all else follows.

    The model is a Llama with norms of queries and keys, 64 wide for each layer, rounded up to whole heads of 128, and
    sequences of 2,048. It learns from 20 tokens a parameter in steps of 2^19 tokens, by Muon with a rate of 0.02 for
    matrices, and AdamW with 0.2 for the embedding and 0.004 for the head times (width / 768)^-0.5, which go down to 0
    in the last fifth of the steps. nanochat's model differs: its MLP is 4 times as wide with squared ReLUs (the Llama's
    has as many weights), and norms have no weights.

    Args:
        layers: Number of layers, 1 to 512.
        dp: Replicas, which share the batch.
        vocab: Number of token ids; 256 for bytes.

    Raises:
        ConfigError: A number is out of range.

    Source: Karpathy 2025, nanochat, scripts/base_train.py and GPT.setup_optimizers; Hoffmann et al. 2022, "Training
    Compute-Optimal Large Language Models", table 3 (20 tokens a parameter).
    """
    samples = _BATCH // _SEQ
    faults = [] if 1 <= layers <= DEEPEST else [f"depth is {layers}: give 1 to {DEEPEST} layers"]
    if vocab < 1:
        faults.append(f"vocab is {vocab}: give 1 or more")
    if dp < 1 or samples % dp:
        faults.append(f"dp is {dp}: give a divisor of the {samples} sequences of a step, 1 to {samples}")
    ConfigError.raise_if(faults)
    hidden = -(-_WIDTH * layers // _HEAD) * _HEAD
    model = Llama(layers=layers, hidden=hidden, heads=hidden // _HEAD, seq=_SEQ, vocab=vocab, qk_norm=True)
    steps = max(1, round(_TOKENS * num_parameters(model) / _BATCH))
    slower = (hidden / _AT) ** -0.5
    optim = Muon(
        lr=_MATRICES,
        scale="original",
        weight_decay=0.0,
        adamw_lr=_HEAD_RATE * slower,
        rates={"embed.*": _EMBEDDING / _HEAD_RATE},
        adamw_betas=(0.8, 0.95),
        adamw_eps=1e-10,
        decay="wsd",
        final=0.0,
        decay_steps=max(1, round(_COOLING * steps)),
    )
    return Run(model=model, mesh=Mesh(dp=dp), microbatches=samples // dp, micro_batch_size=1, optim=optim, steps=steps)
