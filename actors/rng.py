"""Random seeds by name, so that random numbers never depend on which actor draws them, or when."""

from __future__ import annotations

import hashlib


def derive(seed: int, *names: object) -> int:
    """Derive a 63-bit seed from ``seed`` and ``names``; the same in every process and on every machine."""
    text = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
