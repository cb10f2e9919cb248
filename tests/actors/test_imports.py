"""What an actor does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch
from tests.support.team import Team, linears, mse
from raypar.actors.models.build import build_model
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import AdamW, Muon
build_model(GPT(layers=1, hidden=8, heads=2, seq=4, vocab=5, tied=True), 0).materialize(range(3), 0)
for positions in ("sinusoidal", "hierarchical", "rope", "alibi"):
    model = Llama(layers=2, hidden=8, heads=2, kv_heads=1, seq=4, vocab=5, dropout=0.1, positions=positions)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    Team(None, model=model, data=lambda step, microbatch, dp: (tokens, tokens), recompute=("selective", "full")).step(0)
optimizers = [{"optim": AdamW()}, {"optim": Muon(adamw=())}]
for changes in (*optimizers, {"clip": 0.5, "recompute": "full"}, {"dp": 2, "zero": 1}):
    Team(linears(2), **changes).step(0)
plan = {"layers.0.0": "column", "layers.1.0": "row", "layers.2.0": "column_gather_output"}
Team(None, model=Layers(linears(3), mse, plan=plan), tp=2).step(0)
print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)))
"""


def test_building_and_training_import_neither_torchs_compiler_nor_sympy():
    """They take 3 s and 90 MiB in every actor; a release of torch may bring another way to them."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=root, timeout=100)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
