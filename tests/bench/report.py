"""What a bench found, as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from tests.bench.calm import CALM
from tests.bench.contestants import CONTESTANTS, REFERENCE, Contestant
from tests.bench.figures import median_ratio, worst_difference
from tests.bench.group_speed import KIB, MIB, Sample
from tests.bench.machine import Machine
from tests.bench.overhead import Overhead, executor_table
from tests.bench.rounds import Track
from tests.bench.tables import Table
from tests.bench.workload import Size

_UNKNOWN = "-"
_LEGEND = (
    "Two processes of one thread each; the same weights, batches, AdamW and clipping for all. Peers and limits compute "
    "with torch's linear layers and attention, raypar's GPT with its own. A limit is what two processes do side by "
    "side that share nothing; that of pp is less the bubble, mv/(mv + p - 1). Memory is the peak during a step, of "
    "raypar's replicas the larger one. A launch is from the start of the processes, Ray's included, to the end of the "
    "first step. Losses are compared with one process' at every step, relatively; the largest difference counts."
)


@dataclass(frozen=True)
class Heat:
    """All contestants of one size, by name: ``rounds`` of ``steps`` each."""

    size: Size
    rounds: int
    steps: int
    tracks: dict[str, Track]


@dataclass
class Findings:
    """Everything that was measured, and on what."""

    machine: Machine = field(default_factory=Machine)
    heats: list[Heat] = field(default_factory=list)
    overhead: Overhead | None = None
    groups: list[Sample] = field(default_factory=list)

    def text(self, *, markdown: bool = False) -> str:
        """The machine, the tables, and what raypar and Ray cost by themselves."""
        tables = [
            table
            for heat in self.heats
            for table in (speed_table(heat), ratio_table(heat), wait_table(heat))
            if table.rows
        ]
        tables += [group_table(self.groups)] if self.groups else []
        tables += [] if self.overhead is None else [executor_table(self.overhead.steps)]
        drawn = [table.markdown() if markdown else table.text() for table in tables]
        overhead = [] if self.overhead is None else [overhead_line(self.overhead)]
        about = " ".join([str(self.machine), _LEGEND, *calm_line(self.heats)])
        return "\n\n".join([about, *drawn, *overhead]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every round by itself."""
        return asdict(self)


def calm_line(heats: Sequence[Heat]) -> list[str]:
    """How calm a virtual machine was; nothing where nothing was measured."""
    tracks = [track for heat in heats for track in heat.tracks.values()]
    shares = [share for track in tracks for share in track.stolen]
    if not shares:
        return []
    turns = sum(track.turns for track in tracks)
    return [
        f"Of {turns} turns {turns - len(shares)} were taken again: in them more than {CALM:.0%} of the cores' time was "
        f"taken from this machine. In those that count it was {statistics.median(shares):.1%} at the median and "
        f"{max(shares):.1%} at most."
    ]


def speed_table(heat: Heat) -> Table:
    """Speed, share of the limit, memory, launch and losses of everybody."""
    size = heat.size
    title = (
        f"{size.name}: a GPT of {size.model.layers} layers, hidden {size.model.hidden}, {size.model.seq} tokens; "
        f"{size.batch} samples a step, tp, pp and one process in microbatches of {size.micro_batch_size}, dp in one a "
        f"process; medians of {heat.rounds} rounds of {heat.steps} steps"
    )
    header = ("who", "tokens/s", "min to max", "of limit", "MiB a process", "launch s", "loss differs")
    return Table(title, header, [_speed_row(CONTESTANTS[name], heat) for name in heat.tracks])


def ratio_table(heat: Heat) -> Table:
    """raypar's speed over each peer's."""
    ours = [name for name in heat.tracks if CONTESTANTS[name].ours]
    peers = [name for name in heat.tracks if not CONTESTANTS[name].ours and not CONTESTANTS[name].apart]
    speeds = {name: track.speeds for name, track in heat.tracks.items()}
    rows = [
        [CONTESTANTS[name].what, *(_figure(median_ratio(speeds[name], speeds[peer]), ".2f") for peer in peers)]
        for name in ours
    ]
    header = ["raypar's speed over that of", *(CONTESTANTS[peer].what for peer in peers)]
    return Table(f"{heat.size.name}: medians of the rounds' ratios; above 1 raypar is faster", header, rows)


