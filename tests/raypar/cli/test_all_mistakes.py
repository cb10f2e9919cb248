"""All mistakes of one command are told at once, each with its fix: of words, files, fields, sizes and checkpoints."""

import pytest

import raypar as rp
from raypar.cli.train.train import TrainArgs
from raypar.cli.words.flags import named_as_typed
from raypar.cli.words.parsing import parse
from raypar.config.toml import plain_of
from tests.support.checkpoints import save_at


def faults_of(said, *words):
    """Return the faults that a command tells, in their order."""
    code, out, err = said(*words)
    assert (code, out) == (2, ""), out
    head, *lines = [line for line in err.splitlines() if not line.startswith("converting ")]  # once in a process
    return [line.removeprefix("- ") for line in lines] if "mistake" in head else [head]


def demand(faults, *wanted):
    """Assert that there is one fault for each wanted text, and no other."""
    assert len(faults) == len(wanted), faults
    for text in wanted:
        assert any(text in fault for fault in faults), (text, faults)


def test_an_axis_that_there_is_not_says_the_nearest(said):
    (fault,) = faults_of(said, "train", "--mesh.pq", "2")
    assert fault.startswith("--mesh.pq is no flag: did you mean --mesh.pp? There are --mesh.pp, --mesh.dp, --mesh.cp")


def test_unknown_flags_wrong_values_and_sizes_are_one_list(said):
    words = (
        "--zero_residnt 1 --steps ten --precision fp12 --microbatches 0 --clip --mesh.tp 3 --layers 4 --log no/dir/x"
    )
    demand(
        faults_of(said, "train", "gpt-tiny", *words.split()),
        "--zero_residnt is no flag: did you mean --zero-resident?",
        "--steps is 'ten': it must be a whole number",
        "--precision is 'fp12': it must be fp32 or bf16 or fp16",
        "microbatches is 0: it must be at least 1",
        "--clip has no value: give a number",
        "mesh.tp 3 does not divide model.heads 4: use",
        "--layers is no flag: did you mean --model.layers?",
        "there is no folder 'no/dir': make it",
    )


def test_rules_of_precision_are_told_though_another_field_is_wrong(said):
    words = "--precision fp16 --loss_scale.window 0 --nonfinite rewind --mesh.pp 40 --model.layers 80"
    demand(
        faults_of(said, "train", "gpt-tiny", *words.split()),
        "loss_scale.window is 0: it must be at least 1",
        "nonfinite is 'rewind', but no checkpoints are saved on the way: give folder and save_every",
        "mesh: 40 actors (pp 40) are more than",
    )


def test_faults_to_inject_and_spares_that_have_no_room_are_told_with_the_rest(said):
    words = "--mesh.pp 2 --max-failures 3 --spares 300 --chaos no.toml --microbatches 0"
    demand(
        faults_of(said, "train", "gpt-tiny", *words.split()),
        "microbatches is 0: it must be at least 1",
        "chaos: 'no.toml' can't be read",
        "mesh: 302 actors (pp 2 + 300 spares) are more than",
    )


@pytest.mark.parametrize("base", [("gpt-tiny",), ()])
def test_a_checkpoint_that_is_not_there_is_one_of_several_faults(said, base):
    faults = faults_of(said, "train", *base, "--resume", "nowhere", "--steps", "ten", "--mesh.tp", "3")
    demand(
        faults,
        "--resume: there is no 'nowhere': correct the path",
        "--steps is 'ten'",
        *(["mesh.tp 3 does not divide model.heads"] if base else []),  # else it is not known what is to go on
    )


def test_a_checkpoint_of_another_run_is_one_of_several_faults(said, tmp_path):
    save_at(tmp_path, 4, run=plain_of(rp.recipe("gpt-tiny", seed=3, steps=4)))
    faults = faults_of(said, "train", "gpt-tiny", "--resume", str(tmp_path), "--microbatches", "0", "--steps", "4")
    demand(
        faults,
        "microbatches is 0",
        "seed is 0, but 3 in the checkpoint: give the same",
        "step-00000004 is of a run that has taken 4 steps, and --steps is 4: for more, raypar train gpt-tiny --resume ",
    )


def test_the_command_with_more_steps_keeps_all_other_words(said, tmp_path):
    save_at(tmp_path, 4, run=plain_of(rp.recipe("gpt-tiny", steps=40)))
    words = "--resume", str(tmp_path), "--folder", str(tmp_path / "b"), "--microbatches=0"
    faults = faults_of(said, "train", *words, "--steps", "3")
    told = f"for more, raypar train --resume {tmp_path} --folder {tmp_path}/b --microbatches=0 --steps 40"
    demand(faults, told, "microbatches is 0")


