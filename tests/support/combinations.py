"""The features of docs/reference/what_goes_with_what.md, the runs that have several of them, and the page itself.

python -m tests.support.combinations > docs/reference/what_goes_with_what.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import raypar as rp
from raypar.actors.models.skeleton import Skeleton
from raypar.config.fields import right_fields
from raypar.config.mended import changed
from raypar.config.rules import Conflict, Examined, faults_by
from raypar.config.run import RULES, with_programs

Changes = Mapping[str, Any]
OWN = {"model": "rp.Layers(layers, loss=loss, plan=plan)", "data": "rp.Batches(batch)"}  # no flags say so
EXPERTS = {"model.moe.experts": 4}
YES, NOT_BOTH = "yes", "–"  # cells of the table; the others are numbers of refusals
FEATURES: Mapping[str, Changes] = {
    "replicas": {"mesh.dp": 4},
    "tensor parallelism": {"mesh.tp": 2},
    "a grid of tensor ranks": {"mesh.tp": "2d:2x2"},
    "sequence parallelism": {"mesh.tp": 2, "sequence_parallel": True},
    "context parallelism": {"mesh.cp": 2},
    "experts on several actors": {**EXPERTS, "mesh.dp": 4, "mesh.ep": 2},
    "experts on actors of their own": {**EXPERTS, "mesh.expert_actors": 2},
    "replicas by pipeline rank": {"mesh.rank_dp": (2, 1)},
    "tensor ranks by pipeline rank": {"mesh.rank_tp": (2, 1)},
    "interleaved stages": {"schedule": "interleaved", "chunks": 2},
    "a zero-bubble V": {"schedule": "zb-v"},
    "split backwards": {"backward": "split"},
    "an asynchronous pipeline": {"schedule": "pipedream", "zero": 0},
    "no flush": {"schedule": "zb-h2", "flush_every": 2, "zero": 0},
    "token slices": {"token_slices": 2},
    "ZeRO 1": {"mesh.dp": 4, "zero": 1},
    "ZeRO 2": {"mesh.dp": 4, "zero": 2},
    "ZeRO 3": {"mesh.dp": 4, "zero": 3},
    "hybrid sharding": {"mesh.dp": 4, "mesh.shard": 2, "zero": 3},
    "parameter servers": {"data_parallel": "parameter_server"},
    "offloaded optimizer": {"offload": "optimizer"},
    "offloaded weights": {"offload": "parameters"},
    "offloaded activations": {"activations_on_device": 2},
    "full recomputation": {"recompute": "full"},
    "recomputed attention": {"recompute": "selective"},
    "tiles": {"tile": 2},
    "bf16": {"precision.compute": "bf16"},
    "fp16": {"precision.compute": "fp16"},
    "fp8": {"precision.compute": "fp8"},
    "SGD": {"optim.kind": "sgd"},
    "Muon": {"optim.kind": "muon"},
    "clipping": {"clip": 1.0},
    "an average of the weights": {"ema": 0.9},
    "steps that are skipped": {"nonfinite": "skip"},
    "a Llama": {"model.kind": "llama", "model.ffn": 96},
    "tied weights": {"model.tied": True},
    "dropout": {"model.dropout": 0.1},
    "experts": EXPERTS,
    "adapters (LoRA)": {"model.lora.targets": "attn"},
    "own modules (rp.Layers)": OWN,
    "one task for each action": {"executor": "tasks"},
    "a dynamic order": {"executor": "tasks", "order": "dynamic"},
    "recovery": {"max_failures": 1, "snapshot_every": 2},
    "compared weights": {"mesh.dp": 4, "check_every": 2},
    "microbatches computed again": {"mesh.dp": 4, "recheck_every": 2},
    "counted overflow": {"overflow_every": 2},
    "torch's compiler": {"compile": True},
}
BASE: Changes = {
    "mesh.pp": 2,
    "model.layers": 4,
    "micro_batch_size": 4,
    "model.dropout": 0.0,
    "clip": None,
    "device": "cpu",
}
TEXT = rp.Text(str(Path(__file__).parents[2] / "LICENSE"))
_PARTS = {"moe": rp.MoE, "lora": rp.Lora}
_KINDS = {"llama": rp.Llama, "sgd": rp.SGD, "muon": rp.Muon}


def _layers() -> list[torch.nn.Module]:
    return [torch.nn.Linear(8, 8) for _ in range(4)]


def _batch(step: int, microbatch: int, dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 8), torch.zeros(4, 8)


@cache
def _own() -> dict[str, Any]:
    plan = {f"layers.{n}": ("row" if n % 2 else "column") for n in range(4)}
    return {"model": rp.Layers(_layers, torch.nn.functional.mse_loss, plan=plan), "data": rp.Batches(_batch)}


def merged(names: Sequence[str]) -> Changes | None:
    """Return what features change together; None if they give a field two values, or a field that the model lacks."""
    every: dict[str, Any] = {}
    for path, value in (item for name in names for item in FEATURES[name].items()):
        if every.setdefault(path, value) != value:
            return None
    of_model = [path for path in every if path.startswith("model.")]
    return None if "model" in every and of_model else every


def run_of(changes: Changes, data: rp.Text) -> rp.Run:
    """Return the base with other values of some fields."""
    run = replace(rp.recipe("gpt-tiny"), data=data)
    for path, value in sorted({**BASE, **changes}.items(), key=lambda item: not item[0].endswith(".kind")):
        head, _, name = path.rpartition(".")
        part = getattr(run, head.split(".")[0]) if head else run
        if name == "kind":
            both = {one.name for one in fields(_KINDS[value])} & {one.name for one in fields(part)} - {"kind"}
            run = changed(
                run,
                head,
                _KINDS[value](
                    **{one: getattr(part, one) for one in both if head == "model" or one in ("warmup", "decay")}
                ),
            )
        elif head.count(".") == 1:  # a part that the model has not yet
            run = changed(run, head, _PARTS[head.split(".")[1]](**{name: value}))
        elif "model" in changes and head == "model":
            continue
        else:
            run = changed(run, path, _own()[path] if path in OWN else value)
    return run


def command(changes: Changes) -> str:
    """Return the command, or the run in Python, that has the base's and these values."""
    if "model" in changes:
        said = {**{path: value for path, value in BASE.items() if not path.startswith("model.")}, **changes}
        mesh = ", ".join(f"{path[5:]}={value!r}" for path, value in said.items() if path.startswith("mesh."))
        rest = {path: value for path, value in said.items() if not path.startswith("mesh.")}
        fields = (_field(path, value) for path, value in rest.items())
        return f"rp.faults(rp.Run({', '.join(fields)}, mesh=rp.Mesh({mesh})))"
    return " ".join(["raypar train gpt-tiny --dry-run", *map(_flag, {**BASE, **changes}.items())])


