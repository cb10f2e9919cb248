"""Rules of how few replicas a run may have, and of comparing their weights and what they compute."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.config.rules import Conflict, Examined, RunRule, RunSetting
from raypar.config.validate.settings import EP, EXPERT_ACTORS, OFFLOADED_WEIGHTS, RECHECK, SERVERS, SHARDED_WEIGHTS

_CHECK = RunSetting("check_every", undo="set it to 0")
_ONE = RunSetting("run", lambda run: run.mesh.ways("dp") * run.mesh.cp == 1, "there is one replica (dp x cp)")
_ALL_SHARDED = RunSetting(
    "run", lambda run: run.zero == 3 and run.mesh.shards == run.mesh.ways("dp") * run.mesh.cp > 1, "zero is 3"
)
_NO_TWO = "but {other}, so no two actors hold the same weights"
_A_WHILE = "but {other}, so weights are on an actor only for a while"
_TOGETHER = "but experts are divided over actors, which compute the tokens of several replicas together"
_COPIES = "set it to 0 (with mesh.shard, copies of shards are compared)"


def _fewest_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if there are fewer replicas than a run may go on with."""
    run = examined.run
    if run.min_dp > run.mesh.dp:
        there = "is 1 replica" if run.mesh.dp == 1 else f"are {run.mesh.dp} replicas"
        yield f"min_dp is {run.min_dp}, but there {there}: set it to {run.mesh.dp} at most"


def _snapshot_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if snapshots are taken of what was not compared."""
    run = examined.run
    if run.check_every and run.max_failures and run.snapshot_every % run.check_every:
        yield (
            f"snapshot_every is {run.snapshot_every}, and check_every {run.check_every}: a snapshot would hold what no "
            f"check has seen, so set snapshot_every to {run.check_every} or a multiple"
        )


REPLICA_RULES: tuple[RunRule, ...] = (
    _fewest_faults,
    Conflict(RECHECK, RunSetting("mesh.dp", 1), "but {other}, so no other actor has the same weights", RECHECK.undo),
    Conflict(RECHECK, SERVERS, "but replicas of servers do not talk to each other", RECHECK.undo),
    *(Conflict(RECHECK, experts, _TOGETHER, RECHECK.undo) for experts in (EP, EXPERT_ACTORS)),
    Conflict(RECHECK, SHARDED_WEIGHTS, _A_WHILE, RECHECK.undo),
    Conflict(RECHECK, OFFLOADED_WEIGHTS, _A_WHILE, RECHECK.undo),
    Conflict(_CHECK, _ONE, "but {other}, so nothing to compare", _CHECK.undo),
    Conflict(_CHECK, SERVERS, "but servers send replicas their weights in every step", _CHECK.undo),
    Conflict(_CHECK, _ALL_SHARDED, _NO_TWO, _COPIES),
    Conflict(_CHECK, OFFLOADED_WEIGHTS, _NO_TWO, _CHECK.undo),
    _snapshot_faults,
)
