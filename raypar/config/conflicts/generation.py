"""Check that the actors of a run can generate text, and that prompts fit its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.run import Run


def generation_faults(run: Run) -> Iterator[str]:
    """Yield why the actors of a run can't generate text, each with its fix."""
    model, mesh = run.model, run.mesh
    if isinstance(model, Layers):
        if not model.computes_again:
            text = "model is your own layers, which keep no keys and values"
            yield f"{text}: only GPT, Llama and what rp.HF(folder) gives generate"
    elif model.moe is not None and model.moe.capacity is not None:
        text = f"model.moe.capacity is {model.moe.capacity:g}: what experts drop depends on the tokens that come later"
        yield f"{text}; reset the job to a run with capacity None"
    if mesh.cp > 1:
        yield f"mesh.cp is {mesh.cp}, which divides sequences, and they grow here: reset the job to cp=1 and more dp"
    if mesh.grid is not None:
        yield f"mesh.tp is {mesh.tp!r}, whose grid divides the batch too: reset the job to tp={mesh.tensor_ranks}"
    if mesh.is_uneven:
        text = "the mesh has pipeline ranks with replicas or tensor ranks of their own number"
        yield f"{text}: reset the job to a mesh with one dp and one tp"
    if mesh.expert_actors:
        yield "mesh.expert_actors take part in steps of training only: reset the job to mesh.ep instead"


def prompt_faults(model: Transformer | Layers, prompts: Sequence[Sequence[int]], new_tokens: int) -> Iterator[str]:
    """Yield the faults of prompts: none given, ids outside the vocabulary, or too few positions for new tokens.

    Args:
        model: The model.
        prompts: The token ids of each prompt.
        new_tokens: How many tokens each is to get; 0 if they are scored, the last token of each by those before it.
    """
    most = _positions(model)
    if not prompts:
        yield "prompts is empty: give one or more"
    for number, tokens in enumerate(prompts):
        if not tokens:
            yield f"prompt {number} is empty: give it a token"
            continue
        wrong = [token for token in tokens if not 0 <= token < model.vocab]
        if wrong:
            yield f"prompt {number} has the token {wrong[0]}: the model's ids are 0 to {model.vocab - 1}"
        if not new_tokens and len(tokens) > most + 1:
            text = f"prompt {number} has {len(tokens):,} tokens, and the model has {most:,} positions"
            yield f"{text}: shorten it to {most + 1:,} at most, of which the last is only scored"
        if new_tokens and len(tokens) + new_tokens > most:
            left, text = most - len(tokens), f"prompt {number} has {len(tokens)} tokens, and"
            if left > 0:
                longer = f"with {new_tokens} more it is longer than the {most} positions of the model"
                yield f"{text} {longer}: set max_new_tokens to {left} at most"
            else:
                yield f"{text} the model has {most} positions: shorten it to {most - 1} at most"


def _positions(model: Transformer | Layers) -> int:
    """Return the most positions of cached keys: dynamic scaling would rotate those of longer sequences anew."""
    if isinstance(model, Layers):
        return model.seq or 0
    scaling = model.rope_scaling
    if scaling is None or scaling.kind != "dynamic" or scaling.trained is None:
        return model.seq
    return min(model.seq, scaling.trained)