def _field(path: str, value: Any) -> str:
    """Return a field and its value as Python has them."""
    if path in OWN:
        return f"{path}={value}"
    if path == "optim.kind":
        return f"optim=rp.{_KINDS[value].__name__}()"
    return f"precision=rp.Precision({value!r})" if path == "precision.compute" else f"{path}={value!r}"


def _flag(item: tuple[str, Any]) -> str:
    """Return the words of a field and its value."""
    words, value = [f"--{item[0].replace('_', '-')}"], item[1]
    if value is not True:
        words += map(str, value) if isinstance(value, tuple) else ["none" if value is None else str(value)]
    return " ".join(words)


def refusal(changes: Changes, data: rp.Text) -> tuple[object, str] | None:
    """Return what refuses a run, with its sentence: a declared conflict, or else the sentence of a rule that computes.

    None if nothing does.
    """
    run = run_of(changes, data)
    _, examined = with_programs(Examined(run, right_fields([]), Skeleton(run.model, run.seed)))
    for rule in sorted(RULES, key=lambda rule: not isinstance(rule, Conflict)):
        for sentence in faults_by([rule], examined):
            return rule if isinstance(rule, Conflict) else sentence, sentence
    return None


@cache
def table() -> tuple[Mapping[tuple[str, str], str], Sequence[tuple[str, str]]]:
    """Return the cells of the table by two features, and the sentences and commands to which numbers in them refer."""
    cells, numbers, notes = dict[tuple[str, str], str](), dict[object, int](), list[tuple[str, str]]()
    for pair in combinations(FEATURES, 2):
        changes = merged(pair)
        found = None if changes is None else refusal(changes, TEXT)
        if changes is not None and found is not None and found[0] not in numbers:
            numbers[found[0]] = len(notes) + 1
            notes.append((found[1], command(changes)))
        cells[pair] = NOT_BOTH if changes is None else YES if found is None else str(numbers[found[0]])
    return cells, notes


