"""What a team of actors saves, and teams that load it."""

from __future__ import annotations

from raypar.actors.checkpoint.assembler import Assembler, ShardFolder
from raypar.actors.checkpoint.reports import written_of
from raypar.checkpoint import manifest_of


def saved(team, folder, step=1):
    """What the actors of a team write: the logical tensors."""
    team.each(lambda actor: actor.stage())
    written = team.each(lambda actor: actor.write(str(folder)))
    assert not [one for one in written if isinstance(one, Exception)]
    return manifest_of(step, 0, {}, written_of(one for one in written if one is not None)).tensors


def loaded(team, folder, tensors):
    assert team.each(lambda actor: actor.load(str(folder), tensors)) == [None] * len(team.all)
    return team


def read(team, folder):
    """What a team saves: the logical tensors, whole, and where they are."""
    folder.mkdir(exist_ok=True)
    tensors = saved(team, folder)
    return {name: Assembler(ShardFolder(folder)).read(logical) for name, logical in tensors.items()}, tensors
