"""Where the sizes of a mesh came from that no flag set."""

from __future__ import annotations

import pytest

from raypar.cli.train.mesh_origins import mesh_origins
from raypar.cli.words.parsing import parse
from raypar.cli.words.run_args import RunArgs

LAYOUT = "ep2_tp2_dp2"


@pytest.mark.parametrize(
    ("text", "words", "origins"),
    [
        ('recipe = "gpt-small"\nsteps = 3', (), {"pp": "recipe gpt-small"}),
        ('recipe = "gpt-small"\n[mesh]\ndp = 3', (), {"pp": "recipe gpt-small", "dp": "file run.toml"}),
        ('recipe = "gpt-small"\n[mesh]\npp = 4', (), {"pp": "file run.toml"}),
        ('recipe = "gpt-small"', ("--mesh.pp", "4"), {}),
        (f'recipe = "moe-small"\nlayout = "{LAYOUT}"', (), {"dp": f"layout {LAYOUT}", "tp": f"layout {LAYOUT}"}),
        ("[mesh]\npp = 2", ("--layout", LAYOUT), {"dp": f"layout {LAYOUT}", "tp": f"layout {LAYOUT}"}),
    ],
)
def test_a_size_is_of_the_recipe_layout_or_file_that_gave_it(tmp_path, text, words, origins):
    file = tmp_path / "run.toml"
    file.write_text(text)
    given = [str(file), *words]
    assert mesh_origins(parse(RunArgs, given, "step", "", "gpt-tiny").args, given) == origins


def test_a_run_folder_is_named_as_such(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.toml").write_text("[mesh]\npp = 2")
    given = [str(tmp_path / "first")]
    args = parse(RunArgs, given, "verify", "", "gpt-tiny", {"steps": 1}).args
    assert mesh_origins(args, given) == {"pp": "run first"}
