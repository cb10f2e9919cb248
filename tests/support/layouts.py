"""Any layout of a small model, for Hypothesis; and threads as actors whose dropout is drawn as that of processes.

A new axis, or a new spelling of one, is a line in ``meshes``: what does not go together, the config refuses.
"""

from __future__ import annotations

import tempfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import reject
from hypothesis import strategies as st

import raypar as rp
from raypar.actors.expert_parallel.router import TokenNoise
from raypar.actors.layers.attention import attention
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.types import Context
from raypar.config.run import check_run
from raypar.errors import ConfigError
from tests.support.thread_jobs import TeamJob

MOST_ACTORS = 8
IN_CHUNKS = "interleaved", "looped-bfs", "zb-interleaved", "zb-v", "v-half", "v-min", "dualpipe-v"
CONTEXTS = get_args(Context)
SEQ, VOCAB = 8, 11
TILED_HEAD = {"blocks.0.mlp.down": 2, "head.out": 11}, {"blocks.0.mlp.down": 2}  # not tied, and tied
OPTIMIZERS = (rp.AdamW(lr=1e-2, eps=1e-4), rp.SGD(lr=0.1, momentum=0.9), rp.Muon(lr=1e-2, adamw_eps=1e-4))


def tokens(step, microbatch, dp):
    """Two sequences; some labels are left out, in no two microbatches as many."""
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    ids = torch.randint(VOCAB, (2, SEQ + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, : microbatch % 3] = -100
    return ids[:, :-1], labels


def more_tokens(step, microbatch, dp):
    """Four sequences, for grids that divide a batch by so many."""
    parts = [tokens(step, microbatch, dp + 100 * half) for half in range(2)]
    return tuple(torch.cat(both) for both in zip(*parts, strict=True))


def meshes():
    """The smallest first: that is where Hypothesis looks for a small example."""
    tensor = 2, 1, 4, "2d:2x2", "2.5d:2x2x2", "3d:2x2x2"
    axes = {"tp": tensor, "cp": (1, 2, 4), "pp": (1, 2, 3, 4), "dp": (1, 2, 3, 4)}
    every = [Mesh(**dict(zip(axes, sizes, strict=True))) for sizes in product(*axes.values())]
    return st.sampled_from(sorted((mesh for mesh in every if mesh.size <= MOST_ACTORS), key=lambda mesh: mesh.size))


@st.composite
def gated(draw):
    """Experts with any gate."""
    gate = draw(st.sampled_from(["softmax", "shazeer", "gshard", "switch", "sigmoid"]))
    experts = draw(st.sampled_from([4, 8, (4, 8)]))
    grouped = gate == "sigmoid" and draw(st.booleans())
    return rp.MoE(
        experts=experts,
        gate=gate,
        top_k={"gshard": 2, "switch": 1}.get(gate) or draw(st.sampled_from([1, 2, 4])),
        normalise=None if gate == "shazeer" else draw(st.sampled_from([None, True, False])),
        noise=draw(st.sampled_from([0.0, 0.1])) if gate in ("softmax", "switch") else 0.0,
        bias_rate=draw(st.sampled_from([0.0, 0.05])) if gate in ("softmax", "sigmoid") else 0.0,
        groups=2 if grouped else 1,
        top_groups=2 if grouped else 1,
        capacity=draw(st.sampled_from([None, 1.0, 4.0])),
        loss=draw(st.sampled_from(["switch", "gshard"])),
        z_loss=draw(st.sampled_from([0.0, 0.001])),
        width=draw(st.sampled_from([None, 8])),
        shared=draw(st.sampled_from([0, 0, 1])),
        residual=draw(st.booleans()),
        every=draw(st.sampled_from([1, 1, 2])),
    )


def models(mesh, layers):
    heads = st.sampled_from([4, 2] if mesh.tensor_ranks <= 2 else [4])
    common = {
        "layers": st.just(layers),
        "hidden": st.just(16),
        "heads": heads,
        "seq": st.just(SEQ),
        "vocab": st.just(VOCAB),
        "dropout": st.sampled_from([0.0, 0.2]),
        "tied": st.booleans(),
        "positions": st.sampled_from(["learned", "sinusoidal", "hierarchical", "rope", "alibi"]),
        "attention": st.sampled_from(["blocks", "fused", "materialised"]),
        "moe": st.one_of(st.none(), st.none(), gated()),
    }
    llama = st.builds(rp.Llama, **common, ffn=st.just(24), kv_heads=st.sampled_from([1, 2]))
    return st.one_of(st.builds(rp.GPT, **common), llama)


def recomputes(layers):
    word = st.sampled_from(["none", "selective", "full"])
    return st.one_of(word, st.tuples(*[word] * layers))


def shardings():
    """What replicas share out, and when they send it."""
    reduces = st.sampled_from(["step", "microbatch"])
    gathers = st.fixed_dictionaries(
        {
            "zero": st.just(3),
            "zero_reduce": reduces,
            "zero_units": st.sampled_from([1, 2]),
            "reshard_after_forward": st.sampled_from([True, False, "except_last"]),
        }
    )
    resident = st.fixed_dictionaries(
        {"zero": st.just(3), "zero_gather": st.just("step"), "zero_resident": st.sampled_from([None, 1, 2])}
    )
    two = st.fixed_dictionaries({"zero": st.just(2), "zero_reduce": reduces})
    return st.one_of(st.fixed_dictionaries({"zero": st.sampled_from([None, 0])}), two, gathers, resident)


def offloads():
    """What is kept away from the device, and where."""
    away = {"offload": st.sampled_from(["optimizer", "parameters"])}
    folder = st.sampled_from([None, tempfile.gettempdir()])
    kept = st.fixed_dictionaries({})
    return st.one_of(kept, kept, st.fixed_dictionaries(away | {"offload_folder": folder}))


@st.composite
def layouts(draw):
    """A run that the config allows."""
    mesh = draw(meshes())
    if mesh.dp * mesh.cp == 4:
        mesh = replace(mesh, shard=draw(st.sampled_from([None, 2])))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "naive", "zb-h1", "zb-h2", "zb-1p", "zb-2p", *IN_CHUNKS]))
    in_chunks = schedule in IN_CHUNKS
    layers = draw(st.integers(max(2, mesh.pp * (1 + in_chunks)), 8 if in_chunks else 4))
    divided, grid = mesh.tensor_ranks > 1, isinstance(mesh.tp, str)
    model, optim = draw(models(mesh, layers)), draw(st.sampled_from(OPTIMIZERS))
    if model.moe and optim.kind == "muon":  # of an expert with few tokens it blows rounding up
        optim = OPTIMIZERS[0]
    data_parallel = draw(st.sampled_from(["all_reduce"] * 3 + ["parameter_server"] * (not divided)))
    served = data_parallel == "parameter_server"
    whole = divided or served or optim.kind == "muon"
    run = rp.Run(
        model=model,
        mesh=mesh,
        schedule=schedule,
        microbatches=draw(st.sampled_from([1, 2, 3])),
        data=rp.Batches(more_tokens if grid else tokens),
        data_parallel=data_parallel,
        **({} if served else draw(offloads())),
        bucket_mb=draw(st.sampled_from([4.0, 0.005])),
        **(draw(shardings()) if mesh.dp * mesh.cp > 1 else {}),
        context=draw(st.sampled_from(CONTEXTS)) if mesh.cp > 1 else CONTEXTS[0],
        sequence_parallel=draw(st.booleans()) if divided and not grid else False,
        optim=optim,
        clip=draw(st.sampled_from([None, 0.5])),
        recompute=draw(recomputes(layers)),
        backward=draw(st.sampled_from(["auto", "split"])),
        tile=1 if whole else draw(st.sampled_from([1, {"blocks.*.mlp.*": 4}, TILED_HEAD[model.tied]])),
        steps=2,
        timeout=60.0,  # a loaded machine is no fault
    )
    return sound(run)


