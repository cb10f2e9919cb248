"""Time an all_reduce over two hosts of two members each, with a limited link: node by node, and flat over Gloo.

    python -m tests.long.node_sums [--rate 1gbit] [--mib 16] [--repeats 9] [--floor 1.3]

Exit code 1 if node by node is not ``floor`` times as fast as flat, or if members have different sums.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from raypar.actors.collective.connect import cpu_group
from raypar.actors.collective.gloo.group import GlooGroup, create_device
from raypar.actors.collective.group import Group, GroupMember
from tests.support.clusters import ROOT
from tests.support.hosts import hosts_on_a_network, missing

MEMBERS = 4


def member(rank: int, host: str, own: str, mib: float, repeats: int) -> None:
    """One member: prints its times and the first and last element of its sum, by kind of group."""
    torch.set_num_threads(1)
    store = dist.TCPStore(host, 7001, MEMBERS, rank == 0, timedelta(seconds=60), wait_for_workers=True)
    flat = dist.PrefixStore("flat", store)
    groups: dict[str, Group] = {
        "by node": cpu_group("by node", rank, MEMBERS, dist.PrefixStore("by node", store), own),
        "flat": GlooGroup(GroupMember("flat", "dp", rank, MEMBERS), flat, create_device(own)),
    }
    told: dict[str, object] = {"class": type(groups["by node"]).__name__}
    for kind in ("by node", "flat") * 2:
        group, times = groups[kind], []
        for _ in range(repeats):
            tensor = torch.randn(int(mib * (1 << 20)) // 4, generator=torch.Generator().manual_seed(rank))
            group.barrier().wait()
            begin = time.perf_counter()
            group.all_reduce(tensor).wait()
            times.append(time.perf_counter() - begin)
        told[kind] = [min(times), statistics.median(times), tensor[:3].tolist(), tensor.double().sum().item()]
    groups["flat"].barrier().wait()
    print(json.dumps(told), flush=True)
    if rank == 0:
        time.sleep(1)  # the store is here


def main() -> int:
    """Run the members and compare."""
    words = argparse.ArgumentParser()
    words.add_argument("--rate", default="1gbit")
    words.add_argument("--delay", default="")
    words.add_argument("--mib", type=float, default=16)
    words.add_argument("--repeats", type=int, default=9)
    words.add_argument("--floor", type=float, default=1.3)
    words.add_argument("--interleaved", action="store_true")
    words.add_argument("--member", type=int)
    words.add_argument("--addresses", nargs=2)
    args = words.parse_args()
    if args.member is not None:
        member(args.member, *args.addresses, args.mib, args.repeats)
        return 0
    if lacks := missing():
        print(f"skipped: {lacks}")
        return 0
    with hosts_on_a_network("first", "second") as network:
        network.limit(args.rate, args.delay)
        started = []
        for rank in range(MEMBERS):
            host = network.hosts[rank % 2 if args.interleaved else rank // 2]
            its = [f"--member={rank}", "--addresses", network.hosts[0].address, host.address]
            sizes = [f"--mib={args.mib}", f"--repeats={args.repeats}"]
            env = {"PYTHONPATH": str(ROOT)}
            started.append(host.start(sys.executable, "-m", "tests.long.node_sums", *its, *sizes, env=env))
        said = [process.communicate(timeout=300)[0] for process in started]
    try:
        told = [json.loads(text.splitlines()[-1]) for text in said]
    except (ValueError, IndexError):
        print("\n".join(said))
        return 1
    median = {kind: max(one[kind][1] for one in told) for kind in ("by node", "flat")}
    gain = median["flat"] / median["by node"]
    same = all(one[kind][2:] == told[0][kind][2:] for one in told for kind in median)
    shown = ", ".join(f"{kind} {1e3 * seconds:.0f} ms" for kind, seconds in median.items())
    what = f"{told[0]['class']}: all_reduce of {args.mib:g} MiB, {args.rate}"
    print(f"{what}: {shown}: {gain:.2f} x; sums the same: {same}")
    return 0 if same and gain >= args.floor else 1


if __name__ == "__main__":
    sys.exit(main())
