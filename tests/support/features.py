"""Features of runs, each with some values, and the runs that rows of such values are."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import raypar as rp
from raypar.actors.specs.worlds import world_of
from tests.support.covering import Covering, Row
from tests.support.examples import made_jsonl
from tests.support.oracle_runs import TieError, differences

MOST_ACTORS = 12
STEPS = 3
OF_EXPERTS = ("none", "softmax", "switch", "sigmoid")
SCALINGS = ("none", "linear", "dynamic", "yarn", "llama3")

# By field, its values, the first of which is the usual one. A word in capitals is in place of a value that depends on
# others. Fields of a part (model.moe.capacity) are given where the run has that part.
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "mesh.pp": (1, 2, 3),
    "mesh.dp": (1, 2),
    "mesh.cp": (1, 2),
    "mesh.tp": (1, 2, "2d:2x2"),
    "mesh.ep": (1, 2),
    "mesh.etp": (None, 1),
    "mesh.expert_actors": (0, 1),
    "mesh.shard": (None, 1, 2),
    "mesh.rank_dp": ((), (2, 1), (1, 2)),
    "mesh.rank_tp": ((), (2, 1)),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "pipedream-2bw"),
    "chunks": (None, 2),
    "flush_every": (None, 2),
    "delay_feedback": (False, True),
    "backward": ("auto", "whole", "split"),
    "microbatches": (2, 1, 3, 4),
    "activations_on_device": (None, 1, 2),
    "token_slices": (1, 2),
    "micro_batch_size": (2, 3, 4),
    "data_parallel": ("all_reduce", "parameter_server"),
    "servers": (1, 2),
    "bucket_mb": (4.0, 0.001),
    "zero": (None, 0, 1, 2, 3),
    "zero_units": (1, 2),
    "zero_reduce": (None, "step", "microbatch"),
    "zero_gather": ("microbatch", "step"),
    "zero_resident": (None, 1),
    "reshard_after_forward": (True, False, "except_last"),
    "tile": (1, 2, {"blocks.*.mlp.*": 2}),
    "offload": ("none", "optimizer", "parameters"),
    "offload_folder": (None, "FOLDER"),
    "expert_shadows": (0, 1),
    "expert_rounds": (1, 2),
    "expert_order": ("AS THEY ARE", "REVERSED"),
    "sequence_parallel": (False, True),
    "context": ("ring", "all_gather", "ulysses", "rsa"),
    "clip": (None, 0.3),
    "ema": (None, 0.7),
    "loss_scale.use": ("auto", "on"),
    "nonfinite": ("stop", "skip"),
    "recompute": ("none", "selective", "full", "BY LAYER"),
    "split": ("even", "balanced", "MOST FIRST"),
    "check_every": (None, 0, 1),
    "recheck_every": (0, 1),
    "overflow_every": (0, 1),
    "model.kind": ("gpt", "llama"),
    "model.layers": (2, 3, 6),
    "model.hidden": (16, 24),
    "model.heads": (4, 2),
    "model.seq": (8, 12, 9),
    "model.vocab": (32, 29, 259),
    "model.tied": (False, True),
    "model.positions": ("learned", "sinusoidal", "hierarchical", "rope", "alibi"),
    "model.rope_base": (10_000.0, 50.0),
    "model.rope_scaling": SCALINGS,
    "model.attention": ("blocks", "fused", "materialised"),
    "model.linear": ("auto", "onednn", "torch"),
    "model.head_width": (None, 6),
    "model.qkv_bias": (False, True),
    "model.window": (None, 3),
    "model.window_first": (0, 1),
    "model.window_skips": (None, 2),
    "model.norm_eps": (1e-5, 1e-2),
    "model.mlp": (4, 3),
    "model.gelu": ("exact", "tanh"),
    "model.kv_heads": (None, 1, 2),
    "model.ffn": (None, 12, 13),
    "model.qk_norm": (False, True),
    "model.gate": ("silu", "gelu", "gelu_tanh"),
    "model.post_norms": (False, True),
    "model.scaled_embedding": (False, True),
    "model.query_scale": (None, 7.0),
    "model.attention_cap": (None, 2.0),
    "model.logit_cap": (None, 3.0),
    "model.pad_id": (None, 0),
    "model.moe": OF_EXPERTS,
    "model.moe.experts": (4, "UNEVEN"),
    "model.moe.top_k": (2, 1),
    "model.moe.normalise": (None, True, False),
    "model.moe.bias_rate": (0.0, 0.05),
    "model.moe.groups": (1, 2),
    "model.moe.capacity": (None, 1.2),
    "model.moe.loss": ("switch", "gshard", "none"),
    "model.moe.alpha": (0.01, 0.3),
    "model.moe.z_loss": (0.0, 0.02),
    "model.moe.width": (None, 8),
    "model.moe.shared": (0, 1),
    "model.moe.residual": (False, True),
    "model.moe.every": (1, 2),
    "model.moe.first": (None, 0, 1),
    "model.lora": (None, 1, 3),
    "model.lora.alpha": (16.0, 5.0),
    "model.lora.targets": ("all", "attn", "mlp", ("q", "v")),
    "data": ("uneven", "even", "missing", "padded", "packed", "apart", "text"),
    "data.varying": (False, True),
    "optim.kind": ("sgd", "adamw", "muon"),
    "optim.lr": ("USUAL", "HALF"),
    "optim.weight_decay": (0.0, 0.1),
    "optim.warmup": (0, 2),
    "optim.decay": ("constant", "cosine", "linear", "wsd"),
    "optim.final": (0.1, 0.5),
    "optim.decay_steps": (None, 2),
    "optim.decay_form": ("linear", "sqrt"),
    "optim.no_decay": ((), ("blocks.0.*",)),
    "optim.rates": ({}, {"blocks.1.*": 0.5}),
    "optim.momentum": (0.9, 0.5),
    "optim.betas": ((0.9, 0.95), (0.8, 0.99)),
    "optim.eps": (1e-8, 1e-4),
    "optim.nesterov": (True, False),
    "optim.scale": ("match_rms_adamw", "original"),
    "optim.iterations": (5, 3),
    "optim.adamw": (("embed.*", "head.*"), ("embed.*", "head.*", "blocks.0.attn.*")),
    "optim.adamw_lr": (None, 3e-3),
    "optim.adamw_eps": (1e-8, 1e-4),
}
MODELS, OPTIMIZERS = {"gpt": rp.GPT, "llama": rp.Llama}, {"sgd": rp.SGD, "adamw": rp.AdamW, "muon": rp.Muon}
_FIELDS = {kind: {field.name for field in fields(one)} for kind, one in (MODELS | OPTIMIZERS).items()}
UNEQUAL = "in an asynchronous schedule all microbatches have as many; use a synchronous one, as 1f1b"
TOO_MANY = "this is too much for a test:"
SCALING: Mapping[str, Mapping[str, float]] = {"yarn": {"fast": 2.0, "slow": 0.1}, "llama3": {"low": 0.2, "high": 0.6}}
RATES = {"sgd": 0.2, "adamw": 1e-2, "muon": 1e-2}


@dataclass(frozen=True)
class Drawn:
    """Batches of random tokens, of which other numbers count in each microbatch and replica.

    Attributes:
        kind: even: all targets count; uneven; missing: some microbatches have no targets; padded: sequences end with
            padding of token 0.
        sequences, length, vocab: Sequences of a microbatch, tokens of a sequence, token ids.
        varying: Whether sequences become shorter by two in every second microbatch.
    """

    kind: str
    sequences: int
    length: int
    vocab: int
    varying: bool

    def __call__(self, step: int, microbatch: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dp)
        length = self.length - (4 if self.varying and (step + microbatch) % 2 else 0)
        x, y = (torch.randint(1, self.vocab, (self.sequences, length), generator=generator) for _ in range(2))
        number = (2 * microbatch + dp + step) % 4
        if self.kind != "even":
            y.view(-1)[(y.numel(), 4, 9, 1 if self.kind != "missing" else 0)[number] :] = -100
        if self.kind == "padded":
            for row in range(len(x)):
                real = 1 + (3 * row + 5 * number) % length
                x[row, real:], y[row, real:] = 0, -100
        return x, y


def without_padding(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return how many tokens of each sequence are before its padding, which is token 0."""
    return (inputs != 0).sum(1)


