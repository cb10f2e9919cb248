"""Conversion of a run's data on the nodes of a cluster, before the run is checked."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from raypar.actors.data.conversion import BlockConverter, Converted, by_size
from raypar.actors.data.examples.example_sets import example_sets
from raypar.actors.data.text.text_files import TextError
from raypar.actors.data.text.token_batches import open_corpus
from raypar.actors.machine.this_machine import starts_own_ray
from raypar.actors.specs.data import Examples, Text
from raypar.actors.specs.run import Run
from raypar.cluster.lifecycle.ray_cluster import connected
from raypar.cluster.nodes.tasks import in_tasks, is_connected
from raypar.config.fields import field_faults, right_fields
from raypar.errors import JobError
from raypar.schedules.float_sum import float_sum

log = logging.getLogger(__name__)

_WORTH = 64 << 20  # bytes that this machine is busy with for longer than it takes to connect to a cluster


def convert_on_cluster(run: Run) -> None:
    """Convert a run's data with the CPUs of all nodes, if it is large, not converted, and there are several nodes.

    Otherwise nothing is done, and nothing is raised for faulty data: the next reader reports its faults, and converts
    it with the cores of its machine.

    Args:
        run: The run, which may have faults.
    """
    if (starts_own_ray() and not is_connected()) or not right_fields([*field_faults(run)])("data"):
        return
    try:
        if isinstance(run.data, Text):
            open_corpus(run.data, run.model.seq or 1, _on_cluster)
        elif isinstance(run.data, Examples):
            example_sets(run.data, _on_cluster)
    except TextError:
        pass
    except JobError as error:
        log.warning("the data is converted on this machine alone, because %s", error)


def _on_cluster(conversion: BlockConverter, blocks: Iterable[bytes], size: int) -> Converted:
    """Convert blocks with tasks on all nodes, or here if they are small or there is one node."""
    if size < _WORTH:
        yield from by_size(conversion, blocks, size)
        return
    with connected() as nodes:
        if len(nodes) < 2:
            yield from by_size(conversion, blocks, size)
            return
        alone: Any = replace(conversion)  # without what it keeps open here
        cpus = max(1, int(float_sum(node.total.get("CPU", 0.0) for node in nodes)))
        yield from in_tasks(alone, blocks, cpus)
