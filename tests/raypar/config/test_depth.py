"""A run by its depth: the sizes of nanochat, on the command line too, and numbers that are out of range."""

import pytest

from raypar.cli.plan.planning import PlanArgs, run_plan
from raypar.cli.words.parsing import parse
from raypar.config.recipes import depth
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.planner.sizes.parameters import num_parameters


def test_twenty_layers_are_the_speedrun_of_nanochat():
    """Its d20 has 561 M parameters, 1280 wide with 10 heads, and takes 21,400 steps of 524,288 tokens."""
    run = depth(20, vocab=65536)
    assert (run.model.layers, run.model.hidden, run.model.heads) == (20, 1280, 10)
    assert num_parameters(run.model) == pytest.approx(561e6, rel=1e-3)
    assert run.steps == pytest.approx(21400, rel=1e-3)
    assert run.microbatches * run.micro_batch_size * run.model.seq == 524288
    assert run.optim.adamw_lr * run.optim.rates["embed.*"] == pytest.approx(0.2 * (1280 / 768) ** -0.5)


@pytest.mark.parametrize("layers", [1, 3, 12, 33])
def test_every_depth_is_a_run_without_faults_whose_batch_replicas_share(layers):
    one, four = depth(layers), depth(layers, dp=4)
    assert check_run(four)
    assert four.microbatches * 4 == one.microbatches
    assert (four.model, four.steps, four.optim) == (one.model, one.steps, one.optim)


def test_flags_change_what_follows_from_the_depth():
    words = ["--depth", "4", "--mesh.dp", "2", "--model.vocab", "512", "--steps", "7"]
    run = parse(PlanArgs, words, "plan", "", "gpt-small").args.run()
    assert (run.model, run.microbatches, run.steps) == (depth(4, vocab=512).model, 128, 7)


def test_a_plan_of_a_depth_keeps_its_batch():
    told = run_plan(["--depth", "20", "--model.vocab", "65536", "--gpus", "8", "--mesh.pp", "1"])
    assert "561.3 M parameters in bf16, 256 sequences of 2,048 tokens a step" in told


def test_numbers_out_of_range_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        depth(0, dp=3, vocab=0)
    told = "\n".join(error.value.faults)
    for part in ("depth is 0", "dp is 3", "vocab is 0"):
        assert part in told
    with pytest.raises(ConfigError, match="depth is -3"):
        run_plan(["--depth", "-3", "--gpus", "8"])
