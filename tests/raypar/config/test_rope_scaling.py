"""The scaling of a model's angles in flags and files."""

from __future__ import annotations

import raypar as rp
from raypar.cli.words.parsing import read_tables
from raypar.config.toml import load_run, parse_toml, plain_of, run_of, toml_of


def test_flags_and_files_scale_ropes_angles(tmp_path):
    llama = rp.recipe("llama-tiny").model
    scaled = read_tables(llama, ["--model.rope-scaling.kind", "yarn"])[0]
    assert scaled.rope_scaling == rp.RopeScaling()
    assert read_tables(scaled, ["--model.rope_scaling=none"]) == (llama, [])
    path = tmp_path / "run.toml"
    path.write_text('recipe = "llama-tiny"\n[model.rope_scaling]\nkind = "llama3"\nfactor = 8.0\ntrained = 64\n')
    assert load_run(path).model.rope_scaling == rp.RopeScaling("llama3", 8.0, 64)
    assert run_of(parse_toml(toml_of(plain_of(load_run(path))).encode())) == load_run(path)