def wait_table(heat: Heat) -> Table:
    """What raypar's actors spend in communicating ops, as a share of the step."""
    waits = {name: track.waits for name, track in heat.tracks.items() if track.waits}
    ops = list(dict.fromkeys(op for found in waits.values() for op in found))
    rows = [
        [CONTESTANTS[name].what, *(_percent(found.get(op)) for op in ops), _percent(_sums(list(found.values())))]
        for name, found in waits.items()
    ]
    title = (
        f"{heat.size.name}: shares of raypar's step spent in communicating ops, by axis and op: starting and waiting, "
        "for actors that come late too; means over the actors, medians of the rounds"
    )
    return Table(title, ["who", *ops, "all"], rows)


def group_table(samples: Sequence[Sample]) -> Table:
    """A row for every operation and number of members, a column for every size."""
    found = {(sample.size, sample.op, sample.nbytes): sample for sample in samples}
    columns = sorted({sample.nbytes for sample in samples})
    kinds = dict.fromkeys((sample.size, sample.op) for sample in samples)
    rows = [[f"{op}, {size}", *(_group_cell(found[size, op, nbytes]) for nbytes in columns)] for size, op in kinds]
    title = (
        "Groups of Ray actors on this machine: raypar's CPU group in us (how many times as long Gloo takes), by the "
        "bytes of the whole tensor: means of 20 to 500 in a row, and their median over the rounds; p2p is half of the "
        "way there and back"
    )
    return Table(title, ["operation, members", *(_nbytes(nbytes) for nbytes in columns)], rows)


def overhead_line(found: Overhead) -> str:
    """What raypar and Ray cost by themselves."""
    return (
        f"A launch of an empty model, in a Ray that runs, takes {found.steps.launch:.1f} s. "
        f"With torch imported and nothing else, a Ray actor holds {_mib([found.actor_memory])} MiB, a plain process "
        f"{_mib([found.process_memory])} MiB."
    )


def _speed_row(contestant: Contestant, heat: Heat) -> list[str]:
    track = heat.tracks[contestant.name]
    if track.failure is not None or not track.speeds:
        return [contestant.what, "failed", *[_UNKNOWN] * 5]
    return [
        contestant.what,
        f"{statistics.median(track.speeds):,.0f}",
        f"{min(track.speeds):,.0f} to {max(track.speeds):,.0f}",
        _figure(_share(contestant, heat), ".2f"),
        _mib(track.peaks),
        _figure(statistics.median(track.launches) if track.launches else None, ".1f"),
        _difference(contestant, heat),
    ]


def _share(contestant: Contestant, heat: Heat) -> float | None:
    """Of the limit, less the pipeline's bubble: the median over the rounds."""
    if contestant.limit is None or contestant.limit not in heat.tracks:
        return None
    ratio = median_ratio(heat.tracks[contestant.name].speeds, heat.tracks[contestant.limit].speeds)
    return None if ratio is None else ratio / contestant.ideal(heat.size)


def _difference(contestant: Contestant, heat: Heat) -> str:
    """Of the losses; halves that nobody averages go their own way, and are not compared."""
    if contestant.apart and contestant.layout == "replicas":
        return _UNKNOWN
    found = worst_difference(heat.tracks[contestant.name].losses, heat.tracks[REFERENCE].losses)
    return "0" if found == 0 else _figure(found, ".0e")


def _group_cell(sample: Sample) -> str:
    ratio = median_ratio(sample.seconds["gloo"], sample.seconds["raypar"])
    return f"{statistics.median(sample.seconds['raypar']) * 1e6:,.0f} ({_figure(ratio, '.1f')})"


def _sums(shares: Sequence[Sequence[float]]) -> list[float]:
    """Of all ops, round by round; an op that a round has not seen yet counts from its first."""
    return [sum(each) for each in zip_longest(*(one[::-1] for one in shares), fillvalue=0.0)]


def _percent(shares: Sequence[float] | None) -> str:
    return f"{statistics.median(shares):.1%}" if shares else _UNKNOWN


def _figure(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)


def _mib(peaks: Sequence[int]) -> str:
    """MiB of each process; Linux tells them, elsewhere they are 0."""
    return ", ".join(f"{peak / MIB:.0f}" for peak in peaks) if any(peaks) else _UNKNOWN


def _nbytes(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
