"""Settings of a run that conflict with settings of several subjects."""

from __future__ import annotations

from raypar.actors.models.tile_names import tile_patterns
from raypar.actors.specs.model import Layers
from raypar.config.rules import Setting, several

OWN_LAYERS = Setting(
    "model", lambda model: isinstance(model, Layers), "model is your own Layers", "take a GPT or Llama"
)
EXPERTS = Setting("model.moe", said="model.moe is given", undo="set model.moe to None")
TIED = Setting("model.tied", undo="set model.tied to False")
ADAPTERS = Setting("model.lora", said="model.lora is given")
TENSOR = Setting("mesh.tp", lambda tp: tp != 1)
GRID = Setting("mesh.grid", said="mesh.tp is {run.mesh.tp!r}", undo="leave mesh.tp out")
REPLICAS = Setting("mesh.dp", several)
CONTEXT = Setting("mesh.cp", several)
EXPERT_ACTORS = Setting("mesh.expert_actors", undo="set mesh.expert_actors to 0")
EP = Setting("mesh.ep", several, undo="set mesh.ep to 1")
RANK_DP = Setting("mesh.rank_dp", said="mesh.rank_dp")
RANK_TP = Setting("mesh.rank_tp", said="mesh.rank_tp")
UNEVEN = (RANK_DP, RANK_TP)
SERVERS = Setting("data_parallel", "parameter_server", undo="set data_parallel to 'all_reduce'")
SHARDED_WEIGHTS = Setting("zero", 3, undo="set zero to 2")
OFFLOAD = Setting("offload", lambda kind: kind != "none")
OFFLOADED_WEIGHTS = Setting("offload", "parameters")
SEQUENCE = Setting("sequence_parallel", undo="set sequence_parallel to False")
DIVIDED_SEQUENCE = Setting(
    "run", lambda run: run.sequence_parallel and run.mesh.tp != 1, "sequence_parallel is True", SEQUENCE.undo
)
SLICES = Setting("token_slices", several)
RECHECK = Setting("recheck_every", undo="set recheck_every to 0")
OVERFLOW = Setting("overflow_every", undo="set overflow_every to 0")
FAILURES = Setting("max_failures", undo="set max_failures to 0")
CLIP = Setting("clip", undo="set clip to None, as there is no global norm")
NONFINITE = Setting("nonfinite", lambda kind: kind != "stop", undo="set nonfinite to 'stop'")
EMA = Setting("ema")
HALVES = Setting("backward", "split", undo="set backward to 'whole'")
DYNAMIC = Setting("order", "dynamic", undo="set order to 'row'")
CUDA = Setting("device", "cuda", undo="set device to 'cpu'")
TILES = Setting(
    "run",
    lambda run: any(count > 1 for count in tile_patterns(run.model, run.tile).values()),
    "tile is {run.tile!r}",
    "set tile to 1",
)
