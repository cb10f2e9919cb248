"""What griffe calls once it has read the package: a class has one table of its fields, no heading for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import griffe

_FIRST = (griffe.DocstringSectionKind.text, griffe.DocstringSectionKind.parameters)  # of a docstring, then its tables


class FieldTables(griffe.Extension):
    """Write the fields, attributes and properties of every class into tables of its docstring.

    Fields have a table of types, defaults and descriptions, inherited ones too. Attributes and properties whose
    docstring is text alone have another. None of them has a heading then. In these tables and in those of functions'
    arguments, the aliases of types are written out.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Make the tables.

        Args:
            pkg: The package, with its submodules, after griffe's own work on dataclasses.
        """
        objects = list(_objects(pkg))
        for one in objects:
            _write_out(one)
        tables = [(one, *_tables(one)) for one in objects if one.is_class]
        for one, sections, names in tables:
            one.docstring.parsed = sections
            for name in names & one.members.keys():
                del one.members[name]


def _objects(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Class | griffe.Function]:
    """Yield the classes, functions and methods that have docstrings."""
    for member in parent.members.values():
        if member.is_alias or member.is_attribute:
            continue
        if member.docstring and not member.is_module:
            yield member
        if not member.is_function:
            yield from _objects(member)


def _write_out(called: griffe.Function | griffe.Class) -> None:
    """Write out the types of the arguments of a function or a class, and defaults that have names."""
    for section in called.docstring.parsed:
        if section.kind is griffe.DocstringSectionKind.parameters:
            for row in section.value:
                row.annotation, row.value = written_out(row.annotation), _number(row.value)


def _number(default: griffe.Expr | str | None) -> griffe.Expr | str | None:
    """Return the number that a constant's name is short for, else the default as it is."""
    value = _value_of_alias(default) if isinstance(default, griffe.ExprName) else None
    return value if isinstance(value, str) else default


def _tables(owner: griffe.Class) -> tuple[list[griffe.DocstringSection], set[str]]:
    """Return the sections of a class's docstring with its tables, and the names that they have."""
    sections = [one for one in owner.docstring.parsed if one.kind is not griffe.DocstringSectionKind.attributes]
    listed = {row.name: row for one in owner.docstring.parsed if one not in sections for row in one.value}
    fields = [_row(one, listed) for one in _fields(owner) if not one.name.startswith("_")]
    fields = [row for row in fields if row.description]
    names = {row.name for row in fields}
    others = [row for name, row in listed.items() if name not in names]
    for row in others:  # griffe takes the type of the row above where an attribute has none
        row.annotation = written_out(getattr(owner.all_members.get(row.name), "annotation", None))
    names |= {row.name for row in others}
    others += [_attribute(one) for one in owner.all_members.values() if _is_brief(one) and one.name not in names]
    first = [one for one in sections if one.kind in _FIRST]
    if fields:
        first.append(griffe.DocstringSectionParameters(fields, title="Fields:"))
    if others:
        first.append(griffe.DocstringSectionAttributes(others))
    last = [one for one in sections if one.kind not in _FIRST]
    return first + last, names | {row.name for row in others}


def _fields(owner: griffe.Class) -> Sequence[griffe.Parameter | griffe.Attribute]:
    """Return the fields of a dataclass or a NamedTuple, in the order of its arguments."""
    if "dataclass" in owner.labels and "__init__" in owner.members:
        return list(owner.members["__init__"].parameters)[1:]
    if any(str(base) == "NamedTuple" for base in owner.bases):
        attributes = (one for one in owner.members.values() if one.is_attribute and "property" not in one.labels)
        return [one for one in attributes if one.annotation is not None]
    return []


def _row(field: griffe.Parameter | griffe.Attribute, listed: dict[str, Any]) -> griffe.DocstringParameter:
    value = field.value if isinstance(field, griffe.Attribute) else field.default
    about = listed[field.name].description if field.name in listed else getattr(field.docstring, "value", "")
    return griffe.DocstringParameter(
        name=field.name, description=about, annotation=written_out(field.annotation), value=_number(value)
    )


def _is_brief(member: griffe.Object | griffe.Alias) -> bool:
    """Return whether a member is an attribute or a property whose docstring is text alone."""
    if not member.is_attribute or member.name.startswith("_") or not member.docstring:
        return False
    return [one.kind for one in member.docstring.parsed] == [griffe.DocstringSectionKind.text]


def _attribute(member: griffe.Attribute) -> griffe.DocstringAttribute:
    return griffe.DocstringAttribute(
        name=member.name, description=member.docstring.value, annotation=written_out(member.annotation)
    )


def written_out(kind: Any) -> Any:
    """Return a type with its aliases written out: the words of a Literal, the bounds of a number.

    Args:
        kind: An expression of griffe, or text.
    """
    if isinstance(kind, griffe.ExprName):
        value = _value_of_alias(kind)
        return kind if value is None or isinstance(value, str) else written_out(value)
    if isinstance(kind, griffe.ExprBinOp):
        return griffe.ExprBinOp(written_out(kind.left), kind.operator, written_out(kind.right))
    if isinstance(kind, griffe.ExprTuple):
        return griffe.ExprTuple([written_out(one) for one in kind.elements], implicit=kind.implicit)
    if not isinstance(kind, griffe.ExprSubscript):
        return kind
    inner = kind.slice.elements if isinstance(kind.slice, griffe.ExprTuple) else [kind.slice]
    if kind.canonical_path == "typing.Literal":
        return reduce(lambda left, right: griffe.ExprBinOp(left, "|", right), map(written_out, inner))
    if kind.canonical_path == "typing.Annotated":
        return _bounded(inner[0], inner[1:])
    return griffe.ExprSubscript(kind.left, written_out(kind.slice))


def _value_of_alias(name: griffe.ExprName) -> griffe.Expr | str | None:
    """Return what a name of a type or of a number is short for; None for a class, or outside of this package."""
    try:
        target = name.parent.modules_collection[name.canonical_path]
        target = target.final_target if target.is_alias else target
    except (AttributeError, KeyError, griffe.GriffeError):
        return None
    value = target.value if target.is_attribute else None
    return value if isinstance(value, str | griffe.ExprSubscript | griffe.ExprBinOp) else None


def _bounded(number: Any, bounds: Sequence[Any]) -> Any:
    """Return a number's type with its bounds, as 0 ≤ float < 1, but for those that only keep errors out."""
    limits = {
        str(one.function): ", ".join(map(str, one.arguments)) for one in bounds if isinstance(one, griffe.ExprCall)
    }
    limits = {name: limit for name, limit in limits.items() if re.fullmatch(r"-?[\d.]{1,6}", limit)}
    least = [f"{limits[name]} {sign} " for name, sign in (("Ge", "≤"), ("Gt", "<")) if name in limits]
    most = [f" {sign} {limits[name]}" for name, sign in (("Le", "≤"), ("Lt", "<")) if name in limits]
    if least and not most:
        return f"{number} {'≥' if 'Ge' in limits else '>'} {least[0].split()[0]}"
    return "".join([*least, str(number), *most]) if most else written_out(number)
