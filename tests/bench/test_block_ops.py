"""A block dispatches at most the ops of transformers' block, and docs/benchmarks.md has the counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.block_ops import block_ops, table_of

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


@pytest.fixture(scope="module")
def found():
    pytest.importorskip("transformers")
    return block_ops()


def test_a_block_dispatches_at_most_the_ops_of_transformers(found):
    for what, (ours, theirs) in found.items():
        assert 0 < ours.kernels.total() <= theirs.kernels.total(), (what, ours.kernels, theirs.kernels)


def test_half_precision_casts_gradients_of_a_block_together_and_once_a_step(found):
    """Else bf16 adds the casts of what norms keep in fp32: two a norm of a Llama, none of a GPT."""
    for model, casts in (("Llama", 4), ("GPT", 0)):
        for action, beside in (("0B0", 1), ("0B1", 0)):
            full, half = (found[model, dtype, action][0].kernels.total() for dtype in ("fp32", "bf16"))
            assert half - full == casts + beside, (model, action)


def test_the_page_of_benchmarks_has_the_table(found):
    assert table_of(found).markdown() in PAGE.read_text(), "python -m tests.bench.block_ops --markdown"
