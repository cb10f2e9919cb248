"""The ops that a transformer block dispatches, beside one of transformers: ``python -m tests.bench.block_ops``.

On a GPU the host starts each op, which takes 5 to 10 microseconds, however small the op. Counted is what models of two
blocks dispatch more than models of one, on a CPU, where torch computes an RMSNorm op by op. raypar's actor runs in a
thread of this process. In bf16 raypar adds gradients up in fp32, and transformers has all in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

import raypar as rp
from raypar.actors.specs.precision import DType
from tests.bench.arguments import parse_words, parser_of
from tests.bench.tables import Table
from tests.support.dispatched_ops import DispatchedOps, Ops, ops_of_a_step
from tests.support.quiet_transformers import is_there
from tests.support.team import Team

HIDDEN, HEADS, KV_HEADS, SEQ, VOCAB = 32, 4, 2, 16, 256
ACTIONS = {"0F0": "F", "0B0": "B, first of a step", "0B1": "B, further"}


@contextmanager
def counted(found: dict[str, Ops], action: str) -> Iterator[None]:
    """Add the ops of an action."""
    with DispatchedOps() as mode:
        yield
    found[action] = mode.ops


def of_raypar(model: rp.GPT | rp.Llama, dtype: DType) -> dict[str, Ops]:
    """Return the ops of each action of the second step of one actor."""
    team = Team.of(rp.Run(model=model, precision=rp.Precision(dtype), microbatches=2, steps=2))
    team.step()
    return ops_of_a_step(team)


def of_transformers(model: rp.GPT | rp.Llama, dtype: DType) -> dict[str, Ops]:
    """Return the ops of each forward and backward of two microbatches with transformers' model of the same sizes."""
    import transformers

    same = {"vocab_size": VOCAB, "use_cache": False, "attn_implementation": "sdpa", "bos_token_id": 0}
    same |= {"eos_token_id": 0}
    if isinstance(model, rp.Llama):
        config = transformers.LlamaConfig(
            hidden_size=HIDDEN, num_hidden_layers=model.layers, num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, intermediate_size=model.mlp_width, max_position_embeddings=SEQ, **same,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            n_embd=HIDDEN, n_layer=model.layers, n_head=HEADS, n_positions=SEQ, n_inner=model.mlp_width,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **same,
        )  # fmt: skip
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.to(torch.bfloat16 if dtype == "bf16" else torch.float32).train()
    ids, found = torch.zeros(2, SEQ, dtype=torch.int64), dict[str, Ops]()
    for microbatch in range(2):
        with counted(found, f"0F{microbatch}"):
            loss = theirs(input_ids=ids, labels=ids).loss
        with counted(found, f"0B{microbatch}"):
            loss.backward()
    return found


def of_block(kind: type[rp.GPT | rp.Llama], run: Callable[[rp.GPT | rp.Llama], dict[str, Ops]]) -> dict[str, Ops]:
    """Return the ops of one block, by action: what a model of two blocks dispatches more than one of one block."""
    more = {"kv_heads": KV_HEADS} if kind is rp.Llama else {}
    one, two = (run(kind(layers=layers, hidden=HIDDEN, heads=HEADS, seq=SEQ, vocab=VOCAB, **more)) for layers in (1, 2))
    return {action: two[action] - one[action] for action in ACTIONS}


def block_ops() -> dict[tuple[str, DType, str], tuple[Ops, Ops]]:
    """Return raypar's ops and transformers', by kind of model, dtype and action."""
    found = {}
    for kind in (rp.Llama, rp.GPT):
        for dtype in ("fp32", "bf16"):
            ours = of_block(kind, lambda model, dtype=dtype: of_raypar(model, dtype))
            theirs = of_block(kind, lambda model, dtype=dtype: of_transformers(model, dtype))
            found |= {(kind.__name__, dtype, action): (ours[action], theirs[action]) for action in ACTIONS}
    return found


def table_of(found: dict[tuple[str, DType, str], tuple[Ops, Ops]]) -> Table:
    """Return the table of what ``block_ops`` counted."""
    rows = [
        [model, dtype, ACTIONS[action], *(str(counts.total()) for counts in (ours[0], theirs[0], ours[1], theirs[1]))]
        for (model, dtype, action), (ours, theirs) in found.items()
    ]
    header = ("block of", "dtype", "action", "raypar", "transformers", "views: raypar", "views: transformers")
    return Table("Ops of one block, of a microbatch", header, rows, words=("dtype", "action"))


def main(words: Sequence[str] | None = None) -> None:
    """Print the table, or every op."""
    parser = parser_of(__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/benchmarks.md has it")
    parser.add_argument("--by-op", action="store_true", help="print how often each op is dispatched")
    asked = parse_words(parser, words, "")
    if not is_there():
        return
    found = block_ops()
    table = table_of(found)
    print(table.markdown() if asked.markdown else table.text())
    for (model, dtype, action), both in found.items() if asked.by_op else ():
        for who, ops in zip(("raypar", "transformers"), both, strict=True):
            each = ", ".join(f"{name.removeprefix('aten.')} {count}" for name, count in ops.kernels.most_common())
            print(f"{model} {dtype} {ACTIONS[action]}, {who}: {each}")


if __name__ == "__main__":
    main()
