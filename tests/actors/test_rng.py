"""Seeds are a function of what they are for, the same everywhere."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.rng import derive

PARTS = st.lists(st.one_of(st.integers(), st.text(st.characters(codec="ascii", categories=["L", "N"]))), max_size=4)


def test_known_values():
    """A change would change every run's weights, data order and dropout."""
    assert derive(0) == 4246866556266386882
    assert derive(1, "layer", 2, 3, 4) == 8161668364559509980


def test_another_process_derives_the_same():
    code = "from raypar.actors.rng import derive; print(derive(7, 'init', 'blocks.0.attn', 3))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(found) == derive(7, "init", "blocks.0.attn", 3)


@given(st.integers(), PARTS)
def test_a_seed_fits_torch(seed, parts):
    assert 0 <= derive(seed, *parts) < 2**63


@given(st.integers(0, 9), PARTS, st.integers(0, 9), PARTS)
def test_other_names_have_other_seeds(seed, parts, other, others):
    same = [str(part) for part in (seed, *parts)] == [str(part) for part in (other, *others)]
    assert (derive(seed, *parts) == derive(other, *others)) == same


def test_names_do_not_run_together():
    assert len({derive(0, "a", "bc"), derive(0, "ab", "c"), derive(0, "abc"), derive(0, "a", "b", "c")}) == 4
