"""Wrong arguments of public functions: one sentence each, with the fix, and never an error from inside."""

import inspect
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import raypar as rp
from raypar.config.arguments import checked_arguments, checked_methods
from raypar.config.toml import plain_of, toml_of


class Named:
    """A path of another library."""

    def __init__(self, name):
        self.name = name

    def __fspath__(self):
        return self.name


JOB, STEPPER = object.__new__(rp.Job), object.__new__(rp.Stepper)  # the check comes before they look at themselves


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: rp.launch(5), "launch: run is 5: it must be a Run, which rp.Run(...) makes, or rp.recipe('gpt-tiny')"),
        (lambda: rp.launch("x"), "launch: run is 'x': it must be a Run, which"),
        (
            lambda: rp.launch(rp.Run(), resume=5),
            "launch: resume is 5: it must be a text or a path or a VerifiedCheckpoint",
        ),
        (lambda: rp.launch(rp.Run(), wait_for_nodes="a"), "launch: wait_for_nodes is 'a': it must be a number"),
        (lambda: rp.launch(rp.Run(), wait_for_nodes=-1), "launch: wait_for_nodes is -1: it must be at least 0"),
        (lambda: rp.expert_table(5), "expert_table: run is 5: it must be a Run"),
        (lambda: rp.faults(5), "faults: run is 5: it must be a Run"),
        (lambda: rp.verify(5), "verify: run is 5: it must be a Run"),
        (lambda: rp.verify(rp.Run(), 6), "verify: job is 6: it must be a Job"),
        (lambda: rp.plan(5), "plan: run is 5: it must be a Run"),
        (lambda: rp.plan(rp.Run(), "all"), "plan: mode is 'all'"),
        (lambda: rp.depth("x"), "depth: layers is 'x': it must be a whole number"),
        (lambda: rp.recipe(5), "there is no recipe 5: known are gpt-tiny, "),
        (lambda: rp.recipe("moe-tiny", layout=5), "layout: name is 5: it must be a text"),
        (lambda: rp.recipe("Qwen/Qwen3-0.6B"), "; for a model of Hugging Face give its folder: --model.hf FOLDER"),
        (lambda: rp.recipe([]), "there is no recipe []: known are gpt-tiny, "),
        (lambda: rp.replay(5), "replay: path is 5: it must be a text or a path"),
        (lambda: rp.register_schedule(5), 'under a name: @register("zigzag"), not 5'),
        (lambda: JOB.reset(5), "reset: run is 5: it must be a Run"),
        (lambda: JOB.train(-1), "train: steps is -1: it must be at least 0"),
        (lambda: JOB.train(np.int64(-1)), "train: steps is -1: it must be at least 0"),
        (lambda: JOB.train(steps="3"), "train: steps is '3': it must be a whole number"),
        (lambda: JOB.train(on=3), "train: on is 3: it must be a function"),
        (lambda: JOB.evaluate(steps="x"), "evaluate: steps is 'x': it must be a whole number"),
        (lambda: JOB.evaluate(0), "evaluate: steps is 0: it must be at least 1"),
        (lambda: JOB.save(None), "save: folder is None: it must be a text or a path"),
        (lambda: JOB.save("a", 0), "save: keep_last is 0: it must be at least 1"),
        (lambda: JOB.param(5), "param: name is 5: it must be a text"),
        (lambda: JOB.weights("x"), "weights: dp is 'x': it must be a whole number"),
        (lambda: JOB.sights(5), "sights: spots is 5: it must be a list"),
        (lambda: JOB.timelines(-1), "timelines: ago is -1: it must be at least 0"),
        (lambda: STEPPER.do(5), "do: action is 5: it must be a text or an Action, such as 1F0"),
        (lambda: STEPPER.peek(None), "peek: action is None: it must be a text or an Action, such as 1F0"),
        (lambda: STEPPER.peek("0F0", dp="x"), "peek: dp is 'x': it must be a whole number"),
        (lambda: STEPPER.why([0, "F", 0]), "why: action is [0, 'F', 0]: it must be a text or an Action, such as 1F0"),
        (lambda: STEPPER.run("x"), "run: moves is 'x': it must be a whole number"),
        (lambda: STEPPER.run(-1), "run: moves is -1: it must be at least 0"),
        (lambda: STEPPER.break_on(5), "break_on: predicate is 5: it must be a function"),
        (lambda: STEPPER.swap(5), "swap: schedule is 5: it must be a text or a Schedule or a list"),
        (lambda: STEPPER.record("a", stage="x"), "record: stage is 'x': it must be a whole number"),
    ],
)
def test_a_wrong_argument_is_one_sentence(call, told):
    with pytest.raises(ValueError) as raised:
        call()
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: rp.launch(rp.Run(), resme="a"), "launch has no argument 'resme': did you mean resume?"),
        (lambda: JOB.train(stps=3), "train has no argument 'stps': did you mean steps?"),
        (lambda: JOB.save("a", x=3), "save has no argument 'x': it has folder, keep_last"),
        (lambda: rp.launch(), "launch: missing a required argument: 'run'"),
        (lambda: STEPPER.do("0F0", "1F0"), "do: too many positional arguments"),
        (lambda: rp.Mesh(pq=2), "Mesh has no field 'pq': did you mean pp?"),
        (lambda: rp.Run(zero_residnt=1), "Run has no field 'zero_residnt': did you mean zero_resident?"),
    ],
)
def test_an_argument_that_there_is_not_says_the_nearest(call, told):
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == told


