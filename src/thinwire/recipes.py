"""Whole experiments, each a function that returns a `Recipe`."""

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
from typing import Any, cast

from torch.optim import AdamW

from thinwire.errors import ConfigError, ThinwireError, unknown
from thinwire.methods.registry import METHODS
from thinwire.train import data, models
from thinwire.train.task import CLASSIFY, PREDICT, Recipe, Suited

__all__ = ["RECIPES", "Recipe", "Suited", "digits", "load_function", "named", "shakespeare"]


def digits() -> Recipe:
    """A small CNN with BatchNorm on 8×8 digits; a run takes seconds.

    Learning rate and weight decay are the best of plain training on 300 digits of the training part
    (`benchmarks/tune_recipe.py`), where everything between 0.01 and 5 is equal within the noise. What suits single
    methods was found there too (`benchmarks/rivals`).
    """
    return Recipe(
        name="digits",
        summary="a small CNN on 8×8 handwritten digits (accuracy on 540 held out)",
        task=CLASSIFY,
        source=data.digits,
        model=lambda source: models.DigitNet(),
        optimizer=partial(AdamW, lr=3e-3, weight_decay=3.0),
        steps=600,
        batch=64,
        clip=1.0,
        eval_every=25,
        suited={
            "oialr": Suited({"delay": 0.1, "cutoff": 0.2}),
            "daso": Suited(
                {
                    "max_skips": 32,
                    "warmup_epochs": 1,
                    "cooldown_epochs": 1,
                    "compensate": True,
                    "plateau_patience": None,
                }
            ),
            "powersgd": Suited({"rank": 1}),
            "localsgd": Suited({"every": 48}),
            "diloco": Suited({"every": 24, "outer_lr": 0.4, "warmup": 0.05}),
            "topk": Suited({"density": 0.001, "warmup": 0.05}),
        },
    )


def shakespeare() -> Recipe:
    """A character GPT of 0.8 million parameters on Tiny Shakespeare; a run takes minutes.

    Learning rate and weight decay are the best of plain training on 32,768 characters of the training part
    (`benchmarks/tune_recipe.py`, one seed), and so is what suits single methods (`benchmarks/rivals`).
    """
    return Recipe(
        name="shakespeare",
        summary="a character GPT on Tiny Shakespeare (perplexity a character, 32,768 held out)",
        task=PREDICT,
        source=data.shakespeare,
        model=lambda source: models.CharGPT(vocabulary=len(cast(data.Text, source).characters)),
        optimizer=partial(AdamW, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.03),
        steps=800,
        batch=32,
        clip=1.0,
        eval_every=100,
        suited={
            "ab": Suited({"merge": "trained"}),
            "oialr": Suited({"delay": 0.8, "layer_fraction": 0.25}),
            "daso": Suited({"compensate": True}),
            "powersgd": Suited({"rank": 16, "start_step": 0.05}),
            "localsgd": Suited({"every": 4, "warmup": 0.05}),
            "diloco": Suited({"every": 12, "outer_momentum": 0.5, "warmup": 0.05}),
            "topk": Suited({"density": 0.05, "warmup": 0.05}),
            "onebit": Suited({"warmup": 0.05}),
        },
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"digits": digits, "shakespeare": shakespeare}


def named(name: str, *, steps: int | None = None, eval_every: int | None = None) -> Recipe:
    """The recipe called `name`, which may be FILE.py:FUNCTION, with other steps if given."""
    if name in RECIPES:
        recipe = RECIPES[name]()
    elif ":" in name or name.endswith(".py"):
        recipe = _own(name)
    else:
        raise unknown("recipe", name, list(RECIPES))
    for method in recipe.suited:
        if method not in METHODS:
            raise unknown(f"method in `suited` of the recipe {recipe.name}", method, METHODS)
    steps = recipe.steps if steps is None else steps
    return replace(recipe, steps=steps, eval_every=recipe.eval_every if eval_every is None else eval_every)


def _own(text: str) -> Recipe:
    """The recipe that a user's function returns."""
    recipe = call_function(text, "recipe")
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"the recipe `{text}` returned {type(recipe).__name__}; it must return a `thinwire.recipes.Recipe`"
        )
    return recipe


def call_function(text: str, what: str) -> Any:
    """What the user's function FILE.py:FUNCTION returns."""
    make = load_function(text, what)
    try:
        return make()
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
