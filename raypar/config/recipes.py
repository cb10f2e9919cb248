"""Recipes: named runs to start from, and ``depth``, a run whose sizes follow from its number of layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import AdamW, Muon
from raypar.actors.specs.run import Run
from raypar.config.arguments import checked_arguments
from raypar.config.expert_layout_names import layout as fields_of
from raypar.errors import ConfigError
from raypar.planner.sizes.parameters import num_parameters
from raypar.schedules.nearest_name import did_you_mean

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


def gpt_tiny() -> Run:
    """Return a run of seconds, for tests and first steps. It uses dropout and clipping, so that tests cover them."""
    return Run(
        model=GPT(layers=8, hidden=32, heads=4, seq=32, dropout=0.1),
        mesh=Mesh(pp=2),
        microbatches=4,
        micro_batch_size=2,
        optim=AdamW(lr=3e-3, warmup=2, decay="cosine"),
        steps=20,
        eval_steps=2,
    )


def gpt_small() -> Run:
    """Return a run of minutes on two CPU cores: 6.5 million parameters, on the bytes of Python's standard library."""
    return Run(
        model=GPT(layers=8, hidden=256, heads=8, seq=256),
        mesh=Mesh(pp=2),
        microbatches=8,
        micro_batch_size=2,
        optim=AdamW(lr=1e-3, warmup=10, decay="cosine"),
        steps=100,
        eval_every=50,
        eval_steps=4,
    )


def gpt_124m() -> Run:
    """Return a run of GPT-2 small's size (Radford et al. 2019, table 2): hours on CPUs."""
    return Run(
        model=GPT(layers=12, hidden=768, heads=12, seq=1024, vocab=50257, tied=True),
        mesh=Mesh(pp=4),
        microbatches=16,
        micro_batch_size=4,
        optim=AdamW(lr=6e-4, warmup=100, decay="cosine"),
        split="balanced",
        steps=2000,
        eval_every=200,
        eval_steps=4,
    )


def llama_tiny() -> Run:
    """Return gpt-tiny with a Llama instead, whose keys and values have half as many heads as the queries."""
    return replace(gpt_tiny(), model=Llama(layers=8, hidden=32, heads=4, kv_heads=2, seq=32, dropout=0.1))


def llama_small() -> Run:
    """Return gpt-small with a Llama of 5.9 million parameters instead."""
    return replace(gpt_small(), model=Llama(layers=8, hidden=256, heads=8, kv_heads=4, seq=256))


def moe_tiny() -> Run:
    """Return gpt-tiny with four experts instead of each MLP, two of them for a token."""
    model = GPT(layers=8, hidden=32, heads=4, seq=32, dropout=0.1, moe=MoE(experts=4, top_k=2, normalise=True))
    return replace(gpt_tiny(), model=model)


def moe_small() -> Run:
    """Return gpt-small with eight experts instead of each MLP, two of them for a token: 35.9 million parameters."""
    model = GPT(layers=8, hidden=256, heads=8, seq=256, moe=MoE(experts=8, top_k=2, normalise=True, alpha=0.02))
    return replace(gpt_small(), model=model)


RECIPES: dict[str, Callable[[], Run]] = {
    "gpt-tiny": gpt_tiny,
    "gpt-small": gpt_small,
    "gpt-124m": gpt_124m,
    "llama-tiny": llama_tiny,
    "llama-small": llama_small,
    "moe-tiny": moe_tiny,
    "moe-small": moe_small,
}
_MODELS = re.compile(
    r"(.*/)?(gpt-?2|(smollm|llama-?\d|bert|bloom|falcon|gemma|mistral|mixtral|opt-|phi-|pythia|qwen).*)"
)


def _in_a_folder(name: object) -> str:
    """Return how to use a model of Hugging Face, if this is the name of one; "" for other names."""
    is_model = isinstance(name, str) and _MODELS.fullmatch(name.lower())
    return "; for a model of Hugging Face give its folder: --model.hf FOLDER, or rp.HF(folder)" if is_model else ""


def _sized(name: object) -> str:
    """Return how to set the sizes of a model, if the name ends in a number of parameters; "" for other names."""
    is_size = isinstance(name, str) and re.search(r"\d[bm]$", name.lower())
    if not is_size:
        return ""
    if "llama" in str(name).lower():
        flags = "llama-small --model.layers 32 --model.hidden 4096 --model.heads 32 --model.kv-heads 8"
    else:
        flags = "gpt-small --model.layers 24 --model.hidden 2048 --model.heads 16"
    return f"sizes are flags of the model, as in {flags} --model.seq 2048 --model.vocab 50304; "


def recipe(name: str, layout: str | None = None, **changes: Any) -> Run:
    """Return the run of a recipe.

    Args:
        name: Name of the recipe: gpt-tiny, gpt-small, gpt-124m, llama-tiny, llama-small, moe-tiny or moe-small.
        layout: Name of a layout of experts, such as ep2_dp2: see ``raypar.layout``.
        **changes: Fields of the run to change.

    Raises:
        ConfigError: There is no such recipe, or no such layout, or a field is given that the layout sets.
    """
    if name not in [*RECIPES]:
        sized, known = _sized(name), f"known are {', '.join(RECIPES)}{_in_a_folder(name)}"
        fix = sized + known if sized else did_you_mean(str(name), RECIPES, known, spelled=repr, both=True)
        raise ConfigError([f"there is no recipe {name!r}: {fix}"])
    laid_out = {} if layout is None else fields_of(layout)
    both = (field for field in laid_out if field in changes)
    ConfigError.raise_if(f"layout {layout!r} sets {field}, which is given too: leave one of them out" for field in both)
    return replace(RECIPES[name](), **laid_out, **changes)


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
