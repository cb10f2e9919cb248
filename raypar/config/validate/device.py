"""The device: whether torch, which need not be imported for that, is built for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from raypar.actors.specs.types import DeviceChoice

_CUDA = re.compile(r"^cuda\b[^=]*= *(.*)$", re.MULTILINE)


def device_faults(choice: DeviceChoice) -> Iterator[str]:
    """Yield a fault if "cuda" is chosen and the torch that is installed here is built without CUDA."""
    if choice == "cuda" and _is_for_cpus():
        yield "device is 'cuda', but torch is built without CUDA here: install a build with it"


def _is_for_cpus() -> bool:
    """Return whether torch says in its version that it has no CUDA; False if that is not known."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        found = _CUDA.search((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return False
    return found is not None and found[1].strip() == "None"
