"""Text by word or by byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.train.data import Text, how_to_fill, unpacked, unpacked_text

_LAYOUTS = ("{}.txt", "wiki.{}.tokens", "wikitext2_{}.txt")
"""File names of WikiText's parts in its releases; each also with `.gz`."""
_WIKITEXT2 = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
_WIKITEXT2_PARTS = ("train", "valid", "test")
_UNKNOWN = "<unk>"
_BYTES = "".join(map(chr, range(256)))


def words(folder: Path | None, *, block: int, names: tuple[str, str, str] = ("train", "valid", "test")) -> Text:
    """WikiText-2, or a text in the same layout, by word; each line ends in `<eos>`.

    `folder` holds a file for each of `names`: what is trained on, a validation part and what is held out, such as
    `train.txt`, `wiki.train.tokens` or `wikitext2_train.txt`, plain or with `.gz`. The vocabulary is the training
    part's, in the order of appearance; other words become `<unk>`.
    """
    paths = _parts(folder, names)
    train, *others = (_words(path) for path in paths)
    number = {word: i for i, word in enumerate(dict.fromkeys(train))}
    validation, heldout = (_ids(text, number, path) for text, path in zip(others, paths[1:], strict=True))
    ids = _ids(train, number, paths[0])
    return Text(train_ids=ids, heldout_ids=heldout, validation_ids=validation, block=block, tokens=tuple(number))


def by_bytes(path: Path | None, *, block: int, heldout: int | None = None) -> Text:
    """Any text by byte, with 256 ids: a file, or a folder's `*.txt` in the order of their names, plain or with `.gz`.

    The last `heldout` bytes are held out, a tenth of them unless given.
    """
    if path is None or not (path := Path(path)).exists():
        where = f"there is no `{path}`" if path is not None else "no text was given"
        raise ConfigError(f"{where}; give `--data` a text file, or a folder of *.txt or *.txt.gz")
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.name.endswith((".txt", ".txt.gz")))
    if not files:
        raise ConfigError(f"no *.txt and no *.txt.gz in `{path}`; give `--data` a text file or a folder that has some")
    held = b"".join(unpacked(file) for file in files)
    ids = torch.frombuffer(bytearray(held), dtype=torch.uint8) if held else torch.empty(0, dtype=torch.uint8)
    cut = len(ids) - (len(ids) // 10 if heldout is None else heldout)
    return Text(train_ids=ids[: max(0, cut)], heldout_ids=ids[max(0, cut) :], block=block, tokens=_BYTES)


def _parts(folder: Path | None, names: tuple[str, str, str]) -> list[Path]:
    """The files of the first complete layout."""
    for layout in _LAYOUTS if folder is not None else ():
        stems = [layout.format(name) for name in names]
        found = [[p for p in (Path(folder or "", stem + end) for end in ("", ".gz")) if p.is_file()] for stem in stems]
        if all(found):
            return [paths[0] for paths in found]
    where = f"no WikiText in `{folder}`" if folder is not None else "WikiText does not come with Thinwire"
    looked = ", or ".join(", ".join(layout.format(name) for name in names) for layout in _LAYOUTS)
    addresses = {f"{name}.txt": f"{_WIKITEXT2}/{part}.txt" for name, part in zip(names, _WIKITEXT2_PARTS, strict=True)}
    raise ConfigError(f"{where}; looked for {looked}, each plain or with .gz. {how_to_fill(folder, addresses)}")


def _words(path: Path) -> list[str]:
    """The words of a file, with `<eos>` at the end of each line."""
    return unpacked_text(path).replace("\r\n", "\n").replace("\n", " <eos> ").split()


def _ids(text: Sequence[str], number: Mapping[str, int], path: Path) -> Tensor:
    unknown = number.get(_UNKNOWN)
    if unknown is None and (strange := next((word for word in text if word not in number), None)) is not None:
        raise ConfigError(
            f"`{path}` has the word {strange!r}, which is not in the training part, and neither is {_UNKNOWN!r} to "
            f"replace it; write {_UNKNOWN!r} for rare words in all parts"
        )
    return torch.from_numpy(np.fromiter((number.get(word, unknown) for word in text), np.int32, len(text)))
