"""How long an all_reduce takes between two actors of a node, and between nodes, and which of them is slow."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from raypar.cluster.nodes.probes import answers, probes
from raypar.cluster.placement.placement import Node
from raypar.doctor.finding import Finding
from raypar.errors import JobError
from raypar.schedules.formatting import size, three_digit_seconds

SIZES = (4 << 10, 4 << 20, 64 << 20)  # bytes
_SLOWER = 1.5  # times the median of its like
_REPEATS = 5
_SECONDS = 180.0
_LEAST_RATE = {True: 5e8, False: 1.1e8}  # bytes per second that a member should send, in a node and between: 1 Gbit/s
_ADVICE = {
    True: "other processes use the node's cores or memory: look with top",
    False: "keep tp and cp inside nodes, and give the nodes a faster network: this one is no faster than 1 Gbit/s",
}

Doing = Callable[[str], object]  # gets what is being done
Times = Mapping[int, float]  # seconds, by the bytes of the tensor


class Timer:
    """The actor that takes part in an all_reduce and says how long it took."""

    def times(self, name: str, size: int, rank: int, sizes: Sequence[int]) -> dict[int, float]:
        """Return the median seconds of an all_reduce, by the bytes of the tensor.

        Args:
            name: Name of the group, new.
            size: Number of members.
            rank: Rank of this one.
            sizes: Bytes of the tensors.
        """
        import torch

        from raypar.actors.collective.ray.ray_groups import join, leave

        torch.set_num_threads(1)
        group, found = join(name, "doctor", size, rank, 60.0), {}
        for count in sizes:
            tensor, taken = group.empty(count // 4, torch.float32).zero_(), []
            for _ in range(_REPEATS + 1):
                group.barrier().wait()
                begin = time.perf_counter()
                group.all_reduce(tensor).wait()
                taken.append(time.perf_counter() - begin)
            found[count] = statistics.median(taken[1:])  # the first one also opens connections
        leave(name)
        return found


def many_nodes(count: int) -> str:
    """Return a number of nodes in words."""
    return f"{count} node{'s' if count != 1 else ''}"


def group_time_findings(
    nodes: Sequence[Node], sizes: Sequence[int] = SIZES, doing: Doing = lambda _: None
) -> Iterator[Finding]:
    """Measure on every node between two actors, then between the first node and each of the others; yield findings.

    Args:
        nodes: The nodes.
        sizes: Bytes of the tensors.
        doing: Called with what is measured next.
    """
    within, between = {}, {}
    what = f"timing an all_reduce of {', '.join(map(size, sizes))}"
    for number, node in enumerate(nodes, 1):
        doing(f"{what} in {node} ({number} of {many_nodes(len(nodes))})")
        try:
            within[f"in {node}"] = all_reduce_seconds([node, node], sizes)
        except JobError as error:
            yield Finding(
                "wrong", "times", f"two actors on {node} can't exchange a tensor ({error})", "see its Ray's log"
            )
    for node in nodes[1:]:
        doing(f"{what} between {nodes[0]} and {node}")
        try:
            between[f"between {nodes[0]} and {node}"] = all_reduce_seconds([nodes[0], node], sizes)
        except JobError as error:
            advice = "let all ports pass between the nodes, and see that each one's address in Ray is its own"
            yield Finding("wrong", "times", f"{nodes[0]} and {node} can't exchange a tensor ({error})", advice)
    yield from times_findings(within, inside=True)
    yield from times_findings(between, inside=False)


def all_reduce_seconds(nodes: Sequence[Node], sizes: Sequence[int]) -> dict[int, float]:
    """Return the seconds of an all_reduce between actors on the nodes, by the bytes of the tensor.

    Raises:
        JobError: The actors could not exchange tensors.
    """
    name = f"doctor-{uuid.uuid4().hex[:8]}"
    with probes(Timer, nodes) as handles:
        calls = [handle.times.remote(name, len(handles), rank, sizes) for rank, handle in enumerate(handles)]
        found = answers(calls, _SECONDS)
    return {count: max(one[count] for one in found) for count in sizes}


def times_findings(found: Mapping[str, Times], *, inside: bool) -> Iterator[Finding]:
    """Yield a finding for each pair of actors, slow ones marked.

    Args:
        found: The times by where the pair is.
        inside: Whether the pairs are in a node.
    """
    for where, times in found.items():
        text = f"all_reduce {where}: {', '.join(f'{size(n)} {three_digit_seconds(t)}' for n, t in times.items())}"
        largest = max(times)
        rate = largest / times[largest]  # a member of two sends a whole tensor
        elsewhere = [one for other, one in found.items() if other != where]
        slower = {
            count: seconds / typical
            for count, seconds in times.items()
            if elsewhere and seconds > _SLOWER * (typical := statistics.median(one[count] for one in elsewhere))
        }
        if slower:
            count, ratio = next(iter(slower.items()))
            what = f"{text}, {size(count)} take {ratio:.1f} times as long as elsewhere"
            yield Finding(
                "slow", "times", what, "look for other load there, its clock rate, its cable or its switch port"
            )
        elif largest >= 1 << 20 and rate < _LEAST_RATE[inside]:
            yield Finding("slow", "times", f"{text} ({rate / 1e9:.2f} GB/s)", _ADVICE[inside])
        else:
            yield Finding("ok", "times", text)