def test_a_finished_run_is_told_without_a_flag_that_was_not_given(said, tmp_path):
    save_at(tmp_path, 4, run=plain_of(rp.recipe("gpt-tiny", steps=4)))
    faults = faults_of(said, "train", "--resume", str(tmp_path), "--microbatches", "0")
    demand(
        faults,
        "microbatches is 0",
        f"step-00000004 has all its 4 steps; for more, raypar train --resume {tmp_path} --microbatches 0 --steps 8",
    )


def test_a_run_folder_in_place_of_a_recipe_says_how_it_goes_on(said, tmp_path):
    (tmp_path / "run.toml").write_text("")
    told = (
        f"{str(tmp_path)!r} is a run folder: go on with --resume {tmp_path}, or take it once more with {tmp_path}/run"
    )
    demand(faults_of(said, "train", str(tmp_path), "--dry-run"), told)


def test_a_folder_with_another_run_is_one_fault(said, tmp_path):
    (tmp_path / "run.toml").write_text("")
    save_at(tmp_path / "checkpoints", 4, run=plain_of(rp.recipe("gpt-tiny", steps=4)))
    demand(
        faults_of(said, "train", "gpt-tiny", "--folder", str(tmp_path)),
        "holds a run already (run.toml): go on with it by",
    )


def test_a_file_s_faults_stand_beside_those_of_flags(said, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "gpt-tiny"\nstep = 3\nclip = "x"\nsplit = ["a"]\n[model]\nhiden = 3\nheads = 5\n')
    demand(
        faults_of(said, "train", str(file), "--mesh.pq", "3", "--save-every", "2", "--folder", "none"),
        "step is not a field: did you mean 'steps'?",
        "model.hiden is not a field: did you mean 'hidden'?",
        "clip is 'x': it must be a number",
        "split.0 is 'a': it must be a whole number",
        "--mesh.pq is no flag: did you mean --mesh.pp? There are --mesh.pp, --mesh.dp,",
        "model.heads",
        "--save-every is 2, but there is no folder for checkpoints: leave save_every out, or give folder",
    )


@pytest.mark.parametrize("base", ["gpt-tny", "gone.toml"])
def test_without_its_run_the_flags_are_looked_at_alone(said, base):
    faults = faults_of(said, "train", base, "--steps", "ten", "--mesh.tp", "3", "--mesh.pp", "0")
    demand(faults, repr(base), "--steps is 'ten'", "mesh.pp is 0")


def test_a_model_of_hugging_face_is_no_recipe(said):
    (fault,) = faults_of(said, "train", "gpt2")
    assert "there is no recipe 'gpt2'" in fault and "give its folder: --model.hf FOLDER" in fault
    (fault,) = faults_of(said, "train", "gpt-tny")
    assert "model.hf" not in fault


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tied", "true"], "--tied is no flag: did you mean --model.tied?"),
        (["--model.tied", "true"], "--model.tied is a switch, and takes no 'true': write --model.tied alone, or --mo"),
        (["--no-dry-run"], "--no-dry-run is no flag: did you mean --dry-run?"),
        (["--mesh", "3"], "--mesh is no flag: give its parts, --mesh.pp, --mesh.dp,"),
        (["--modle.layers", "3"], "--modle.layers is no flag: did you mean --model.layers?"),
        (["--epochs", "3"], "--epochs is no flag: a run has --steps; the dry run says how many passes over the data"),
        (["--num-gpus", "3"], "--num-gpus is no flag: actors are the product of --mesh.pp, --mesh.dp,"),
        (["--hlep"], "--hlep is no flag: did you mean --help?"),
        (["--quux", "3"], "--quux is no flag: see --help for all flags"),
        (["--split", "4", "x"], "--split is '4 x': it must be even or balanced or one or more whole numbers"),
        (["--precision", "fp4"], "must be fp32 or bf16 or fp16 or fp8"),
        (["--schedule", "dualpipe"], "--schedule 'dualpipe' is for 2-2 replicas: set mesh.rank_dp to (2, 2)"),
        (["--optim.rates", "head"], "it must be pairs of a text and a number, such as 'head.*' 0.5"),
        (["--tile", "x"], "it must be a whole number or pairs of a text and a whole number, such as 'head.*' 4"),
        (["--zero", "5"], "--zero is '5': it must be 0 or 1 or 2 or 3 or none"),
        (["--zero"], "--zero has no value: give 0 or 1 or 2 or 3 or none"),
        (["--ema", "x"], "--ema is 'x': it must be a number or none"),
        (["--recompute", "x"], "--recompute is 'x': it must be one or more of none or selective or full"),
        (["--optim.betas", "0.5"], "--optim.betas is '0.5': it must be 2 numbers"),
        (["--profile", "3"], "--profile is '3': it must be 2 whole numbers, as 10:13 or none"),
        (["--profile", "3:x"], "--profile is '3:x': it must be 2 whole numbers, as 10:13 or none"),
        (["--profile", "0:3"], "--profile: profile.0 is 0: it must be at least 1"),
        (["--profile=3:2"], "its first step comes after its last one: give 2:3, (2, 3)"),
        (["--track", "wandb", "foo"], "it must be one or more of tensorboard or wandb or mlflow or ray"),
        (["--optim.kind", "sdg"], "optim.kind is 'sdg': use 'adamw' or 'sgd' or 'muon'"),
        (
            ["--optim.kind", "sgd", "--optim.betas", "0.9", "0.99"],
            "--optim.betas: SGD has no field 'betas': AdamW has one: set optim.kind to 'adamw'",
        ),
        (
            ["--data.packing", "3"],
            "--data.packing: Text has no field 'packing': Examples has one: set data.kind to 'exam",
        ),
        (["--data.template", "a"], "--data.template: Text has no field 'template': Examples has one: set data.kind to"),
        (["--no-such-flag", "1", "2"], "--no-such-flag is no flag: see --help for all flags"),
        (["another"], "'another' is a word too many: only one RECIPE|FILE.toml is read"),
        (["--max", "3"], "--max is no flag: did you mean --max-failures?"),
        (["--learning-rate", "3"], "--learning-rate is no flag: did you mean --optim.lr?"),
        (["--model.n-layer", "3"], "--model.n-layer is no flag: did you mean --model.layers?"),
        (["--steps"], "--steps has no value: give a whole number"),
        (["--reshard-after-forward", "on"], "-forward is 'on': it must be true or false or except_last"),
        (["--steps="], "--steps has no value: give a whole number"),
    ],
)
def test_each_wrong_word_has_its_fix(said, words, says):
    (fault,) = faults_of(said, "train", "gpt-tiny", *words)
    assert says in fault


