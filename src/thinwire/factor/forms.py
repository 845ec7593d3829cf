"""Read a model's layers in any form from a model, a state dict, or the files of a run.

The weight of a layer X may be

    full                    X.weight                                   (or another name with "weight" in it)
    factored                X.weight_a, X.weight_b                     A B
                            X.weight_u, X.weight_s, X.weight_vt        U S Vᵀ
    of a finished model     X.0.weight, X.1.weight                     two plain layers in a Sequential
                            X.parametrizations.weight.original, …      torch's parametrization by a Linear

and is read as a chain: matrices whose product is the tall matrix (m, n), m ≥ n, under the key `X.weight`.

Two weights X.0 and X.1 may also be the user's own Sequential. They are one layer if the model or its `layers.json`
says so, or if X is one layer in the other model of a comparison. A square weight of transformers' Conv1D is read
transposed from a finished model, since the file does not identify it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn

from thinwire.base.errors import ConfigError
from thinwire.base.files import read_json, read_tensors
from thinwire.base.schema import TEXT
from thinwire.factor.convert import TABLES

Chain = tuple[Tensor, ...]
Source = nn.Module | Mapping[str, Tensor] | str | Path

_FACTORS = (("_a", "_b"), ("_u", "_s", "_vt"))
_WRAPPERS = ("module", "_orig_mod")
LISTING = {"layers": {str: {"kind": TEXT}}}
"""What every `layers.json` has."""


@dataclass
class Layers:
    """The tensors that were read, and what is known about them."""

    tensors: dict[str, Tensor]
    sequentials: set[str] = field(default_factory=set)
    """Names of Sequentials that are one layer."""
    left_out: set[str] = field(default_factory=set)
    """Embeddings, which are not compared; unknown for a state dict."""
    ordered: bool = True
    """Whether the tensors are in the model's order; files are sorted by name."""

    def chains(self) -> dict[str, Chain]:
        """The chain of every weight, by the key it has when full."""
        owners: dict[str, tuple[str, Chain]] = {}
        for key in self.tensors:
            for stem, parts, flipped in self._low_rank(key):
                if chain := self._chain(parts, flipped):
                    owners |= dict.fromkeys(parts, (stem, chain))
        found: dict[str, Chain] = {}
        for key in self.tensors:
            if key in owners:
                found.setdefault(*owners[key])
            elif self._is_full(key):
                found[key] = (self.tensors[key].detach().flatten(1),)
        return {key: tall(chain) for key, chain in found.items() if key not in self.left_out}

    def has_pair(self, name: str) -> bool:
        """Whether there are two weights that could be one layer of this name."""
        return self._chain(_pair(f"{name}." if name else "")) is not None

    def _low_rank(self, key: str) -> Iterator[tuple[str, list[str], bool]]:
        """Weights whose first factor this tensor may be: the factors' keys, and whether the last is transposed."""
        for first, *others in _FACTORS:
            stem = key.removesuffix(first)
            if stem != key and "weight" in stem.rpartition(".")[2]:
                yield stem, [key, *(stem + other for other in others)], False
        if found := re.fullmatch(r"((?:.+\.)?)parametrizations\.(\w+)\.original", key):
            inside = key.removesuffix("original")
            for spread in ("0.weight", "0.0.weight"):
                yield found[1] + found[2], [key, inside + spread], True
        prefix = key.removesuffix("0.weight")
        if prefix != key and prefix.removesuffix(".") in self.sequentials:
            yield prefix + "weight", _pair(prefix), False

    def _chain(self, keys: list[str], flipped: bool = False) -> Chain | None:
        """The factors flattened, or None if one is missing or they do not fit together."""
        tensors = [self.tensors[key] for key in keys if key in self.tensors]
        if len(tensors) < len(keys) or any(t.dim() < 2 for t in tensors):
            return None
        *firsts, last = (t.detach().flatten(1) for t in tensors)
        chain = (*firsts, last.t() if flipped else last)
        return chain if all(left.shape[1] == right.shape[0] for left, right in pairwise(chain)) else None

    def _is_full(self, key: str) -> bool:
        *path, parameter = key.split(".")
        tensor = self.tensors[key]
        is_weight = "weight" in parameter and "parametrizations" not in path
        return is_weight and tensor.dim() >= 2 and tensor.is_floating_point() and tensor.numel() > 0


