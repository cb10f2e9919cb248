"""The actors of a run as threads whose groups are NCCL's, played by threads too (tests/gpu/fakes.py)."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist

from raypar.actors.collective.gpu.nccl import NcclGroup
from raypar.actors.collective.group import GroupMember
from raypar.actors.mesh.memberships import memberships
from tests.gpu.fakes import fake_nccl
from tests.gpu.ops import together
from tests.support.local_groups import local_groups
from tests.support.team import Team

CPU = torch.device("cpu")


class NcclTeam(Team):
    """A Team whose groups are torch's NCCL groups, and CPU groups beside them."""

    def _groups(self):
        for rank in range(self.world.size):
            for _, axis, name, members in memberships(self.world, rank):
                if members[0] == rank:
                    yield name, nccl_groups(axis, len(members), 10.0)

    def close(self):
        for members in self.groups.values():
            for group in members:
                group.abort()


def nccl_groups(axis, size, timeout):
    """The members of a group by rank, each with a CPU group beside it."""
    hosts, store = local_groups(axis, size, timeout), dist.HashStore()
    return together(size, lambda rank: NcclGroup(GroupMember("g", axis, rank, size, timeout), store, CPU, hosts[rank]))


@contextmanager
def nccl_teams():
    """Within it a function makes NcclTeams, of a run or as Team does; they are closed at its end."""
    teams = []

    def make(*args, run=None, **changes):
        teams.append(NcclTeam(*args, **changes) if run is None else NcclTeam.of(run))
        return teams[-1]

    with fake_nccl():
        try:
            yield make
        finally:
            for team in teams:
                team.close()
