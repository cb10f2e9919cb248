"""What attention in chunks holds and takes beside all scores at once: ``python -m tests.bench.chunks``.

Each form runs in a process of its own, whose peak is compared with that of one that only makes the inputs and their
gradients.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

FORMS = ("inputs", "all scores", "chunk 512", "chunk 256", "chunk 128", "chunk 64", "butterfly 64")


def measure(form: str, tokens: int) -> tuple[float, float]:
    """Return the peak of this process in MiB, and the seconds of a forward and a backward, the best of three."""
    import torch

    import raypar as rp
    from raypar.actors.layers.attention import _materialised

    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 4, tokens, 64, requires_grad=True) for _ in range(3))
    took = []
    for _ in range(3):
        start = time.process_time()
        if form == "inputs":
            out = q + k + v
        elif form == "all scores":
            out = _materialised(q, k, v, None, torch.nn.Identity())
        else:
            kind, size = form.split()
            mask = rp.masks.butterfly(int(size)) if kind == "butterfly" else rp.masks.causal
            out = rp.chunked_attention(q, k, v, mask=mask, chunk=int(size))
        out.sum().backward()
        took.append(time.process_time() - start)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, min(took)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--form", choices=FORMS, help="measure this one alone, in this process")
    args = parser.parse_args()
    if args.form:
        print(*measure(args.form, args.tokens))
        return
    print(f"{args.tokens} tokens, 4 heads of 64, float32, one thread: peak beyond the inputs, forward and backward")
    least = None
    for form in FORMS:
        command = [sys.executable, "-m", "tests.bench.chunks", "--tokens", str(args.tokens), "--form", form]
        peak, took = map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        least = peak if least is None else least
        print(f"{form:14s} {peak - least:8.1f} MiB {took:7.2f} s")


if __name__ == "__main__":
    main()
