"""The actors of a run as threads of one process, over local groups."""

from __future__ import annotations

import json
from functools import cache

import torch
from torch import nn

from raypar.actors.machine.device import device_of
from raypar.actors.machine.last_action import LastAction
from raypar.actors.mesh.memberships import memberships
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.tiles.tile_names import untiled
from raypar.actors.sharding import join_shards
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import SGD
from raypar.actors.specs.run import Run
from raypar.actors.worker.actor import RayparActor, Refusals
from raypar.actors.worker.members import member_of
from raypar.config.run import check_run
from raypar.job.start.actor_plans import plans_of
from tests.support.local_groups import local_groups
from tests.support.threads import threads


def batch(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    x = torch.randn(3, 4, generator=generator)
    return x, x.sin()


def mse(output, target):
    return nn.functional.mse_loss(output, target)


@cache
def linears(count=4):
    return lambda: [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)]


class Local(RayparActor):
    """An actor as Ray hosts it, but in a thread of this process and over local groups."""

    def __init__(self):
        self._member, self._joined, self._process = None, {}, 0
        self._keeper, self._refusals, self._last_action, self._handover = None, Refusals(), LastAction(), None

    def __getattr__(self, name):
        """A look inside, as ``probe`` of this name takes it."""
        return getattr(self._member.probe, name)

    def join(self, plan, groups, place=None):
        place = place or device_of(plan.device)
        place.enter()
        self._joined = groups
        self._member = member_of(plan, groups, place)

    def train(self, order, epoch=None, copy_within=0, stream=0):
        """As the driver calls it, or with the arguments themselves, the number of the step first."""
        packed = order if isinstance(order, bytes) else json.dumps([order, epoch, copy_within, stream]).encode()
        return super().train(packed)

    @property
    def member(self):
        """The worker or parameter server itself."""
        return self._member

    @property
    def stages(self):
        return self._member.state.stages

    def holds(self):
        return self._member.state.holds()


class Team:
    """The actors of a run by rank; a call goes to all of them at once, each in a thread of its own.

    ``groups`` are those of the pipeline's ranks, instead of new ones.
    """

    def __init__(
        self,
        fn,
        pp=2,
        m=4,
        schedule="1f1b",
        loss=mse,
        data=batch,
        dp=1,
        tp=1,
        cp=1,
        ep=1,
        groups=None,
        shard=None,
        **changes,
    ):
        fields = {"optim": SGD(lr=0.1), "clip": None, "steps": 3, "timeout": 10.0, "data": Batches(data, data)}
        fields |= {"model": Layers(fn, loss, halves=True), "schedule": schedule, "microbatches": m}
        fields["mesh"] = Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, shard=shard)
        self._meet(Run(**(fields | changes)), groups)

    @classmethod
    def of(cls, run):
        """The actors of any run."""
        team = cls.__new__(cls)
        team._meet(run, None)
        return team

    def _meet(self, run, groups):
        self.run = run
        self.programs = programs = check_run(self.run)
        plans = plans_of(self.run, programs, "t")
        self.world = plans[0].world
        self.all = [Local() for _ in range(self.world.size)]
        others = self.all[self.world.mesh.size :]
        self.workers, self.servers = self.all[: self.world.mesh.size], [] if self.world.mesh.expert_actors else others
        self.groups = dict(self._groups()) | ({"pp/0": groups} if groups else {})
        for result in self.each(lambda actor: actor.join(*self._told(plans, actor)) or True):
            if isinstance(result, Exception):
                raise result

    def _groups(self):
        for rank in range(self.world.size):
            for _, axis, name, members in memberships(self.world, rank):
                if members[0] == rank:
                    yield name, local_groups(axis, len(members), self.run.timeout)

    def _told(self, plans, actor):
        rank = self.all.index(actor)
        joined = memberships(self.world, rank)
        return plans[rank], {key: self.groups[name][members.index(rank)] for key, _, name, members in joined}

    def each(self, call):
        """What ``call(actor)`` returned or raised, by rank."""
        with threads(len(self.all)) as pool:
            futures = [pool.submit(call, actor) for actor in self.all]
            return [future.exception(self.run.timeout + 20) or future.result() for future in futures]

    def step(self, number=0, program="train"):
        results = self.each(lambda actor: actor.train(number) if program == "train" else actor.run(program, number))
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def weights(self, dp=0):
        """Copies of a replica's weights, whole."""
        holders = self.world.holders(dp)
        if self.world.gathers:
            return self._joined("parameter", sorted({one for rank in holders for one in self.world.tensor_group(rank)}))
        return self._whole("parameter", holders)

    def gradients(self):
        """Copies of the gradients that the optimizers saw, whole."""
        if self.world.sharded:
            return self._joined("gradient", range(self.world.size))
        return self._whole("gradient", self.world.server_ranks or range(self.world.size))

    def masters(self):
        """Copies of the weights that the optimizers update, whole."""
        return self._joined("master", range(self.world.size))

    def _joined(self, method, ranks):
        """What a method returns of the parts that these ranks update, put together."""
        found = {}
        for rank in ranks:
            state = self.all[rank].member.state
            found |= dict.fromkeys(untiled(name) for name in state.holds() if untiled(name) not in found)
            for name, shard in state.updates().items():
                if (part := getattr(self.all[rank], method)(name)) is not None:
                    if found.get(untiled(name)) is None:
                        found[untiled(name)] = part.new_full(shard.whole, float("nan"))
                    shard.put(found[untiled(name)], part)
        return found

    def _whole(self, method, ranks):
        """What a method tells of each parameter that these ranks hold, whole; the first that is not None."""
        found = {}
        for rank in ranks:
            for name, shard in self.all[rank].holds().items():
                if found.get(name) is None and (shard.is_whole or self.world.leads(rank)):
                    group = (rank,) if shard.is_whole else self.world.tensor_group(rank)
                    parts = [getattr(self.all[one], method)(name) for one in group]
                    shards = [self.all[one].holds()[name] for one in group]
                    found[name] = None if parts[0] is None else join_shards(shards, parts).clone()
        return found

    def ledger(self, axis):
        """What every actor sent over the groups of an axis: [calls, bytes] by op."""
        tables = []
        for actor in self.all:
            total = {}
            for group in actor.member.context.groups.values():
                for (at, op), entry in group.ledger.entries().items():
                    if at == axis:
                        calls, count = total.get(op, (0, 0))
                        total[op] = (calls + entry.calls, count + entry.bytes)
            tables.append(total)
        return tables
