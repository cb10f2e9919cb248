"""Any layout of a small model with experts on several actors, for Hypothesis, and routers that choose badly."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import strategies as st

import raypar as rp
from raypar.actors.expert_parallel import shadowing
from raypar.actors.expert_parallel.router import Router
from raypar.actors.mesh.mesh import Mesh
from tests.support.layouts import CONTEXTS, MOST_ACTORS, OPTIMIZERS, VOCAB, gated, recomputes, shardings, sound

TILTS = ("even", "one expert", "two experts")


@cache
def batches(sequences, seq):
    """Batches of so many sequences of so many tokens; some labels of longer ones are left out."""

    def tokens(step, microbatch, dp):
        generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
        ids = torch.randint(VOCAB, (sequences, seq + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, : microbatch % 3 if seq > 3 else 0] = -100
        return ids[:, :-1], labels

    return rp.Batches(tokens)


def expert_meshes():
    """Meshes with experts in parts, the smallest first."""
    others = {"etp": (None, 1, 2), "tp": (1, 2), "cp": (1, 2), "pp": (1, 2), "dp": (1, 2, 4)}
    found = []
    for parts in ({"ep": (2, 4)}, {"expert_actors": (1, 2, 4)}):
        axes = others | parts
        every = [Mesh(**dict(zip(axes, sizes, strict=True))) for sizes in product(*axes.values())]
        sound = [mesh for mesh in every if mesh.actors <= MOST_ACTORS and not list(mesh.faults(lambda *_: True))]
        found.append(st.sampled_from(sorted(sound, key=lambda mesh: mesh.actors)))
    return st.one_of(found)


def exchanges():
    """Ways of the tokens: all at once, or some experts travel instead, or in rounds."""
    shadows = st.fixed_dictionaries({"expert_shadows": st.sampled_from([0, 2])})
    return st.one_of(shadows, st.fixed_dictionaries({"expert_rounds": st.sampled_from([2, 3])}))


@st.composite
def expert_layouts(draw):
    """A run with experts in parts that the config allows, and how its routers are tilted."""
    mesh, seq = draw(expert_meshes()), draw(st.sampled_from([8, 2, 1]))
    layers = draw(st.integers(2, 4))
    common = {
        "layers": layers,
        "hidden": 16,
        "heads": draw(st.sampled_from([2, 4])),
        "seq": seq,
        "vocab": VOCAB,
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "tied": draw(st.booleans()),
        "moe": draw(gated()),
    }
    llama = draw(st.booleans())
    run = rp.Run(
        model=rp.Llama(**common, ffn=24) if llama else rp.GPT(**common),
        mesh=mesh,
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        backward=draw(st.sampled_from(["auto", "split"])),
        microbatches=draw(st.sampled_from([1, 2, 3])),
        data=batches(draw(st.sampled_from([1, 2])), seq),
        bucket_mb=draw(st.sampled_from([4.0, 0.005])),
        **(draw(shardings()) if mesh.dp * mesh.cp > 1 else {}),
        context=draw(st.sampled_from(CONTEXTS)) if mesh.cp > 1 else CONTEXTS[0],
        sequence_parallel=draw(st.booleans()) if mesh.tp == 2 else False,
        optim=draw(st.sampled_from(OPTIMIZERS[:2])),  # of an expert with few tokens Muon blows rounding up
        clip=draw(st.sampled_from([None, 0.5])),
        recompute=draw(recomputes(layers)),
        **draw(exchanges()),
        steps=2,
        timeout=20.0,
    )
    return sound(run), draw(st.sampled_from(TILTS))


@contextmanager
def tilted(tilt):
    """Let routers favour one expert or two so much that no token chooses another one first."""
    choose, favoured = Router._choose, TILTS.index(tilt)

    def chosen(router, logits_TE, chance_T):
        return choose(router, logits_TE + 5.0 * (torch.arange(logits_TE.shape[1]) < favoured), chance_T)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_choose", chosen)
        patch.setattr(shadowing, "FLOPS", 1e6)  # so slow that shadows often compute
        yield
