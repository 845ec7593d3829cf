"""Recipes by name: those that come with Thinwire, and a user's own."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from thinwire.errors import ConfigError, ThinwireError, unknown
from thinwire.methods.registry import METHODS
from thinwire.recipes import cifar, imagenet, series, small, text
from thinwire.train.task import Recipe

RECIPES: dict[str, Callable[..., Recipe]] = {
    "digits": small.digits,
    "shakespeare": small.shakespeare,
    "vgg16-cifar10": cifar.vgg16,
    "vgg16bn-cifar10": cifar.vgg16_bn,
    "minivit-cifar10": cifar.mini_vit,
    "minivit-cifar10-tuned": cifar.mini_vit_tuned,
    "minivit-cifar100": cifar.small_vit,
    "resnet50-imagenet-local": imagenet.resnet50_local,
    "resnet50-imagenet-global": imagenet.resnet50_global,
    "vitb16-imagenet-local": imagenet.vit_b16_local,
    "vitb16-imagenet-global": imagenet.vit_b16_global,
    "vitb16-imagenet-oialr": imagenet.vit_b16_oialr,
    **{f"autoformer-ettm2-{horizon}": partial(series.autoformer, horizon) for horizon in series.HORIZONS},
    "autoformer-ettm2-tuned": series.autoformer_tuned,
    "gpt-wikitext2": text.gpt,
    "gpt124m-wikitext2": text.gpt_124m,
}
"""By the name on the command line. Each takes its model's sizes by keyword; some take the number of `workers`."""


def named(
    name: str,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    eval_every: int | None = None,
    workers: int | None = None,
) -> Recipe:
    """The recipe called `name`, which may be FILE.py:FUNCTION, over other steps or epochs if given."""
    if name in RECIPES:
        recipe = _made(RECIPES[name], workers)
    elif ":" in name or name.endswith(".py"):
        recipe = _own(name, workers)
    else:
        raise unknown("recipe", name, list(RECIPES))
    for method in recipe.suited:
        if method not in METHODS:
            raise unknown(f"method in `suited` of the recipe {recipe.name}", method, METHODS)
    if steps is not None and epochs is not None:
        raise ConfigError(f"both `--steps {steps}` and `--epochs {epochs}` say how long a run is; give one of them")
    recipe = recipe if epochs is None else recipe.over(epochs)
    # Who gives steps has chosen how many passes they are.
    other = {"steps": steps, "eval_every": eval_every, "epochs_are_passes": None if steps is None else False}
    return replace(recipe, **{field: value for field, value in other.items() if value is not None})


def _made(make: Callable[..., Recipe], workers: int | None) -> Any:
    """What a recipe's function returns; one that asks for the number of workers is told."""
    asks = workers is not None and "workers" in inspect.signature(make).parameters
    return make(workers=workers) if asks else make()


def _own(text: str, workers: int | None) -> Recipe:
    """The recipe that a user's function returns."""
    recipe = _called(text, "recipe", lambda make: _made(make, workers))
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"the recipe `{text}` returned {type(recipe).__name__}; it must return a `thinwire.recipes.Recipe`"
        )
    return recipe


def call_function(text: str, what: str) -> Any:
    """What the user's function FILE.py:FUNCTION returns."""
    return _called(text, what, lambda make: make())


def _called(text: str, what: str, call: Callable[[Callable[..., Any]], Any]) -> Any:
    make = load_function(text, what)
    try:
        return call(make)
    except ThinwireError:
        raise
    except Exception as error:
        raise ConfigError(f"the {what} `{text}` failed: {type(error).__name__}: {error}") from error


def load_function(text: str, what: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names, for a user's own recipe or model; `what` is for the errors."""
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py") or not name:
        raise ConfigError(f"the {what} {text!r} must be FILE.py:FUNCTION, such as my_{what}.py:tiny")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file `{path}` for the {what} {text!r}; give the path from here, or a whole one")
    module = _loaded(file)
    found = getattr(module, name, None)
    if callable(found):
        return found
    own = [key for key, value in vars(module).items() if inspect.isfunction(value) and _is_of(value, module)]
    if not own:
        raise ConfigError(f"`{path}` has no functions; write `{name}` there, which returns the {what}")
    raise unknown(f"function of `{path}`", name, own)


def _is_of(value: Callable[..., Any], module: ModuleType) -> bool:
    return value.__module__ == module.__name__


def _loaded(file: Path) -> ModuleType:
    """The module of a user's file, loaded once as long as it does not change."""
    whole, about = file.resolve(), file.stat()
    mark = hashlib.blake2b(f"{whole} {about.st_mtime_ns} {about.st_size}".encode(), digest_size=6).hexdigest()
    # A name of its own: two files called model.py are two modules, and no package is hidden by either.
    name = f"thinwire_user_{mark}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, whole)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    if str(whole.parent) not in sys.path:
        sys.path.append(str(whole.parent))  # what stands beside it can be imported, as from a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"`{file}` cannot be imported: {type(error).__name__}: {error}") from error
    return module
