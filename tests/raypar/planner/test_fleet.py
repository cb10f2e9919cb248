"""Whole steps of a cluster: held against the plain simulation where nothing is slow, and against Daly's formulas."""

from __future__ import annotations

import math

import pytest

from raypar.errors import ConfigError
from raypar.planner.fleet.fleet import simulate_fleet
from raypar.planner.fleet.fleet_file import Fleet, read_fleet
from raypar.planner.formulas import daly_interval, goodput, young_interval
from raypar.schedules.catalog import build
from raypar.schedules.passes.lower import lower
from raypar.schedules.simulation.simulate import Costs, simulate

COSTS = Costs(f=1.0, b=2.0, link=0.25, step=0.5)
SMALL = lower(build("1f1b", 2, 4))
HOUR = 3600.0


def fleet(**changed):
    return Fleet(**{"replicas": 4, "actors_per_node": 2, "steps": 1000, "save_every": 100} | changed)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_where_nothing_is_slow_a_step_is_that_of_the_simulation(name):
    schedule = lower(build(name, 4, 8))
    found = simulate_fleet(schedule, COSTS, fleet(reduce_seconds=0.5))
    assert found.median == pytest.approx(simulate(schedule, COSTS).makespan + 0.5) == found.ideal
    assert found.goodput == pytest.approx(1.0) and found.actors == 16


def test_if_all_are_slow_computing_takes_as_much_longer():
    found = simulate_fleet(SMALL, Costs(), fleet(straggler_share=0.999999, straggler_slowdown=1.5))
    assert found.median == pytest.approx(1.5 * found.ideal)


def test_slow_links_delay_what_goes_over_them():
    found = simulate_fleet(SMALL, COSTS, fleet(slow_link_share=0.999999, slow_link_slowdown=4.0))
    slow = Costs(f=1.0, b=2.0, link=1.0, step=0.5)
    assert found.median == pytest.approx(simulate(SMALL, slow).makespan)


def test_the_more_actors_wait_for_one_another_the_longer_a_step():
    steps = [simulate_fleet(SMALL, COSTS, fleet(replicas=count, jitter=0.1)).median for count in (1, 16, 256)]
    assert steps == sorted(steps) and steps[-1] > 1.1 * steps[0]


def test_a_seed_draws_the_same_again():
    told = {"jitter": 0.1, "node_mtbf_hours": 10.0, "restart_seconds": 60.0, "save_seconds": 5.0}
    first, again, other = (simulate_fleet(SMALL, COSTS, fleet(seed=seed, **told)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.sampled
@pytest.mark.parametrize("part", [0.3, 1.0, 3.0])
def test_the_simulated_training_is_that_of_the_closed_form(part):
    """Of some thousand failures the lost part differs by some hundredths of its own."""
    mtbf, save, restart = 2 * HOUR, 60.0, 300.0
    step = simulate(SMALL, COSTS).makespan
    every = round(part * daly_interval(save, mtbf) / step)
    found = simulate_fleet(
        SMALL,
        COSTS,
        fleet(
            steps=1_500_000,
            save_every=every,
            save_seconds=save,
            restart_seconds=restart,
            node_mtbf_hours=mtbf / HOUR * 4,  # of four nodes
        ),
    )
    assert found.mtbf == pytest.approx(mtbf) and found.days.failures > 2_000
    assert found.trained == pytest.approx(goodput(every * step, save, restart, mtbf), abs=0.004)
    assert found.trained == pytest.approx(found.closed_form, abs=0.004)


def test_dalys_interval_is_the_best_of_the_closed_form():
    for mtbf in (HOUR, 24 * HOUR):
        for save in (10.0, 120.0):
            best = daly_interval(save, mtbf)
            top = goodput(best, save, 300.0, mtbf)
            others = [goodput(best * part, save, 300.0, mtbf) for part in (0.5, 0.8, 1.25, 2.0)]
            assert top > max(others)
            assert best == pytest.approx(young_interval(save, mtbf), rel=0.2)


def test_intervals_and_goodput_at_their_ends():
    assert daly_interval(10.0, 5.0) == 5.0  # saves take twice as long as nothing fails
    assert goodput(100.0, 25.0, 300.0, math.inf) == 0.8


def test_a_training_that_never_ends_is_told():
    told = {"node_mtbf_hours": 0.001, "restart_seconds": 100.0, "save_seconds": 1.0, "save_every": 1000}
    with pytest.raises(ConfigError, match=r"0 of 1,000 steps are done: save more often"):
        simulate_fleet(SMALL, COSTS, fleet(**told))


def test_all_faults_of_a_file_are_told(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('replicas = 0\nstepz = 3\njitter = "a"\nsave_every = "often"\n')
    with pytest.raises(ConfigError) as error:
        read_fleet(path, 4)
    told = "\n".join(error.value.faults)
    assert all(word in told for word in ("replicas", "there is no stepz", "jitter", "save_every", "steps is missing"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("replicas = 0", "replicas is 0: it must be at least 1"),
        ("straggler_share = 2.0", "straggler_share is 2.0: it must be less than 1.0"),
        ("save_seconds = true", "save_seconds is true: give a number"),
        ("replicas = 2000000000", "replicas is 2000000000: it must be at most"),
        ('actors_per_node = "8"', "actors_per_node is '8': give a whole number"),
        ("steps = true", "steps is true: give a whole number"),
        ("jitter = nan", "jitter is nan: give a finite number"),
        ("node_mtbf_hours = inf", "node_mtbf_hours is inf: give a finite number"),
        ("slow_link_slowdown = -4.0", "slow_link_slowdown is -4.0: it must be at least 1.0"),
        ('save_every = "never"', "save_every is 'never': give a number of steps from 1 on, 'young' or 'daly'"),
        ("save_every = 0", "save_every is 0: give a number of steps from 1 on, 'young' or 'daly'"),
        ("straggler_shares = 0.1", "there is no straggler_shares: did you mean straggler_share?"),
        ("bandwidth = -1", "there is no bandwidth: known are replicas, "),
        ("[cluster]", "[cluster] is a table, and fields stand outside of any: leave its line out"),
    ],
)
def test_a_fault_of_a_field_says_what_was_given_and_what_helps(tmp_path, line, told):
    path, name = tmp_path / "cluster.toml", line.split(" ")[0]
    known = {"replicas": 4, "actors_per_node": 8, "steps": 10}
    path.write_text("".join(f"{one} = {value}\n" for one, value in known.items() if one != name) + line)
    with pytest.raises(ConfigError) as error:
        read_fleet(path, 4)
    (fault,) = error.value.faults
    assert told in fault


@pytest.mark.parametrize("text", ["replicas = [", "\x00", "a = 1979-05-27"])
def test_what_is_no_file_of_a_cluster_is_told(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--cluster"):
        read_fleet(path, 4)


def test_failures_without_a_duration_of_saves_have_no_interval(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text("replicas = 2\nactors_per_node = 2\nsteps = 10\nnode_mtbf_hours = 5\n")
    with pytest.raises(ConfigError, match="give save_seconds"):
        read_fleet(path, 4)
