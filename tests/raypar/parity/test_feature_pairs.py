"""The array of every two features, and what its first rows have found; `python -m tests.long.feature_pairs` runs it."""

from __future__ import annotations

from itertools import islice

import pytest

import raypar as rp
from raypar.actors.errors import ActionError
from tests.support.covering import Covering
from tests.support.features import (
    FEATURES,
    UNEQUAL,
    differences_of,
    drawn,
    faults_of,
    needed,
    run_of_row,
    words_of,
)
from tests.support.team import Team

FIRST_ROWS = 10


def test_there_are_many_features():
    assert len(FEATURES) >= 40
    assert all(len(values) >= 2 for values in FEATURES.values())


@pytest.fixture(scope="module")
def first_rows():
    """Rows that have three pairs of five; of another seed than those of `make test-long`."""
    return list(islice(drawn(1).rows(), FIRST_ROWS))


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(FIRST_ROWS))
def test_the_first_rows_compute_what_the_oracle_does(first_rows, number):
    assert not differences_of(run_of_row(first_rows[number])), words_of(first_rows[number])


def test_unequal_counts_in_an_asynchronous_schedule_are_refused_with_a_reason():
    row = {path: values[0] for path, values in FEATURES.items()} | {"schedule": "pipedream-2bw", "mesh.pp": 2}
    assert faults_of(row) == [f"schedule and data: {UNEQUAL}"]
    team = Team.of(run_of_row(row))
    errors = [str(error) for error in team.each(lambda actor: actor.train(0, None, 0, 3))]
    assert any(UNEQUAL in error for error in errors), errors


# --- the array itself ------------------------------------------------------------------------------------------------


def toy_faults(row):
    faults = []
    if row["b"] == 1 and row["a"] == 0:
        faults.append("b is 1, but a is 0: set a to 1 or 2")
    if row["c"] == 2 and row["d"] == 1:
        faults.append("c is 2, but d is 1: leave d out")
    if row["part.e"] and row["d"] != 1:
        faults.append("e is given, but d is 0: set d to 1")
    return faults


def toy_needs(name, row):
    return "c" if name == "part.e" and row["c"] == 0 else None


TOY = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1, 2), "d": (0, 1), "part.e": (0, 1)}
REFUSED = {
    (("a", 0), ("b", 1)): ["b is 1, but a is 0: set a to 1 or 2"],
    (("c", 2), ("d", 1)): ["c is 2, but d is 1: leave d out"],
    (("d", 0), ("part.e", 1)): ["e is given, but d is 0: set d to 1"],
    (("c", 2), ("part.e", 1)): ["e is given, but d is 0: set d to 1"],
}


@pytest.mark.parametrize("seed", range(5))
def test_an_array_has_every_pair_that_is_allowed(seed):
    covering = Covering(TOY, toy_faults, toy_needs, seed)
    rows = list(covering.rows())
    assert not any(toy_faults(row) for row in rows)
    assert covering.unwritable == {(("c", 0), ("part.e", 1))}
    assert covering.refused.keys() == REFUSED.keys()
    seen = {((one, i), (other, j)) for (one, i), (other, j) in covering.pairs if has(rows, (one, i), (other, j))}
    assert seen == covering.covered == set(covering.pairs) - covering.refused.keys() - covering.unwritable
    assert len(rows) < 20


def has(rows, one, other):
    return any(all(row[name] == TOY[name][number] for name, number in (one, other)) for row in rows)


def test_a_refused_pair_keeps_the_reason():
    covering = Covering(TOY, toy_faults, toy_needs)
    list(covering.rows())
    assert covering.refused[("a", 0), ("b", 1)] == REFUSED[("a", 0), ("b", 1)]
    assert covering.value((("a", 0), ("b", 1))) == {"a": 0, "b": 1}


