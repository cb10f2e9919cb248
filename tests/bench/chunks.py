"""What attention in chunks holds and takes beside all scores at once: ``python -m tests.bench.chunks``.

Each form runs in a process of its own, whose peak is compared with that of one that only makes the inputs and their
gradients.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence

from tests.bench.arguments import parse_words, parser_of, printed

FORMS = ("inputs", "all scores", "chunk 512", "chunk 256", "chunk 128", "chunk 64", "butterfly 64")


def measure(form: str, tokens: int) -> tuple[float, float]:
    """Return the peak of this process in MiB, and the seconds of a forward and a backward, the best of three."""
    import torch

    import raypar as rp
    from raypar.actors.layers.attention.attention import _materialised

    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 4, tokens, 64, requires_grad=True) for _ in range(3))
    took = []
    for _ in range(3):
        start = time.process_time()
        if form == "inputs":
            out = q + k + v
        elif form == "all scores":
            out = _materialised(q, k, v, None, torch.nn.Identity(), None)
        else:
            kind, size = form.split()
            mask = rp.masks.butterfly(int(size)) if kind == "butterfly" else rp.masks.causal
            out = rp.chunked_attention(q, k, v, mask=mask, chunk=int(size))
        out.sum().backward()
        took.append(time.process_time() - start)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, min(took)


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--form", choices=FORMS, help="measure this one alone, in this process")
    asked = parse_words(parser, words, "--tokens 64")
    if asked.form:
        print(*measure(asked.form, asked.tokens))
        return
    print(f"{asked.tokens} tokens, 4 heads of 64, float32, one thread: peak beyond the inputs, forward and backward")
    least = None
    for form in FORMS:
        alone = printed("tests.bench.chunks", ("--tokens", asked.tokens, "--form", form), here=asked.smallest)
        peak, took = map(float, alone.split())
        least = peak if least is None else least
        print(f"{form:14s} {peak - least:8.1f} MiB {took:7.2f} s")


if __name__ == "__main__":
    main()
