"""What experts are for: moe-small beside the dense model of equal active parameters, and what keeps their load even.

    python -m tests.long.experts_learn [--steps N] [variant] ...

Trains variants of moe-small on the same batches. Prints for each one the loss of the evaluation, and the largest load
of an expert over the mean of its layer, in the layer where it is largest, in the last steps together. With all
variants it fails unless experts end below the dense model, and loads are even with the auxiliary loss or the bias only.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import raypar as rp
from raypar.planner.sizes.parameters import active_parameters, num_parameters

LAST = 10  # steps whose loads are added up
EVEN = 1.5  # of the largest load over the mean


def variants():
    small = rp.recipe("moe-small").model
    return {
        "dense": rp.GPT(layers=8, hidden=256, heads=8, seq=256, mlp=8),
        "loss": small,
        "bias": replace(small, moe=rp.MoE(experts=8, top_k=2, gate="sigmoid", bias_rate=0.01, loss="none")),
        "neither": replace(small, moe=rp.MoE(experts=8, top_k=2, normalise=True, loss="none")),
    }


def trained(model, steps):
    """Train a model; return the loss of its evaluation, and its most uneven load."""
    run = rp.recipe("moe-small", model=model, steps=steps, eval_every=0)
    counts: Counter[tuple[str, int]] = Counter()
    with rp.launch(run) as job:
        for report in job.train()[-LAST:]:
            for layer in report.loads.layers if report.loads is not None else ():
                counts.update({(layer.layer, expert): asked for expert, asked in enumerate(layer.asked)})
        loss = job.evaluate().loss
    loads = {name: [n for (layer, _), n in counts.items() if layer == name] for name, _ in counts}
    return loss, max((max(each) * len(each) / sum(each) for each in loads.values()), default=1.0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("variants", nargs="*", help=f"of {[*variants()]}; none: all")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    found = {}
    for name in given.variants or variants():
        model = variants()[name]
        found[name] = loss, load = trained(model, given.steps)
        sizes = f"{num_parameters(model):,} parameters, {active_parameters(model):,} of them active"
        print(f"{name}: loss {loss:.4f}, largest load {load:.2f} of the mean; {sizes}", flush=True)
    if len(found) == len(variants()):
        assert found["loss"][0] < found["dense"][0], "experts end above the dense model"
        assert max(found["loss"][1], found["bias"][1]) < EVEN < found["neither"][1]


if __name__ == "__main__":
    main()