def test_rows_are_those_of_the_seed():
    one, same, other = (list(Covering(TOY, toy_faults, toy_needs, seed).rows()) for seed in (1, 1, 2))
    assert one == same != other


# --- what such rows found --------------------------------------------------------------------------------------------


def usual(**changes):
    return {path: values[0] for path, values in FEATURES.items()} | {
        name.replace("__", "."): value for name, value in changes.items()
    }


@pytest.mark.parametrize("counts", ["rank_dp", "rank_tp"])
@pytest.mark.parametrize("pp", [1, 3])
def test_numbers_for_other_ranks_than_there_are_are_refused(counts, pp):
    (fault,) = rp.faults(run_of_row(usual(mesh__pp=pp, model__layers=3, **{f"mesh__{counts}": (2, 1)})))
    assert fault.startswith(f"mesh.{counts} is (2, 1), for {pp} pipeline rank")


@pytest.mark.parametrize("changes", [{"optim__rates": {"blocks.1.*": 0.5}}, {"optim__no_decay": ("blocks.0.*",)}])
def test_groups_of_adapters_beside_tied_weights(changes):
    row = usual(model__tied=True, model__lora=3, **changes)
    assert not faults_of(row)
    assert not differences_of(run_of_row(row))


@pytest.mark.parametrize("zero", [None, 1, 2, 3])
def test_parts_of_sequences_share_nothing_out_where_stages_update_by_themselves(zero):
    faults = rp.faults(run_of_row(usual(mesh__cp=2, flush_every=2, zero=zero)))
    level = "1 (its usual level)" if zero is None else zero
    assert any(f"zero is {level}, but" in fault and "set zero to 0" in fault for fault in faults)


def test_no_place_is_no_refusal():
    assert needed("model.kv_heads", usual()) == "model.kind"
    assert needed("model.moe.capacity", usual()) == "model.moe"
    assert needed("optim.betas", usual()) == "optim.kind"
    assert needed("model.kv_heads", usual(model__kind="llama")) is None


def test_errors_of_a_step_are_not_hidden():
    row = usual(schedule="pipedream-2bw")
    with pytest.raises(ActionError, match="targets"):
        differences_of(run_of_row(row))


FOUND = {
    "servers weigh auxiliary losses by the targets of all context ranks": {
        "mesh__cp": 2, "data_parallel": "parameter_server", "model__moe": "softmax", "model__moe.alpha": 0.3,
    },
    "what tensor ranks hold of experts is found where weights are shared out": {
        "mesh__dp": 2, "mesh__tp": 2, "mesh__ep": 2, "zero": 3, "model__moe": "softmax",
    },
    "all slices of a microbatch are computed again": {
        "mesh__pp": 2, "mesh__dp": 2, "token_slices": 2, "recheck_every": 1,
    },
    "a slice that is reduced by itself is no fault": {
        "mesh__pp": 2, "mesh__dp": 2, "token_slices": 2, "recheck_every": 1, "zero_reduce": "microbatch",
    },
    "shapes that change beside forwards that are made again after their update": {
        "mesh__pp": 3, "model__layers": 3, "flush_every": 2, "micro_batch_size": 4, "data.varying": True,
        "optim__decay": "wsd",
    },
    "a microbatch without targets is computed again": {
        "mesh__pp": 2, "mesh__dp": 2, "schedule": "gpipe", "recheck_every": 1, "data": "missing",
    },
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", FOUND)
def test_what_rows_of_the_array_have_found(name):
    row = usual(**FOUND[name])
    assert not faults_of(row)
    assert not differences_of(run_of_row(row))


def test_tiles_beside_tensor_ranks_of_some_stages_are_refused():
    (fault,) = rp.faults(run_of_row(usual(mesh__pp=2, mesh__rank_tp=(2, 1), tile=2)))
    assert fault == (
        "tile is 2, but mesh.rank_tp is (2, 1), which divides the same layers: set tile to 1, or leave mesh.rank_tp out"
    )
