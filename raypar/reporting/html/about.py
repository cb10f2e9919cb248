"""The sections of a report on the run itself: where and when it ran, what it was set to, and what it wrote."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.config.toml import flat, plain_of
from raypar.reporting.html.markup import VALUE, concatenated, element, folded, html_table, note, section
from raypar.reporting.run_folder.read import Past

_TEXT = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\[[\d, ]*\])"""
_SAMPLE = re.compile(rf"\S+ INFO sample after step (\d+): {_TEXT} > {_TEXT}")
_SHOWN, _MOST = 2, 40  # samples that are shown at once, and at all


def circumstances(past: Past) -> str:
    """Say when, on what and with what a run began, in a line; "" if its folder does not say."""
    known = past.provenance
    packages = [f"{name} {known[name]}" for name in ("raypar", "torch", "ray", "python") if name in known]
    date = known.get("started", "")[:16].replace("T", " ")
    parts = [date, known.get("host", ""), known.get("hardware", ""), ", ".join(packages)]
    return " \u00b7 ".join(part for part in parts if part)


def samples(past: Past) -> Markup:
    """Show what the model wrote while it was trained, the latest first; nothing of a run without samples."""
    found = [*_samples(past.log)][::-1][:_MOST]
    if not found:
        return Markup()
    first, rest = found[:_SHOWN], found[_SHOWN:]
    older = [folded(f"{len(rest)} earlier ones", *rest)] if rest else []
    return section("Samples", *first, *older, note("Marked: what was given. The rest is what the model made of it."))


def _samples(log: list[str]) -> Iterator[Markup]:
    for line in log:
        if (parts := _SAMPLE.fullmatch(line)) is None:
            continue
        with suppress(ValueError, SyntaxError):
            given, made = (str(ast.literal_eval(text)) for text in parts.groups()[1:])
            text = element("p", element("mark", given), made, class_="sample")
            yield element("div", element("h3", f"after step {int(parts[1]):,}"), text)


def provenance_list(past: Past) -> Markup:
    """List where the run comes from."""
    if not past.provenance:
        return section("Provenance", note("The folder does not say where it comes from."))
    return section("Provenance", html_table(["name", "value"], past.provenance.items(), ["", VALUE]))


def _defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of a run with a model of this kind; that it has experts is no default."""
    kind = Llama() if model.get("kind") == "llama" else GPT()
    if not isinstance(model.get("moe"), dict):
        return flat(plain_of(Run(model=kind)))
    usual = flat(plain_of(Run(model=replace(kind, moe=MoE()))))
    del usual["model.moe.experts"]
    return usual


def configuration(past: Past) -> Markup:
    """List the settings of the run that differ from the defaults of a Run and, folded, all of them."""
    usual, settings = _defaults(past.config.get("model", {})), flat(past.config)
    changed = {key: str(value) for key, value in settings.items() if key not in usual or usual[key] != value}
    heads, kinds = ["setting", "value"], ["", VALUE]
    shown = html_table(heads, changed.items(), kinds) if changed else note("All settings are the defaults.")
    rows = [[key, element("mark", changed[key]) if key in changed else str(value)] for key, value in settings.items()]
    text = note(concatenated(element("mark", "marked"), ": not the default."))
    whole = folded(f"All {len(rows):,} settings", html_table(heads, rows, kinds), text)
    return (
        section("Configuration", note("What is not the default."), shown, whole)
        if rows
        else section("Configuration", note("It could not be read."))
    )