def test_every_public_function_checks_its_arguments():
    own_checks = {"recipe", "register_schedule", "tab_completion", "run_experts", "chunked_attention", "flex_attention"}
    functions = {name for name in rp.__all__ if inspect.isfunction(getattr(rp, name))}
    assert own_checks <= functions
    assert {name for name in functions if not hasattr(getattr(rp, name), "__wrapped__")} == own_checks


def test_all_wrong_arguments_are_told_at_once():
    with pytest.raises(rp.ConfigError) as raised:
        JOB.train("3", on=4, ahead=-1)
    assert [fault.split(" is ")[0] for fault in raised.value.faults] == ["train: steps", "train: on", "train: ahead"]


def test_right_arguments_reach_the_function_as_they_are():
    @checked_arguments
    def many(one: int, *rest: str, two: "list[Unheard] | None" = None, **more: int) -> tuple[object, ...]:  # noqa: F821
        """Return the arguments."""
        return one, rest, two, more

    whole = np.int64(3)
    assert many(whole, "a", 5, two=[object], three="x") == (whole, ("a", 5), [object], {"three": "x"})
    assert many(1)[0] == 1
    assert (many.__name__, many.__doc__) == ("many", "Return the arguments.")
    assert list(inspect.signature(many).parameters) == ["one", "rest", "two", "more"]


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (rp.Run(steps=np.int64(3), clip=np.float32(0.5)), rp.Run(steps=3, clip=0.5)),
        (rp.Run(sequence_parallel=np.bool_(1), split=(np.int64(1), 3)), rp.Run(sequence_parallel=True, split=(1, 3))),
        (rp.Run(optim=rp.SGD(lr=torch.tensor(0.5))), rp.Run(optim=rp.SGD(lr=0.5))),
        (rp.Run(mesh=rp.Mesh(pp=torch.tensor(2))), rp.Run(mesh=rp.Mesh(2))),
        (rp.Run(steps=Fraction(3), clip=Fraction(1, 2)), rp.Run(steps=3, clip=0.5)),
        (rp.Run(optim=rp.SGD(lr=Decimal("0.5"))), rp.Run(optim=rp.SGD(lr=0.5))),
        (rp.Run(folder=Path("a"), data=rp.Text(Path("b"))), rp.Run(folder="a", data=rp.Text("b"))),
        (
            rp.Run(optim=rp.SGD(lr=Fraction(1, 8), momentum=Decimal("0.9"))),
            rp.Run(optim=rp.SGD(lr=0.125, momentum=0.9)),
        ),
        (rp.Run(optim=rp.AdamW(rates={"*": Fraction(1, 2)})), rp.Run(optim=rp.AdamW(rates={"*": 0.5}))),
        (rp.Run(folder=Path("a"), schedule=Named("b.csv")), rp.Run(folder="a", schedule="b.csv")),
        (rp.Run(data=rp.Text(Named("a"), tokenizer=Path("b"))), rp.Run(data=rp.Text("a", tokenizer="b"))),
    ],
)
def test_numbers_and_paths_of_other_libraries_in_a_run_are_python_s_own_and_can_be_written(given, plain):
    assert toml_of(plain_of(given)) == toml_of(plain_of(plain))


@pytest.mark.parametrize("lr", [Decimal("nan"), Decimal("sNaN"), Decimal("1e999"), Fraction(10**999)])
def test_a_number_that_is_none_of_python_s_own_is_one_fault(lr):
    (fault,) = rp.faults(rp.Run(optim=rp.SGD(lr=lr)))
    assert fault.startswith("optim.lr is ")


def test_paths_of_other_libraries_are_paths(tmp_path):
    with pytest.raises(rp.ConfigError, match="no-checkpoint"):
        rp.launch(rp.recipe("gpt-tiny"), resume=Named(str(tmp_path / "no-checkpoint")))
    with pytest.raises(rp.ConfigError, match="no-recording"):
        rp.replay(Named(str(tmp_path / "no-recording")))


def test_only_public_methods_with_arguments_are_wrapped():
    @checked_methods
    class Counter:
        def add(self, number: int) -> int:
            return number

        def total(self) -> int:
            return 0

        def _hidden(self, number: int) -> int:
            return number

    wrapped = {name for name, member in vars(Counter).items() if hasattr(member, "__wrapped__")}
    assert wrapped == {"add"}
    assert Counter()._hidden("x") == "x"
