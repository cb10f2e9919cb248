"""Train a small GPT on a folder of your own text, through two pipeline stages.

python examples/train_your_text.py path/to/texts [steps]
"""

from __future__ import annotations

import logging
import sys

import raypar as rp


def main(path: str, steps: int = 200) -> rp.Evaluation:
    run = rp.Run(
        model=rp.GPT(layers=4, hidden=128, heads=4, seq=128, dropout=0.1),
        mesh=rp.Mesh(pp=2),
        schedule="1f1b",
        microbatches=8,
        micro_batch_size=4,
        data=rp.Text(path),
        optim=rp.AdamW(lr=1e-3, warmup=min(20, steps // 4), decay="cosine"),
        steps=steps,
    )
    with rp.launch(run) as job:
        job.train()
        return job.evaluate()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200))
