"""WikiText-2, or a text in the same layout, cut into pieces by byte-pair encoding, as text that recipes read by word.

    python benchmarks/words/pieces.py TEXT_DIR PIECES_DIR [--vocabulary 8192]

Each piece becomes its number, so a "word" of the result is a piece. The encoding is learnt from the training part.
Needs tokenizers, which `pip install "thinwire[hf]"` brings along.
"""

import argparse
import gzip
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from thinwire.experiments import data
from thinwire.train.data import Text

PARTS = ("train", "valid", "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("pieces", type=Path)
    parser.add_argument("--vocabulary", type=int, default=8192)
    given = parser.parse_args()
    texts = lines_of(data.words(given.text, block=1))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=given.vocabulary, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(texts["train"], trainer)
    given.pieces.mkdir(parents=True, exist_ok=True)
    for part, lines in texts.items():
        coded = [" ".join(map(str, each.ids)) for each in tokenizer.encode_batch(lines)]
        with gzip.open(given.pieces / f"{part}.txt.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(coded) + "\n")
        words, pieces = (sum(len(line.split()) for line in each) for each in (lines, coded))
        print(f"{part}: {words:,} words, {pieces:,} pieces")


def lines_of(text: Text) -> dict[str, list[str]]:
    """The parts again as lines of words."""
    ids = (text.train_ids, text.validation_ids, text.heldout_ids)
    found = {}
    for part, own in zip(PARTS, ids, strict=True):
        words = " ".join(text.tokens[i] for i in own.tolist())
        found[part] = [line.strip() for line in words.split("<eos>") if line.strip()]
    return found


if __name__ == "__main__":
    main()
