"""Seeds by name: randomness depends on what is drawn for what, never on which actor draws it or when."""

from __future__ import annotations

import hashlib


def derive(seed: int, *names: object) -> int:
    """A 63-bit seed for ``names`` under ``seed``; the same in every process and on every machine."""
    text = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