def sound(run):
    """Return a drawn run, or draw another one if this one has faults."""
    try:
        check_run(run)
    except ConfigError:
        reject()
    return run


def verdict_of(run):
    """What verify says of a run whose actors are threads."""
    with own_dice():
        job = TeamJob(run)
        try:
            return rp.verify(run, job)
        finally:
            job.close()


@contextmanager
def own_dice():
    """Give every thread random numbers of its own, as every actor has: torch has one generator for a process.

    Attention's fused kernel can't be given one: with dropout it is replaced by the materialised one, here and in the
    plain process.
    """
    local = threading.local()

    def dice():
        if not hasattr(local, "generator"):
            local.generator = torch.Generator()
        return local.generator

    def dropout(x, p=0.5, training=True, inplace=False):
        if not training or not p:
            return x
        return x * torch.empty(x.shape, dtype=x.dtype).bernoulli_(1 - p, generator=dice()).div_(1 - p)

    def drawn_again(device):
        state = dice().get_state()
        return lambda: dice().set_state(state)

    def seed(number):
        dice().manual_seed(number)

    def normal(noise, like, width):
        return noise._own(torch.randn(noise._shape(like, width), generator=dice()))

    def uniform(noise, like, width, low=0.0, high=1.0):
        return noise._own(torch.rand(noise._shape(like, width), generator=dice()) * (high - low) + low)

    def init(core, kind, p, *others, **more):
        made(core, "materialised" if p else kind, p, *others, **more)

    made = attention.Core.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", dropout)
        patch.setattr(torch, "manual_seed", seed)
        patch.setattr(ComputeDevice, "seed", lambda self, number: seed(number))
        patch.setattr(attention, "drawn_again", drawn_again)
        patch.setattr(attention.Core, "__init__", init)
        patch.setattr(TokenNoise, "normal", normal)
        patch.setattr(TokenNoise, "uniform", uniform)
        yield
