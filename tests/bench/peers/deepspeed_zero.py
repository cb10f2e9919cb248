"""DeepSpeed's ZeRO over Gloo: levels 1 and 2 in buckets, level 3 gathers each layer."""

from __future__ import annotations

import raypar as rp
from raypar.actors.machine.device import ComputeDevice
from tests.bench.peers.deepspeed_engine import deepspeed_engine
from tests.bench.trainer import LocalTrainer


def deepspeed_zero(run: rp.Run, place: ComputeDevice, level: int) -> LocalTrainer:
    """One of the ranks that the environment tells of."""
    return deepspeed_engine(run, place, level)
