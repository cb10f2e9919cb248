"""A folder of Hugging Face is looked at before anything is trained, and an actor reads its own slices of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import raypar as rp
from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.conversions import TABLES
from raypar.actors.hugging_face.folder import read_json
from raypar.actors.hugging_face.weights import FolderWeights
from raypar.actors.models.build import build_model
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.actors.worker.build.parallelize import Parallelizer, axis_styles
from raypar.config.run import check_run
from raypar.config.toml import load_run
from tests.support.local_groups import local_groups
from tests.support.threads import in_threads

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def test_a_json_file_may_have_as_many_bytes_as_the_limit(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_text('{"abc": 123}')
    monkeypatch.setattr("raypar.actors.hugging_face.folder._MOST_JSON", 12)
    assert read_json(file) == {"abc": 123}
    monkeypatch.setattr("raypar.actors.hugging_face.folder._MOST_JSON", 11)
    with pytest.raises(CheckpointError, match="no JSON object of at most 11 bytes"):
        read_json(file)


def tensors_of(config=CONFIG):
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes = {"model.embed_tokens": (v, h), "lm_head": (v, h), "model.norm": (h,)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{name}_proj": (h, h) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj": (f, h) for name in ("gate", "up")} | {f"{at}.mlp.down_proj": (h, f)}
        shapes |= {f"{at}.{name}_layernorm": (h,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def made(folder, config=CONFIG, tensors=None, files=3):
    """A folder with random weights in some files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(config) if tensors is None else tensors
    homes = {name: f"model-{i % files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(homes.values()):
        save_file({name: tensors[name] for name, home in homes.items() if home == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def faults_of(call, *args, **kwargs):
    with pytest.raises(rp.ConfigError) as error:
        call(*args, **kwargs)
    return error.value.faults


def test_the_model_is_that_of_the_config(tmp_path):
    folder = made(tmp_path / "hf")
    assert rp.HF(folder) == rp.Llama(
        layers=4, hidden=16, heads=4, kv_heads=4, ffn=24, vocab=256, seq=1024, norm_eps=1e-6, hf=str(folder)
    )
    assert rp.HF(folder, seq=8, attention="fused") == replace(rp.HF(folder), seq=8, attention="fused")
    assert rp.faults(rp.Run(model=rp.HF(folder))) == []


def bytes_read(folder, mesh):
    """The bytes that each of the actors of a mesh reads, and those of its weights."""
    run = rp.Run(model=rp.HF(folder, seq=8), mesh=mesh)

    def one(group, pp):
        model = build_model(run.model, 0)
        parallelizer = Parallelizer(model, axis_styles(run, {"tp": group} if mesh.tp > 1 else {}))
        layers = model.materialize(model.stages("even", mesh.pp)[pp], 0, parallelizer.parallelize)
        return model._folder.num_read, sum(4 * p.numel() for layer in layers for p in layer.parameters())

    return [
        told
        for pp in range(mesh.pp)
        for told in in_threads(local_groups("tp", mesh.tp), lambda group, pp=pp: one(group, pp))
    ]


@pytest.mark.parametrize("mesh", [rp.Mesh(), rp.Mesh(pp=4), rp.Mesh(tp=4), rp.Mesh(pp=2, tp=2)], ids=str)
def test_every_actor_reads_its_own_slices_and_nothing_else(mesh, tmp_path):
    folder = made(tmp_path / "hf")
    read = bytes_read(folder, mesh)
    assert all(number == own for number, own in read)
    norms = 4 * 16 * 9  # whole on every tensor rank
    whole = sum(4 * tensor.numel() for tensor in tensors_of().values())
    assert sum(number for number, _ in read) == whole + (mesh.tp - 1) * norms


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_part_has_the_values_of_the_whole(dtype, tmp_path):
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of().items()}
    weights = FolderWeights(made(tmp_path / "hf", tensors=tensors))
    whole = tensors["model.layers.2.mlp.gate_proj.weight"].float()
    for dims in ({}, {0: Pieces(3, (1,))}, {1: Pieces(8, (5,))}, {0: Pieces(4, (0, 3)), 1: Pieces(2, (1,))}):
        shard = Shard((24, 16), Sharding(dims))
        wanted = shard.sharding.take(whole)
        found = torch.empty(wanted.shape)
        weights.fill("blocks.2.mlp.gate.weight", found, shard)
        assert torch.equal(found, wanted), dims


def test_queries_keys_and_values_are_thirds_of_a_transposed_tensor(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9, "n_positions": 6}
    fused = torch.randn(8, 24)
    tensors = {"h.0.attn.c_attn.weight": fused, "h.0.attn.c_attn.bias": torch.arange(24.0)}  # without the prefix
    weights = FolderWeights(made(tmp_path / "hf", config, tensors, files=1))
    for number, name in enumerate("qkv"):
        for dims in ({}, {0: Pieces(2, (1,))}, {1: Pieces(4, (2,))}):
            shard = Shard((8, 8), Sharding(dims))
            found = torch.empty(shard.shape)
            weights.fill(f"blocks.0.attn.{name}.weight", found, shard)
            assert torch.equal(found, shard.take(fused[:, 8 * number : 8 * number + 8].t())), (name, dims)
        bias = torch.empty(8)
        weights.fill(f"blocks.0.attn.{name}.bias", bias, Shard((8,)))
        assert torch.equal(bias, torch.arange(8.0 * number, 8 * number + 8))


def test_tensors_that_are_wrong_missing_or_too_many_are_listed_before_training(tmp_path):
    tensors = tensors_of()
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(24, 15)
    tensors["model.embed_tokens.weight"] = torch.zeros(256, 16, dtype=torch.int8)
    tensors["model.layers.4.mlp.up_proj.weight"] = torch.zeros(24, 16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    folder = made(tmp_path / "hf", tensors=tensors)
    at = f"model.hf {str(folder)!r}: "
    wanted = [
        f"{at}tensors are missing: model.norm.weight",
        f"{at}tensors are of another model: "
        "model.layers.1.mlp.up_proj.weight is F32 [24, 15] and the model has [24, 16]",
        f"{at}tensors are of no dtype that is read, so save it in F64, F32, F16, BF16: model.embed_tokens.weight is I8",
        f"{at}it has tensors that the model has not: model.layers.4.mlp.up_proj.weight",
    ]
    assert faults_of(check_run, rp.Run(model=rp.HF(folder))) == wanted
    faults = faults_of(check_run, rp.Run(model=rp.HF(folder), micro_batch_size=0))
    assert faults[1:] == wanted, "with the faults of the run"


def test_more_positions_than_a_folder_has_are_refused_with_the_number_of_its_own(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 6}
    folder = made(tmp_path / "hf", config, {"wpe.weight": torch.zeros(6, 8)}, files=1)
    faults = faults_of(check_run, rp.Run(model=rp.HF(folder, seq=9)))
    at = f"model.hf {str(folder)!r}: its positions are fewer than those of model.seq, so lower that: "
    assert f"{at}transformer.wpe.weight has 6, and 9 are needed" in faults


def test_files_that_end_early_and_names_that_leave_the_folder_are_told_at_once(tmp_path):
    folder = made(tmp_path / "hf")
    whole = (folder / "model-1.safetensors").read_bytes()
    (folder / "model-1.safetensors").write_bytes(whole[:-10])
    (folder / "model-2.safetensors").write_bytes(whole[:5])
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= {"model.norm.weight": "../other.safetensors", "lm_head.weight": "/etc/passwd"}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    faults = "\n".join(faults_of(rp.HF, folder))
    assert "'../other.safetensors', which leaves the folder: no such file is read" in faults
    assert "'/etc/passwd', which leaves the folder" in faults
    assert "'model-1.safetensors' ends early, 10 bytes are missing: copy it again" in faults
    assert "'model-2.safetensors' is no safetensors file, or ends in its header: copy it again" in faults
    assert len(faults.splitlines()) == 4
    (folder / "model-2.safetensors").unlink()
    missing = "model-2.safetensors is missing, in which model.safetensors.index.json has "
    assert missing in "\n".join(faults_of(rp.HF, folder))


def test_what_is_no_flag_is_told_once(tmp_path):
    folder = made(tmp_path / "hf", CONFIG | {"tie_word_embeddings": "no"})
    (fault,) = faults_of(rp.HF, folder)
    assert fault.endswith("tie_word_embeddings is 'no', and raypar's models have True or False")


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"{]", "has a broken header"),
        (b'{"a": 3}', "has a broken header"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "not the bytes that its shape needs"),
        (b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "no whole number"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}', "ends early"),
    ],
)
def test_a_broken_header_is_told(header, told, tmp_path):
    folder = made(tmp_path / "hf", files=1)
    (folder / "model-0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    (fault,) = faults_of(rp.HF, folder)
    assert told in fault


def test_pickles_are_not_read(tmp_path):
    folder = made(tmp_path / "hf")
    for path in folder.glob("*safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    (fault,) = faults_of(rp.HF, folder)
    assert "pytorch_model.bin, a pickle, which can run code and is not read: convert it" in fault
    assert "save_pretrained" in fault
    (folder / "pytorch_model.bin").rename(folder / "model.Q4.gguf")
    assert "but model.Q4.gguf: convert it with transformers" in faults_of(rp.HF, folder)[0]
    (folder / "model.Q4.gguf").rename(folder / "adapter_config.json")
    assert "holds an adapter, and not the model: give the model" in faults_of(rp.HF, folder)[0]


def test_a_folder_that_is_no_model_is_told(tmp_path):
    assert "is an empty folder: a model's folder has config.json, model.safetensors" in faults_of(rp.HF, tmp_path)[0]
    assert "is no folder: a model's folder has config.json" in faults_of(rp.HF, tmp_path / "nowhere")[0]
    (tmp_path / "config.json").write_text("[1]")
    assert "is no JSON object" in faults_of(rp.HF, tmp_path)[0]
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in faults_of(rp.HF, tmp_path)[0]


def test_an_unknown_architecture_is_told_with_what_would_work(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = made(tmp_path / "hf", CONFIG | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    (fault,) = faults_of(rp.HF, folder)
    assert "its model_type is 'mamba' (MambaForCausalLM), and raypar has " + ", ".join(TABLES) in fault
    assert "pip install 'raypar[transformers]'" in fault
    assert "'llama' is the nearest" in faults_of(rp.HF, made(tmp_path / "b", CONFIG | {"model_type": "llamas"}))[0]
    assert "has no model_type" in faults_of(rp.HF, made(tmp_path / "c", CONFIG | {"model_type": 3}))[0]


def test_all_that_a_model_of_ours_can_not_do_is_told_at_once(tmp_path):
    wrong = {
        "hidden_act": "relu",
        "attention_bias": True,
        "attention_dropout": 0.1,
        "rope_scaling": {"rope_type": "longrope", "factor": 4.0},
        "quantization_config": {"bits": 4},
        "vocab_size": "many",
    }
    faults = faults_of(rp.HF, made(tmp_path / "hf", CONFIG | wrong, tensors_of()))
    assert [fault.partition(": ")[2] for fault in faults] == [
        "its weights are quantized: save it in float32 or bfloat16 first, with transformers",
        "hidden_act is 'relu', and raypar's models have 'silu' or 'swish'",
        "attention_bias is True, and raypar's models have False",
        "vocab_size is 'many', and must be a whole number above 0",
        "the type of rope is 'longrope', and raypar's models have "
        "'default' or 'linear' or 'dynamic' or 'yarn' or 'llama3'",
    ]


def test_dropouts_that_differ_are_told_unless_one_is_given(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9, "n_positions": 6}
    folder = made(tmp_path / "hf", config | {"resid_pdrop": 0.1, "attn_pdrop": 0.0, "embd_pdrop": 0.1}, {}, files=1)
    (folder / "model.safetensors.index.json").unlink()
    save_file({}, folder / "model.safetensors")
    (fault,) = faults_of(rp.HF, folder)
    assert "give one for all, as dropout=0.0" in fault
    assert rp.HF(folder, dropout=0.2).dropout == 0.2


def test_a_wrong_field_is_told(tmp_path):
    folder = made(tmp_path / "hf")
    assert "Llama has no field 'lenght'" in faults_of(rp.HF, folder, lenght=3)[0]


def test_a_file_names_the_folder_and_a_run_that_was_written_does_not_need_it(tmp_path):
    from raypar.config.toml import plain_of, run_of

    folder = made(tmp_path / "hf")
    (tmp_path / "run.toml").write_text(f'steps = 3\n[model]\nhf = "{folder}"\nseq = 64\n')
    run = load_run(tmp_path / "run.toml")
    assert run.model == rp.HF(folder, seq=64)
    plain = plain_of(run)
    shutil.rmtree(folder)
    assert run_of(plain).model == run.model
    assert "model.hf" in faults_of(load_run, tmp_path / "run.toml")[0]
    assert "hf' is no folder: a model's folder has" in faults_of(check_run, run)[0]
