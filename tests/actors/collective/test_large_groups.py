"""A group of 1,024 members over Ray's real store: threads of a few actors tell one another how to connect."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raypar.actors.collective.exchange import gather_objects
from raypar.actors.collective.ray import ray_private
from raypar.actors.collective.ray.ray_groups import KVStore

MODULE = sys.modules[__name__]
SIZE, PROCESSES = 1024, 8
SECONDS = 20.0


class Crowd:
    """Some members of one group."""

    def ready(self):
        self._questions = 0
        for name in ("put", "get_all"):
            setattr(ray_private, name, self._counted(getattr(ray_private, name)))

    def _counted(self, function):
        def counted(*args, **kwargs):
            self._questions += 1
            return function(*args, **kwargs)

        return counted

    def meet(self, name, ranks):
        """Whether each member got what each gives, and the questions that they asked together."""
        ready = threading.Barrier(len(ranks))

        def member(rank):
            ready.wait()
            got = gather_objects(KVStore(name, SIZE), rank, SIZE, b"%d " % rank + b"x" * 180, SECONDS)
            return got == [b"%d " % peer + b"x" * 180 for peer in range(SIZE)]

        with ThreadPoolExecutor(len(ranks)) as pool:
            return all(pool.map(member, ranks)), self._questions


@pytest.mark.long
@pytest.mark.timeout(120)
def test_1024_members_meet_within_20_seconds(cluster):
    cluster.cloudpickle.register_pickle_by_value(MODULE)
    actors = [cluster.remote(num_cpus=1)(Crowd).remote() for _ in range(PROCESSES)]
    try:
        cluster.get([actor.ready.remote() for actor in actors], timeout=60)
        begin = time.monotonic()
        refs = [actor.meet.remote("large", range(first, SIZE, PROCESSES)) for first, actor in enumerate(actors)]
        got = cluster.get(refs, timeout=60)
        took, asked = time.monotonic() - begin, sum(questions for _, questions in got) / SIZE
        print(f"{SIZE} members met in {took:.1f} s, with {asked:.1f} questions each, repeated ones included")
        assert all(right for right, _ in got)
        assert took < SECONDS and asked < 40
    finally:
        for actor in actors:
            cluster.kill(actor)
        cluster.cloudpickle.unregister_pickle_by_value(MODULE)
