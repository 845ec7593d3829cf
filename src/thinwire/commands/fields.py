"""A method's fields in the help of `thinwire run RECIPE --method METHOD --help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import click

from thinwire.config.settings import allowed
from thinwire.methods.registry import METHODS
from thinwire.recipes import named
from thinwire.report.runs import show


class WithFields(click.Command):
    """A command whose help also describes the fields of the method that `--method` names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = list(args)  # click prints the help before it looks at other options
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        given, *_ = self.make_parser(ctx).parse_args(ctx.meta[__name__])
        method = str(given.get("method", "")).partition(":")[0]
        if method not in METHODS:
            formatter.write_paragraph()
            formatter.write_text("With `--method METHOD` this help also lists the method's fields.")
            return
        recipe = given["recipe"]  # a placeholder of click's where none was typed
        defaults = named(recipe).defaults(method) if isinstance(recipe, str) else {}
        with formatter.section(f"Fields of {method} (--set FIELD=VALUE)"):
            formatter.write_dl(list(rows(METHODS[method].config, defaults)))


def rows(config: type, defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field's name, and its docstring with what it takes and its default, by the recipe where that has one."""
    hints, docstrings = typing.get_type_hints(config), field_docstrings(config)
    for field in dataclasses.fields(config):
        default = defaults.get(field.name, _default(field))
        notes = [allowed(hints[field.name])]
        notes += [] if default is dataclasses.MISSING else [f"default: {show(_plain(default))}"]
        yield field.name, f"{docstrings.get(field.name, '')}  [{'; '.join(notes)}]".strip()


def field_docstrings(cls: type) -> dict[str, str]:
    """The text under each field in the source of a class and of those it derives from."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        [body] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
