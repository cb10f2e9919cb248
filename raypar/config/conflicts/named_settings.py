"""Settings of a run that conflict with settings of several subjects."""

from __future__ import annotations

from raypar.actors.models.tiles.tile_names import tile_patterns
from raypar.actors.specs.model import Layers
from raypar.config.rules import RunSetting, several

OWN_LAYERS = RunSetting(
    "model", lambda model: isinstance(model, Layers), "model is your own Layers", "take a GPT or Llama"
)
EXPERTS = RunSetting("model.moe", said="model.moe is given", undo="set model.moe to None")
TIED = RunSetting("model.tied", undo="set model.tied to False")
ADAPTERS = RunSetting("model.lora", said="model.lora is given")
TENSOR = RunSetting("mesh.tp", lambda tp: tp != 1)
GRID = RunSetting("mesh.grid", said="mesh.tp is {run.mesh.tp!r}", undo="leave mesh.tp out")
REPLICAS = RunSetting("mesh.dp", several)
CONTEXT = RunSetting("mesh.cp", several)
EXPERT_ACTORS = RunSetting("mesh.expert_actors", undo="set mesh.expert_actors to 0")
EP = RunSetting("mesh.ep", several, undo="set mesh.ep to 1")
RANK_DP = RunSetting("mesh.rank_dp", said="mesh.rank_dp")
RANK_TP = RunSetting("mesh.rank_tp", said="mesh.rank_tp")
UNEVEN = (RANK_DP, RANK_TP)
SERVERS = RunSetting("data_parallel", "parameter_server", undo="set data_parallel to 'all_reduce'")
SHARDED_WEIGHTS = RunSetting("zero", 3, undo="set zero to 2")
OFFLOAD = RunSetting("offload", lambda kind: kind != "none")
OFFLOADED_WEIGHTS = RunSetting("offload", "parameters")
SEQUENCE = RunSetting("sequence_parallel", undo="set sequence_parallel to False")
DIVIDED_SEQUENCE = RunSetting(
    "run", lambda run: run.sequence_parallel and run.mesh.tp != 1, "sequence_parallel is True", SEQUENCE.undo
)
SLICES = RunSetting("token_slices", several)
RECHECK = RunSetting("recheck_every", undo="set recheck_every to 0")
OVERFLOW = RunSetting("overflow_every", undo="set overflow_every to 0")
FAILURES = RunSetting("max_failures", undo="set max_failures to 0")
CLIP = RunSetting("clip", undo="set clip to None, as there is no global norm")
NONFINITE = RunSetting("nonfinite", lambda kind: kind != "stop", undo="set nonfinite to 'stop'")
EMA = RunSetting("ema")
HALVES = RunSetting("backward", "split", undo="set backward to 'whole'")
DYNAMIC = RunSetting("order", "dynamic", undo="set order to 'row'")
CUDA = RunSetting("device", "cuda", undo="set device to 'cpu'")
TILES = RunSetting(
    "run",
    lambda run: any(count > 1 for count in tile_patterns(run.model, run.tile).values()),
    "tile is {run.tile!r}",
    "set tile to 1",
)
