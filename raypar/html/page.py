"""The page: a run's report in one file, from the title down to the configuration."""

from __future__ import annotations

from typing import Any

from raypar.folder.read import Past
from raypar.html import sections
from raypar.html.figures import History, headline
from raypar.html.markup import Markup, element, joined
from raypar.html.style import STYLE


def page(past: Past) -> str:
    """The whole HTML of a run folder."""
    history = History.of(past)
    title = ", ".join([_model(past.config), *([past.schedule.name] if past.schedule else [])])
    tiles = [
        element("div", element("b", value), element("span", name), class_="tile")
        for name, value in headline(past, history)
    ]
    body = element(
        "body",
        element("header", element("h1", title), element("p", f"raypar run in {past.folder}")),
        element("div", *tiles, class_="tiles"),
        sections.losses(history),
        sections.speed(history),
        sections.steps(past),
        sections.memory(history),
        sections.messages(past),
        sections.checkpoints(past),
        sections.configuration(past),
    )
    head = element(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"{past.folder.name}: {title}"),
        element("style", STYLE),
    )
    return joined(Markup("<!DOCTYPE html>\n"), element("html", head, body, lang="en"), Markup("\n"))


def _model(config: dict[str, Any]) -> str:
    """The model and its mesh in a few words."""
    model, mesh = config["model"], config["mesh"]
    names = [f"{model[name]} {name}" for name in ("layers", "hidden") if isinstance(model.get(name), int)]
    axes = [f"{axis}={size}" for axis, size in mesh.items() if size != 1]
    kind = "Llama" if model.get("kind") == "llama" else "GPT"
    what = f"{kind} of {names[0]}, {', '.join(names[1:])}" if names else "a model of the user's own layers"
    return f"{what} on {' '.join(axes) or 'one actor'}"