def tall(chain: Chain) -> Chain:
    """The same product, transposed if it is wider than tall."""
    wide = chain[0].shape[0] < chain[-1].shape[1]
    return tuple(f.t() for f in reversed(chain)) if wide else chain


def shape_of(chain: Chain) -> tuple[int, int]:
    """(m, n) of the product."""
    return chain[0].shape[0], chain[-1].shape[1]


def label_of(key: str) -> str:
    """The name shown to users: the layer's, or the weight's if it is not called `weight`."""
    return key.removesuffix(".weight")


def bare(model: nn.Module) -> nn.Module:
    """The model inside wrappers such as a replica, DDP or `torch.compile`."""
    while True:
        children = list(model.named_children())
        if len(children) != 1 or children[0][0] not in _WRAPPERS or list(model.parameters(recurse=False)):
            return model
        model = children[0][1]


def read(source: Source) -> Layers:
    """The layers of a model, of a state dict, or of a safetensors file or the folder of a run, model or save."""
    if isinstance(source, nn.Module):
        return _of_model(bare(source))
    if isinstance(source, Mapping):
        return Layers(_distinct(source))
    file = _file(Path(source))
    tensors = read_tensors(file, "restore it, or write it again")
    listing = file.parent / "layers.json"
    layers = read_json(listing, "export the model again", LISTING)["layers"] if listing.exists() else {}
    sequentials = {name for name, about in layers.items() if about["kind"] == "sequential"}
    return Layers({key: tensors[key] for key in sorted(tensors, key=_natural)}, sequentials, ordered=False)


def _of_model(model: nn.Module) -> Layers:
    tables = {id(p) for m in model.modules() if isinstance(m, TABLES) for p in m.parameters(recurse=False)}
    # Leave a tied weight out under all its names.
    left_out = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in tables}
    sequentials = {name for name, module in model.named_modules() if getattr(module, "low_rank", False)}
    return Layers(_distinct(model.state_dict()), sequentials, left_out)


def _distinct(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without wrapper prefixes; tied ones once, as in a save."""
    tensors = {key: t for key, t in state.items() if isinstance(t, Tensor)}
    for prefix in _WRAPPERS:
        if tensors and all(key.startswith(f"{prefix}.") for key in tensors):
            tensors = {key.removeprefix(f"{prefix}."): t for key, t in tensors.items()}
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    return {key: t for key, t in tensors.items() if seen.setdefault((t.data_ptr(), tuple(t.shape)), key) == key}


def _file(path: Path) -> Path:
    """The model's file at or under `path`; the first group's if saved in a group phase."""
    if path.is_file():
        return path
    for folder in (path, path.with_name(path.name + ".old")):
        if folder.is_dir() and (found := _inside(folder)):
            return found
    raise ConfigError(
        f"there is no model at `{path}`; give a safetensors file, or the folder of a run, a checkpoint or a save"
    )


def _inside(folder: Path) -> Path | None:
    if (whole := folder / "model.safetensors").is_file():
        return whole
    if parts := sorted(folder.glob("model-rank*.safetensors"), key=lambda part: _natural(part.name)):
        return parts[0]
    # Prefer the finished model to its last checkpoint.
    steps = sorted(folder.glob("step-*"), key=lambda path: _natural(path.name), reverse=True)
    inner = (folder / "model", folder / "checkpoint", *(path for path in steps if path.suffix in ("", ".old")))
    return next((found for path in inner if path.is_dir() and (found := _inside(path))), None)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 2."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _pair(prefix: str) -> list[str]:
    """The keys of two plain layers, in the order of the product."""
    return [f"{prefix}1.weight", f"{prefix}0.weight"]
