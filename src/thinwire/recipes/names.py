"""Recipes by name: those of installed packages, and a user's own."""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from thinwire.base.errors import ConfigError, ThinwireError, unknown
from thinwire.methods.registry import METHODS
from thinwire.train.optimizers import with_optimizer_named
from thinwire.train.task import Recipe

GROUP = "thinwire.recipes"
"""The entry point group. A recipe's function takes its model's sizes by keyword; it may ask for `workers`."""
_OWN = ("thinwire.recipes.", "thinwire.")
_CHECKOUT = Path(__file__).parents[3] / "pyproject.toml"


def installed() -> Mapping[str, EntryPoint]:
    """The recipes of all installed packages, Thinwire's own first."""
    return _found(tuple(sys.path), _CHECKOUT)


@functools.cache
def _found(path: tuple[str, ...], checkout: Path) -> Mapping[str, EntryPoint]:
    """Once: reading the metadata of all packages on `path` takes some 10 ms, and a search asks for every trial."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(_entries(checkout), key=lambda entry: [not entry.module.startswith(own) for own in _OWN]):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two packages have a recipe `{entry.name}`: `{other.value}` and `{entry.value}`; uninstall one of them"
            )
    return found


def _entries(checkout: Path) -> Iterator[EntryPoint]:
    """Those in package metadata, but Thinwire's own from pyproject.toml in a checkout: its metadata may be stale."""
    project = tomllib.loads(checkout.read_text(encoding="utf-8"))["project"] if checkout.is_file() else {}
    in_checkout = project.get("name") == "thinwire"
    if in_checkout:
        yield from (EntryPoint(name, value, GROUP) for name, value in project["entry-points"][GROUP].items())
    for entry in entry_points(group=GROUP):
        if not (in_checkout and entry.dist and entry.dist.name == "thinwire"):
            yield entry


def load(name: str) -> Callable[..., Recipe]:
    """The function of the installed recipe `name`."""
    known = installed()
    if name not in known:
        raise unknown("recipe", name, list(known))
    try:
        return known[name].load()
    except Exception as error:  # another package's import may raise anything
        raise ConfigError(
            f"the recipe `{name}` (`{known[name].value}`) cannot be imported: {type(error).__name__}: {error}"
        ) from error


def named(
    name: str,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    eval_every: int | None = None,
    batch_size: int | None = None,
    optimizer: str | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    validate: bool = False,
    workers: int | None = None,
    arguments: Iterable[str] = (),
    rate: Iterable[str] = (),
) -> Recipe:
    """The recipe called `name`, which may be FILE.py:FUNCTION, with these settings in place of its own.

    `arguments` are NAME=VALUE for its function, `rate` FIELD=VALUE of its learning rate schedule.
    """
    make = function_named(name)
    recipe = _called(make, f"recipe `{name}`", workers, given_arguments(make, name, arguments))
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"the recipe `{name}` returned {type(recipe).__name__}; it must return a `thinwire.recipes.Recipe`"
        )
    for method in recipe.suited:
        if method not in METHODS:
            raise unknown(f"method in `suited` of the recipe {recipe.name}", method, METHODS)
    if steps is not None and epochs is not None:
        raise ConfigError(f"both `--steps {steps}` and `--epochs {epochs}` say how long a run is; give one of them")
    recipe = recipe if batch_size is None else recipe.with_batch(batch_size)
    recipe = recipe if epochs is None else recipe.over(epochs)
    recipe = recipe if optimizer is None else with_optimizer_named(recipe, optimizer)
    recipe = recipe.with_optimizer(lr=lr, weight_decay=weight_decay)
    recipe = recipe.on_validation() if validate else recipe
    recipe = recipe.with_rate(dict(pair(text, "--rate") for text in rate))
    # A user who gives steps has chosen how many passes they are.
    other = {"steps": steps, "eval_every": eval_every, "epochs_are_passes": None if steps is None else False}
    return recipe.replace(**{field: value for field, value in other.items() if value is not None})


def function_named(name: str) -> Callable[..., Any]:
    """The function of a recipe: by its name, or FILE.py:FUNCTION."""
    return load_function(name, "recipe") if ":" in name or name.endswith(".py") else load(name)


def call_model(text: str) -> tuple[nn.Module, Any]:
    """The model that the user's function FILE.py:FUNCTION returns, and its inputs or None."""
    built = _called(load_function(text, "model"), f"model `{text}`")
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{text} returns {type(model).__name__}; it must return an nn.Module, or one and its inputs: "
            "a tensor, a tuple of arguments, or a dict of them by name"
        )
    return model, inputs


def pair(text: str, flag: str) -> tuple[str, str]:
    """NAME=VALUE in its two parts."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"`{flag} {text}` must be NAME=VALUE")
    return name, value


def given_arguments(make: Callable[..., Any], recipe: str, texts: Iterable[str]) -> dict[str, Any]:
    """Keyword arguments of a recipe's function, from NAME=VALUE: numbers, true, false and none, or else texts."""
    given = {name: _value(text) for name, text in (pair(text, "--with") for text in texts)}
    taken = inspect.signature(make).parameters
    known = [name for name, own in taken.items() if own.kind is not own.VAR_KEYWORD]
    for name in given:
        if len(known) == len(taken) and name not in known:
            raise unknown(f"argument of the recipe {recipe}", name, known)
    return given


def _value(text: str) -> Any:
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _called(
    make: Callable[..., Any], what: str, workers: int | None = None, arguments: Mapping[str, Any] | None = None
) -> Any:
    """What a function returns; one that has a parameter `workers` is given the number of them."""
    asks = workers is not None and "workers" in inspect.signature(make).parameters
    try:
        return make(**({"workers": workers} if asks else {}) | dict(arguments or {}))
    except ThinwireError:
        raise
    except Exception as error:
        raise ConfigError(f"the {what} failed: {type(error).__name__}: {error}") from error


def load_function(text: str, what: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names, for a user's own recipe or model; `what` is used in errors."""
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py") or not name:
        raise ConfigError(f"the {what} {text!r} must be FILE.py:FUNCTION, such as my_{what}.py:tiny")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file `{path}` for the {what} {text!r}; give a relative or an absolute path")
    module = _loaded(file)
    found = getattr(module, name, None)
    if callable(found):
        return found
    functions = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    own = [key for key, value in functions.items() if value.__module__ == module.__name__]
    if not own:
        raise ConfigError(f"`{path}` has no functions; write `{name}` there, which returns the {what}")
    raise unknown(f"function of `{path}`", name, own)


def _loaded(file: Path) -> ModuleType:
    """The module of a user's file, loaded once unless the file changes."""
    whole, about = file.resolve(), file.stat()
    mark = hashlib.blake2b(f"{whole} {about.st_mtime_ns} {about.st_size}".encode(), digest_size=6).hexdigest()
    # A unique name: two files called model.py are two modules, and neither hides a package.
    name = f"thinwire_user_{mark}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, whole)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    if str(whole.parent) not in sys.path:
        sys.path.append(str(whole.parent))  # modules next to it can be imported, as from a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"`{file}` cannot be imported: {type(error).__name__}: {error}") from error
    return module
