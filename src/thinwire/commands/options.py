"""Options that several commands have, and the fields of a method in `thinwire run RECIPE --method METHOD --help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from thinwire.base.errors import ConfigError, unknown
from thinwire.base.files import read_json
from thinwire.config.settings import allowed
from thinwire.elastic.store import GROUP, GROUPS, STORE, launched
from thinwire.loggers import NAMES
from thinwire.loggers.trackers import EVERY
from thinwire.methods.registry import METHODS
from thinwire.recipes import named
from thinwire.report.runs import show
from thinwire.train.optimizers import OPTIMIZERS

DIR = click.Path(path_type=Path, file_okay=False)
DATA = click.Path(path_type=Path)
"""A folder, or a file where the source takes one."""

overwrite = click.option(
    "--overwrite", is_flag=True, help="Replace what an earlier command wrote there; other files stay."
)
data = click.option(
    "--data",
    type=DATA,
    metavar="DIR",
    help="Folder with the data; that of digits and shakespeare is in the package.",
)
settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A field of the method, or schedule=table|guideline for AB if the recipe has both.",
)

of_training = [
    click.option("--group-size", metavar="G", help='Workers per group, or "world". On one machine: per node.'),
    click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps instead of the recipe's."),
    click.option("--epochs", type=click.IntRange(1), metavar="N", help="Epochs instead of the recipe's."),
    click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Examples per step, over all workers."),
    click.option("--optimizer", metavar="NAME", help=f"Instead of the recipe's: {', '.join(OPTIMIZERS)}."),
    click.option("--lr", type=float, metavar="X", help="Highest learning rate instead of the recipe's."),
    click.option("--weight-decay", type=float, metavar="X", help="Weight decay instead of the recipe's."),
    click.option("--rate", multiple=True, metavar="FIELD=VALUE", help="A field of the learning rate schedule."),
    click.option("--with", "arguments", multiple=True, metavar="NAME=VALUE", help="For the recipe's function."),
    data,
    settings,
    click.option(
        *("--log", "--log-to"),  # torchrun takes `--log`, also behind the module's name, for an option of its own
        "log",
        multiple=True,
        metavar="NAME[:PLACE]",
        help=f"Show the run in {', '.join(NAMES)}; --log-to under torchrun.",
    ),
    click.option(
        "--log-every", type=click.IntRange(1), metavar="N", help=f"Show every N-th step there; default: {EVERY}."
    ),
]
"""What a run is, besides its method and its seed."""


def of_a_group(*, required: bool) -> Callable[..., Any]:
    """Where a group of a run belongs."""
    number = click.IntRange
    return all_of(
        [
            click.option("--store", required=required, metavar="HOST:PORT", help="Where `thinwire store` listens."),
            click.option("--groups", type=number(1), required=required, metavar="N", help="Groups of the run."),
            click.option("--group", type=number(0), required=required, metavar="I", help="This one, from 0 on."),
        ]
    )


def place_of_group(store: str | None, groups: int | None, group: int | None) -> dict[str, str]:
    """What says so in the environment, of what is not there already."""
    given = {STORE: store, GROUPS: groups, GROUP: group}
    found = {name: str(value) for name, value in given.items() if value is not None}
    launched(os.environ | found)
    return found


def all_of(options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Decorate a command with several options, in their order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_WRITTEN = {"set": "settings", "with": "arguments"}
"""Options by their names in a file, where those differ from the parameters'."""


def _use_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Take what a file has as defaults: what is given on the command line counts more."""
    if path is None:
        return
    known = {own.name for own in context.command.params} - {parameter.name}
    found: dict[str, Any] = {}
    for name, value in read_json(path, "write it again, or give the options themselves").items():
        own = _WRITTEN.get(name, name.replace("-", "_"))
        if own not in known or own in _WRITTEN:
            written = {text: name for name, text in _WRITTEN.items()}
            raise unknown(f"option in `{path}`", name, [str(written.get(str(key), key)) for key in known])
        texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if not (texts or isinstance(value, str | int | float)):
            raise ConfigError(
                f"`{name}`={value!r} in `{path}` must be a text, a number, true or false, or a list of texts"
            )
        found[own] = value
    context.default_map = {**(context.default_map or {}), **found}


config = click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    is_eager=True,
    expose_value=False,
    callback=_use_config,
    metavar="FILE",
    help="Options from a JSON file, such as `best.json` of `thinwire tune`; RECIPE too.",
)


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
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = defaults.get(field.name, usual)
        notes = [allowed(hints[field.name])]
        if default is not dataclasses.MISSING:
            notes.append(f"default: {show(list(default) if isinstance(default, tuple) else default)}")
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
