"""The page docs/reference/command_line.md, made from the table of commands.

python -m tests.support.command_line_page > docs/reference/command_line.md
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import raypar.cli
from raypar.actors.specs.run import Run
from raypar.cli.commands import COMMANDS
from raypar.cli.train.finetune import WORDING
from raypar.cli.words.flag_fields import FlagField, abouts, blank, spelled, word_alone
from raypar.cli.words.help_text import OWN, Help, default_text
from raypar.schedules.grouped import grouped
from tests.support.completed_flags import fields_of_every_part

HEAD = """\
# Command line

<!-- made by python -m tests.support.command_line_page from raypar/cli/commands.py and the classes of its arguments -->

After this page you know every command of `raypar` and its flags. `raypar COMMAND --help` prints those that most people
use, `--help all` all of them in groups, and `--help zero` those about a subject. In TOML files and in Python a flag
`--mesh.pp 2` is the field `mesh.pp` of [Run](run.md).
"""

SHELLS = """\
Shells complete commands, flags, their words, recipes, schedules and files once they have a script for it, which is
read when it is first needed:

| shell | command |
|---|---|
| bash | `raypar completion bash > ~/.local/share/bash-completion/completions/raypar` |
| zsh | `raypar completion zsh > ~/.zfunc/_raypar`, with `fpath+=~/.zfunc` before `compinit` in `~/.zshrc` |
| fish | `raypar completion fish > ~/.config/fish/completions/raypar.fish` |

`source <(raypar completion bash)` tries it in the present shell.
"""


def page() -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *_overview(), *_commands(), *_shared(), *_exit_codes()]).rstrip() + "\n"


def _help_rows() -> list[tuple[str, str]]:
    text = Path(raypar.cli.__file__).with_name("help.txt").read_text()
    return re.findall(r"^  (\S.*?)  +(\S.*)$", text, re.MULTILINE)


def _usages() -> list[tuple[str, str]]:
    return [(usage, about) for usage, about in _help_rows() if usage.startswith("raypar ")]


def _overview() -> Iterator[str]:
    """Yield a table of the commands, each once, as links to their sections."""
    yield "| command | what it does |\n|---|---|"
    rows = dict[str, str]()
    for usage, about in _usages():
        name, part = [*usage.split()[1:], ""][:2]
        if name in COMMANDS:
            words = f"{name} {part}" if part and part in COMMANDS[name].arguments else name
            rows.setdefault(words, about)
    yield from (f"| [`{words}`](#{words.replace(' ', '-')}) | {_cell(about)} |" for words, about in rows.items())
    yield ""


def _commands() -> Iterator[str]:
    seen = dict[str, str]()  # names of commands by the classes of their arguments
    for name, command in COMMANDS.items():
        yield f"## {name}\n"
        yield from (f"- `{usage}`: {_cell(about)}" for usage, about in _usages() if usage.split()[1] == name)
        yield ""
        if name == "completion":
            yield SHELLS
        for part, where in command.arguments.items():
            kind = pkgutil.resolve_name(f"raypar.cli.{where}")
            if part:
                yield f"### {name} {part}\n"
            word, metavar = word_alone(kind)
            if word and name != "sft":
                yield f"`{metavar}`: {_cell(abouts(kind)[word])}\n"
            flags = fields_of_every_part(kind)
            if issubclass(kind, Run):
                flags = _help(kind).groups(flags)[OWN] if where not in seen else []
                first = f"Those of [{seen[where]}](#{seen[where]}), and the" if where in seen else "The"
                yield f"{first} [flags of a run](#flags-of-a-run){', and these' if flags else ''}.\n"
                yield from _otherwise() if name == "sft" else ()
                seen.setdefault(where, name)
            yield from _table(flags)


def _otherwise() -> Iterator[str]:
    """Yield which flags of a run sft has not, and the defaults that it derives."""
    without = " and ".join(f"`{spelled(path)}`" for path in WORDING.without)
    yield f"It has no {without}, and these defaults:\n\n| default | flags |\n|---|---|"
    for text, flags in grouped((text, f"`{spelled(path)}`") for path, text in WORDING.defaults.items()).items():
        yield f"| {_cell(text)} | {', '.join(flags)} |"
    yield ""


def _shared() -> Iterator[str]:
    from raypar.cli.words.run_args import RunArgs

    yield "## Flags of a run\n"
    yield "Of `train`, `sft`, `step`, `verify`, `plan`. Defaults are those of `Run()`: recipes and files have others.\n"
    for title, flags in _help(RunArgs).groups(fields_of_every_part(RunArgs)).items():
        if flags:
            yield f"### {title[0].upper()}{title[1:]}\n"
            yield from _table(flags)


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n\n| code | meaning |\n|---|---|"
    yield from (f"| {code} | {_cell(about)} |" for code, about in _help_rows() if code.isdigit())


def _help(kind: type) -> Help:
    return Help("", "", kind, blank(kind), is_run=True)


def _table(flags: Iterable[FlagField]) -> Iterator[str]:
    rows = [
        f"| {_code(', '.join(filter(None, (one.short, one.spelled))))} | {_code(one.value or 'switch')} "
        f"| {_code(default_text(one))} | {_cell(one.about)} |"
        for one in flags
    ]
    if rows:
        yield "\n".join(["| flag | value | default | meaning |", "|---|---|---|---|", *rows, ""])


def _code(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`" if text not in ("none", "switch") else text


def _cell(text: str) -> str:
    return re.sub(r"``(.*?)``", r"`\1`", text).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    print(page(), end="")