@pytest.mark.parametrize(("word", "value"), [("true", True), ("False", False), ("except_last", "except_last")])
def test_true_and_false_are_words_where_a_field_takes_others_too(word, value):
    found = parse(TrainArgs, ["--reshard-after-forward", word], "train", "", "gpt-tiny")
    assert found.args.reshard_after_forward == value and not found.wrong


def test_faults_on_purpose_are_told_with_the_mistakes_of_the_run(said, tmp_path):
    file = tmp_path / "chaos.toml"
    file.write_text('[[fault]]\nkind = "kil"\nactor = "pp=1"\nwhen = "STEP"\n')
    words = ("--chaos", str(file), "--dry-run")
    demand(
        faults_of(said, "train", "gpt-tiny", *words, "--steps", "0"),
        "steps is 0: it must be at least 1",
        "chaos: fault 1: kind is 'kil': it must be 'kill', 'stop', 'delay'",
        "chaos: fault 1: at is missing: give an action",
        "chaos: fault 1: InjectedFault has no field 'when': its fields are kind, actor, at, step, seconds, times",
    )
    file.write_text('[[fault]]\nkind = "kill"\nactor = "pp=1"\nat = "STEP"\nstep = 99\n')
    (late,) = faults_of(said, "train", "gpt-tiny", *words)
    assert late == "--chaos: kill 'pp=1' at STEP of step 99 never happens: the run has 20 steps"


def test_faults_of_fields_name_the_flags_that_were_typed(said, tmp_path):
    words = "--data.path no/where --micro_batch_size=0 --split 3 0 --optim.lr -1 --mesh.tp 3 --precision bf16"
    faults = faults_of(said, "train", "gpt-tiny", *words.split(), "--precision.master", "fp16", "--model.heads", "4")
    assert [fault.partition(" ")[0] for fault in faults] == [
        "--micro_batch_size",
        "--optim.lr",
        "--precision.master",
        "--mesh.tp",
        "--split",
        "--split",
        "--data.path:",
    ]
    assert "--data.path: 'no/where' cannot be read" in faults[-1]
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "gpt-tiny"\nsteps = 0\nmicrobatches = 0\n')
    demand(faults_of(said, "train", file, "--microbatches", "-1"), "steps is 0", "--microbatches is -1")
    assert faults_of(said, "verify", file, "--microbatches", "1")[0].startswith("steps is 0")


