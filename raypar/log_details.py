"""The mark of log messages that a terminal leaves out, and that files have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DETAIL: Mapping[str, str] = MappingProxyType({"brief": ""})  # the ``extra`` of a message; another text: its short form