def page() -> str:
    """Return the page: each feature, what each is refused with, and what is said of each refusal."""
    cells, notes = table()
    names = list(FEATURES)
    lines = [*HEAD.strip().splitlines(), "", "| feature | flags |", "|---|---|"]
    lines += [f"| {name} | {_flags(FEATURES[name])} |" for name in names]
    lines += ["", *PAIRS.strip().splitlines(), "", "| feature | refused with | not both |", "|---|---|---|"]
    for name in names:
        found = {
            other: cells[pair]
            for other in names
            if (pair := (name, other)) in cells or (pair := (other, name)) in cells
        }
        lines.append(f"| **{name}** | {_refused(found)} | {_listed(found, NOT_BOTH)} |")
    lines += ["", "## Refusals", ""]
    for n, (sentence, how) in enumerate(notes, 1):
        text = sentence.replace("*", r"\*")  # patterns, which Markdown would read as emphasis
        lines += [f'{n}. <a id="refusal-{n}"></a>{text}', "", f"    `{how}`", ""]
    return "\n".join(lines).rstrip() + "\n"


def _refused(found: Mapping[str, str]) -> str:
    """Return the features that are refused, those of one refusal together, each with a link to what is said of it."""
    numbers = dict.fromkeys(cell for cell in found.values() if cell not in (YES, NOT_BOTH))
    return "; ".join(f"{_listed(found, n)} ([{n}](#refusal-{n}))" for n in sorted(numbers, key=int)) or "none"


def _listed(found: Mapping[str, str], cell: str) -> str:
    """Return the features with a cell."""
    return ", ".join(name for name, one in found.items() if one == cell)


def _flags(changes: Changes) -> str:
    if "model" in changes:
        return "in Python: `" + ", ".join(f"{path}={value}" for path, value in changes.items()) + "`"
    return f"`{' '.join(map(_flag, changes.items()))}`"


HEAD = """
# What goes with what

<!-- made by python -m tests.support.combinations: change the rules in raypar/config/conflicts, not this page -->

On this page you look up which features go together, and how to reach each refusal.

Each run is `raypar train gpt-tiny`, a GPT, with `--mesh.pp 2 --model.layers 4 --micro-batch-size 4 --model.dropout 0.0
--clip none --device cpu` and the flags of the features. Two features go together unless
[this table](#two-features) has them.

A run of more features is refused if two of them are. Besides, sizes have to fit each other, which
`raypar train ... --dry-run` and `rp.faults(run)` say. Models of Hugging Face (`rp.HF`) are GPTs and Llamas here, or own
modules.

## Features
"""
PAIRS = """
## Two features

- Refused with: the two are refused before anything starts, in the words that [Refusals](#refusals) has for the number.
  The command after the words says so.
- Not both: they set the same field, or one is a field that the other one's model has not.
"""

if __name__ == "__main__":
    print(page(), end="")
