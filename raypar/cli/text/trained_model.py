"""The trained model that a command works with: a checkpoint, or a folder of Hugging Face, and the run that holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypar.actors.hugging_face.folder import CONFIG, WHAT_HAS
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.optim import SGD
from raypar.actors.specs.types import DeviceChoice
from raypar.cli.train.resuming import checkpoint_at, its_run
from raypar.config.hugging_face.config_reader import HF
from raypar.errors import ConfigError
from raypar.paths import absolute

if TYPE_CHECKING:
    from raypar.checkpoint.find import VerifiedCheckpoint

TOKENIZER = "tokenizer.json"
_COPIED = ("model", "optim", "seed", "precision", "expert_order")


def trained_model(
    source: str, *, ema: bool, mesh: Mesh, device: DeviceChoice
) -> tuple[dict[str, Any], VerifiedCheckpoint | None]:
    """Return the fields of a Run that holds a trained model, and the checkpoint that it begins with.

    Args:
        source: A run folder, a folder of checkpoints, a checkpoint, or a folder of Hugging Face.
        ema: Whether to use the moving averages of the weights.
        mesh: The actors of the command.
        device: What they compute on.

    Returns:
        The fields by name: the model, what belongs to its weights, and the actors. The checkpoint is None for a folder
        of Hugging Face.

    Raises:
        ConfigError: There is no such model, or averages are asked of a folder of Hugging Face.
    """
    path, fields = absolute(source), {"mesh": mesh, "device": device, "microbatches": mesh.pp}
    if not (path / CONFIG).exists():
        otherwise = f"give a run, a checkpoint or a model; {WHAT_HAS[CONFIG]}"
        found = checkpoint_at(path, ema=ema, typed=source, otherwise=otherwise)
        trained = its_run(found)
        return fields | {name: getattr(trained, name) for name in _COPIED} | {"steps": found.manifest.step + 1}, found
    if ema:
        raise ConfigError([f"{source!r} is a folder of Hugging Face, with one value of each weight: leave out --ema"])
    return fields | {"model": HF(path), "optim": SGD(), "steps": 1}, None
