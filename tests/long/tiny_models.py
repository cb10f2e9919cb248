"""Tiny models with unusual but legal configs, beside transformers, on every layout that is accepted for them.

    python -m tests.long.tiny_models [--seed N] [--count 60] [--only KIND] [--after NUMBER]

Of 60, 37 are of the nine types that raypar has, and 23 of other types, which transformers' modules compute. Each is
written by save_pretrained, and runs on threads: on one actor, pp=2, tp=2, zero=3, cp=2 and ep=2. Log-probabilities and
gradients of a step are compared with transformers' (each text alone, in a fresh module), what is exported bit by bit
and key by key, and in transformers again. Prints what a layout is refused for, and a line for each model: layouts, the
largest distance of a log-probability, and that of a gradient by the largest one of its tensor. Exit code 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter

from tests.support.quiet_transformers import is_there
from tests.support.tiny_models import NATIVE, drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", help="a model_type")
    parser.add_argument("--after", type=int, default=-1, help="number of a model: only later ones, after a cut")
    asked = parser.parse_args()
    if not is_there():
        return 0
    from tests.support.beside_transformers import LAYOUTS, compared

    start, reasons, outcomes = time.perf_counter(), Counter[str](), []
    for number, tiny in enumerate(drawn(asked.seed, asked.count)):
        if number <= asked.after or (asked.only and tiny.kind != asked.only):
            continue
        before = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = compared(tiny, folder)
        outcomes.append(found)
        reasons.update(f"{name}: {_short(why)}" for name, why in found.refused.items())
        layouts = "  ".join(f"{name if name in found.accepted else '-':6}" for name in LAYOUTS)
        how = "own" if tiny.kind in NATIVE else "theirs"
        far = f"logs {found.logs:.1e}  gradients {found.gradient:.1e}"
        print(f"{number:2} {tiny.kind:14} {how:6} {tiny.rope:8} {layouts}  {far}  {time.perf_counter() - before:.0f} s")
        for line in found.wrong:
            print(f"   DIFFERS {line}")
        if found.wrong:
            print(f"   {tiny}")
        sys.stdout.flush()
    print("Refused:")
    for why, count in reasons.most_common():
        print(f"{count:4} {why}")
    wrong = sum(bool(found.wrong) for found in outcomes)
    accepted, refused = sum(len(one.accepted) for one in outcomes), sum(len(one.refused) for one in outcomes)
    logs, gradient = max(one.logs for one in outcomes), max(one.gradient for one in outcomes)
    print(f"{len(outcomes)} models, {accepted} layouts, {refused} refused, {wrong} models differ;", end=" ")
    print(f"log-probabilities within {logs:.1e}, gradients within {gradient:.1e};", end=" ")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(wrong > 0)


def _short(why: str) -> str:
    """Return a reason without numbers, names and paths."""
    return re.sub(r"'[^']*'|\d+", "..", why)[:150]


if __name__ == "__main__":
    sys.exit(main())
