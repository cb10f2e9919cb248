"""A short model card, the README.md of a folder of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.run import Run


def model_card(
    run: Run,
    model: GPT | Llama | None,
    kind: str,
    step: int,
    dtype: str,
    loss: float | None,
    origin: str | None,
    *,
    from_function: bool,
) -> str:
    """Return the card.

    Args:
        run: The run that trained the model.
        model: The model; None for one of the modules of transformers.
        kind: Its type at Hugging Face.
        step: Number of steps taken.
        dtype: Dtype of the weights.
        loss: The last loss of the run in nats per token; None if it is not known.
        origin: The folder whose weights the run began with; None if they were random.
        from_function: Whether the data were batches of a function; then those of ``run`` are not looked at.
    """
    if not step:
        data = "none, as no step was taken"
    elif from_function or isinstance(run.data, Batches):
        data = "batches of a function"
    else:
        data = run.data.path if isinstance(run.data.path, str) else ", ".join(run.data.path)
    each = run.microbatches * run.micro_batch_size * run.mesh.dp
    sizes, length = "its sizes are in config.json", ""
    if model is not None:
        sizes = f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads, vocabulary {model.vocab}"
        length = f" of up to {model.seq} tokens"
    rows = {
        "type": f"{kind}: {sizes}",
        "weights": dtype,
        "began with": f"the weights in {origin}" if origin else "random weights",
        **_learned(run),
        "data": data,
        "steps": f"{step} of {run.steps}, of {each} sequences{length}",
        "loss": "not known" if loss is None else f"{loss:.4f} nats per token in the last step",
        "layout": f"pp={run.mesh.pp} dp={run.mesh.dp} cp={run.mesh.cp} tp={run.mesh.tp} ep={run.mesh.ep}, "
        f"zero {run.zero or 0}, {run.precision.compute}",
        "seed": str(run.seed),
    }
    table = "\n".join(f"| {name} | {text} |" for name, text in rows.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# A model trained with raypar\n\n"
        f"| | |\n|---|---|\n{table}\n"
    )


def _learned(run: Run) -> Mapping[str, str]:
    """Return the row with the trained adapters; {} if all weights were trained."""
    if isinstance(run.model, Layers) or (lora := run.model.lora) is None:
        return {}
    adapters = f"low-rank adapters of {', '.join(lora.layers)}, rank {lora.rank}, alpha {lora.alpha:g}"
    return {"learned": f"{adapters}, which are added to the weights here"}