@cache
def _folder() -> Path:
    """A folder with texts and examples, which is removed at the end of the process."""
    folder = tempfile.TemporaryDirectory(prefix="raypar-features-")
    atexit.register(folder.cleanup)
    path = Path(folder.name)
    sizes = [3, 5, 2, 9, 4, 7, 1, 6, 8, 2, 5, 3] * 20
    records = [{"prompt": "abcdefgh"[: n % 4 + 1], "completion": "zyxwvutsrq"[:n]} for n in sizes]
    made_jsonl(path / "examples.jsonl", records)
    (path / "text.txt").write_text("".join(chr(33 + (i * i + i // 7) % 90) for i in range(4000)))
    return path


def faults_of(row: Row) -> list[str]:
    """Return what is wrong with the run of a row; that it has too many actors for a test, too."""
    run = run_of_row(row)
    if faults := rp.faults(run):
        return faults
    if row["schedule"] == "pipedream-2bw" and (row["data"] not in ("even", "text") or row["data.varying"]):
        return [f"schedule and data: {UNEQUAL}"]  # found in the first step
    size = world_of(run).size
    axes = "pp, dp, cp, tp, rank_dp, rank_tp, expert_actors or servers"
    return [f"{TOO_MANY} {size} actors: make one of {axes} smaller"] if size > MOST_ACTORS else []


def needed(path: str, row: Row) -> str | None:
    """Return the feature because of whose value a run has no field of this path; None if it has one."""
    if _has_place(path, row):
        return None
    part = path.rpartition(".")[0]
    return f"{part}.kind" if part in ("model", "optim") else part


def _has_place(path: str, row: Row) -> bool:
    part, _, name = path.rpartition(".")
    if part in ("model", "optim"):
        kind = row[f"{part}.kind"]
        return name in _FIELDS[kind]
    if part == "data":
        return row["data"] in ("uneven", "even", "missing", "padded")
    return part not in ("model.moe", "model.lora") or row[part] not in (None, "none")


def run_of_row(row: Row) -> rp.Run:
    """Return the run of a row, each of whose fields has a place."""
    values = {path: value for path, value in row.items() if _has_place(path, row)}

    def of(part: str) -> dict[str, Any]:
        return {path.rpartition(".")[2]: value for path, value in values.items() if path.rpartition(".")[0] == part}

    model, optim, own = of("model"), of("optim"), of("")
    model_class, optim_class = MODELS[model.pop("kind")], OPTIMIZERS[kind := optim.pop("kind")]
    model["moe"] = _experts(row["model.moe"], of("model.moe"), model["layers"])
    model["lora"] = None if model["lora"] is None else rp.Lora(rank=model["lora"], **of("model.lora"))
    scaling = model["rope_scaling"]
    model["rope_scaling"] = (
        None if scaling == "none" else rp.RopeScaling(kind=scaling, factor=2.5, trained=5, **SCALING.get(scaling, {}))
    )
    optim["lr"] = RATES[kind] * (1.0 if optim["lr"] == "USUAL" else 0.5)
    own |= {"model": model_class(**model), "optim": optim_class(**optim), "mesh": rp.Mesh(**of("mesh"))}
    own["data"] = _data(row)
    own["loss_scale"] = rp.LossScale(use=row["loss_scale.use"], init=2.0**10)
    if own["offload_folder"] is not None:
        own["offload_folder"] = str(_folder())
    if own["recompute"] == "BY LAYER":
        own["recompute"] = tuple(("full", "none", "selective")[layer % 3] for layer in range(model["layers"]))
    if own["split"] == "MOST FIRST":
        doubled = own["chunks"] is None and own["schedule"] in ("interleaved", "zb-v")
        stages = row["mesh.pp"] * (2 if doubled else own["chunks"] or 1)
        own["split"] = (model["layers"] - stages + 1, *[1] * (stages - 1))
    own["expert_order"] = _reversed(own["model"]) if own["expert_order"] == "REVERSED" else {}
    return rp.Run(**own, steps=STEPS + 1, device="cpu", timeout=60.0)


def _experts(gate: str, given: dict[str, Any], layers: int) -> rp.MoE | None:
    if gate == "none":
        return None
    given = given | {"top_groups": 1}
    uneven = given["experts"] == "UNEVEN"
    moe = rp.MoE(gate=gate, **given | ({"experts": 4} if uneven else {}))
    counts = tuple(4 + 2 * (number % 2) for number, _ in enumerate(moe.blocks(layers)))
    return rp.MoE(gate=gate, **given | {"experts": counts}) if uneven and counts else moe


def _reversed(model: rp.GPT | rp.Llama) -> dict[str, str]:
    """Return the experts of every list in an order from the last to the first."""
    counts = {block: model.num_experts(block) for block in range(model.layers)}
    return {
        f"blocks.{block}.mlp.experts": " ".join(str(one) for one in reversed(range(count)))
        for block, count in counts.items()
        if count
    } or {"blocks.0.mlp.experts": "1 0"}


def _data(row: Row) -> Any:
    kind, folder = row["data"], _folder()
    if kind == "text":
        return rp.Text(str(folder / "text.txt"), cache=str(folder / "cache"))
    if kind in ("packed", "apart"):
        path = str(folder / "examples.jsonl")
        return rp.Examples(path, packing=kind == "packed", cache=str(folder / "cache"))
    drawn = Drawn(kind, row["micro_batch_size"], row["model.seq"], row["model.vocab"], row["data.varying"])
    lengths: Callable[..., torch.Tensor] | None = without_padding if kind == "padded" else None
    return rp.Batches(drawn, varying=row["data.varying"], lengths=lengths)


def differences_of(run: rp.Run) -> list[str]:
    """Return what a run on threads has that the oracle has not, a line each.

    Where rounding decides what experts a token chooses, the run of the next seed is taken.
    """
    try:
        return differences(run, STEPS, **oracle_settings(run))
    except TieError:
        return differences_of(replace(run, seed=run.seed + 1))


def drawn(seed: int) -> Covering:
    """Return the array of all features, of which no row is drawn yet."""
    return Covering(FEATURES, faults_of, needed, seed)


def words_of(row: Row) -> str:
    """Return the values of a row that are not the usual ones."""
    return ", ".join(f"{path}={row[path]!r}" for path, values in FEATURES.items() if row[path] != values[0])


def oracle_settings(run: rp.Run) -> dict[str, Any]:
    """Return what the oracle must know of a run: the token of padding, and how old weights are."""
    settings: dict[str, Any] = {}
    if isinstance(run.data, rp.Examples) or getattr(run.data, "lengths", None) is not None:
        settings["padding"] = 0
    if run.schedule == "pipedream-2bw":  # Narayanan et al. 2021: weights are one step old, but after a flush
        length = run.flush_every or STEPS

        def version(name: str, step: int) -> int:
            return max(step - step % length, step - 1)

        settings |= {"version": version, "delay_feedback": run.delay_feedback}
    return settings