def test_items_and_short_flags_are_named_too():
    faults = ["split.1 is 2.0: it must be a whole number", "precision.compute is 'x'", "stepsize is 3", "steps is 0"]
    told = named_as_typed(faults, ["--split", "1", "--precision=bf16", "--step", "3", "--no-sequence-parallel"])
    assert told == ["--split: split.1 is 2.0: it must be a whole number", "--precision is 'x'", *faults[2:]]


def test_all_kinds_of_flags_are_read(said):
    words = "--clip none --mesh.shard none --optim.betas 0.5 0.6 --split 4 4 --optim.rates embed.* 0.5 --model.no-tied"
    more = "--no-sequence-parallel --precision=bf16 --model.kind llama --optim.lr=1e-2 --data.val_path stdlib --dry-run"
    words += " --profile 2:3"
    code, out, err = said("train", "gpt-tiny", *words.split(), *more.split())
    assert code == 0, err
    assert "ok: this run can start" in out


@pytest.mark.parametrize("command", ["verify", "plan", "step"])
def test_the_other_commands_tell_all_too(said, command):
    demand(
        faults_of(said, command, "gpt-tiny", "--log", "x", "--steps", "2.5", "--mesh.tp", "3"),
        "--log is no flag",
        "--steps is '2.5'",
        "mesh.tp 3 does not divide",
    )


@pytest.mark.parametrize("base", [(), ("gpt-tiny",)])
def test_a_pattern_without_quotes_is_one_fault_and_nothing_is_converted(said, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    files = [f"texts/{name}.txt" for name in "abc"]
    for file in files:
        (tmp_path / file).write_text("a text " * 99)
    code, _, err = said("train", *base, "--data.path", *files)
    told = "--data.path takes one word, and 3 files are given: for several files give a pattern in quotes, "
    assert (code, err.splitlines()[1]) == (2, f"{told}--data.path 'texts/*.txt'")
    code, _, err = said("train", *base, "--data.path", files[0], "--stepz", "3")
    assert code == 2 and "--stepz" in err and "converting" not in err
    code, _, err = said("sft", *files, "--model", "gone")
    assert code == 2 and "3 files have no weights: give a pattern in quotes, 'texts/*.txt', or weights" in err
    assert not (tmp_path / "cache").exists()


def test_a_size_is_no_recipe_and_says_its_flags(said):
    (fault,) = faults_of(said, "plan", "llama-8b")
    assert "as in llama-small --model.layers 32 --model.hidden 4096 --model.heads 32 --model.kv-heads 8" in fault
    assert "--model.ffn 14336 --model.seq 8192 --model.vocab 128256 for a Llama-8B" in fault
    assert "did you mean" not in fault
    (fault,) = faults_of(said, "plan", "gpt-1.3B")
    assert "as in gpt-small --model.layers 24" in fault and "--model.vocab 50304 for a GPT-1.3B" in fault


@pytest.mark.parametrize(("common", "name"), [("learning_rate", "lr"), ("d_model", "hidden"), ("n_head", "heads")])
def test_names_of_other_programs_are_known_in_files_and_constructors(said, tmp_path, common, name):
    part = "optim" if name == "lr" else "model"
    (tmp_path / "mine.toml").write_text(f'recipe = "gpt-tiny"\n[{part}]\n{common} = 1\n')
    demand(faults_of(said, "train", tmp_path / "mine.toml"), f"{part}.{common} is not a field: did you mean {name!r}?")
    with pytest.raises(TypeError, match=f"did you mean {name}"):
        (rp.AdamW if part == "optim" else rp.GPT)(**{common: 1})


def test_what_is_not_there_is_named_as_it_was_typed(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for words in (("chat", "gone"), ("generate", "gone", "x"), ("eval", "gone"), ("ckpt", "export", "gone", "x")):
        code, _, err = said(*words)
        assert code == 2 and "there is no 'gone': correct the path\n" in err
    code, _, err = said("chat", "empty")
    lacks = "'empty': there is no sound checkpoint in it: give a run, a checkpoint or a model; a model's folder has"
    assert code == 2 and err.startswith(f"raypar: {lacks} config.json, model.safetensors"), "a chat takes no step"
    (tmp_path / "config.json").write_text("{}")
    (fault,) = faults_of(said, "train", tmp_path, "--dry-run")
    assert f"is no recipe {str(tmp_path)!r}, but a folder of Hugging Face: use --model.hf {tmp_path}" in fault
