"""The papers' data sets, as their authors publish them: read, refused when damaged, and named when missing."""

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import needs
from standins import CLASSES, IMAGES, folder_for, pickled, pixels
from thinwire.base.errors import ConfigError
from thinwire.experiments import data
from thinwire.experiments.data.image_folder import TRIES, _in_bytes, random_box
from thinwire.train.data import Batches, digits, share
from thinwire.train.step_rng import StepRNG


@pytest.mark.parametrize(
    ("kind", "inner"), [("cifar10", "."), ("cifar10", "cifar-10-batches-py"), ("cifar10-npz", ".")]
)
def test_cifar10_is_read_from_either_layout(kind, inner, tmp_path):
    source = data.cifar10(folder_for(kind, tmp_path) / inner)
    assert (source.train_size, source.heldout_size) == (5 * IMAGES, IMAGES)
    assert (source.x.dtype, source.y.dtype) == (torch.uint8, torch.int64)
    x, y = source.train(np.arange(IMAGES, 2 * IMAGES))
    assert np.array_equal(x.numpy(), pixels(1))  # the second file
    assert np.array_equal(source.heldout(np.arange(IMAGES))[0].numpy(), pixels(5))
    assert y.tolist() == [i % 10 for i in range(IMAGES)]


def test_cifar100_has_its_fine_classes(tmp_path):
    source = data.cifar100(folder_for("cifar100", tmp_path))
    assert (source.train_size, source.heldout_size) == (IMAGES, IMAGES)
    assert source.y.max() > 20


@pytest.mark.parametrize("call", [os.system, subprocess.run, eval])
def test_a_pickle_may_call_nothing(call, tmp_path):
    class Bad:
        def __reduce__(self):
            return call, (f"touch {tmp_path / 'touched'}",)

    folder = folder_for("cifar100", tmp_path)
    pickled(folder / "cifar-100-python" / "test", {"data": Bad()})
    with pytest.raises(ConfigError, match=rf"test` asks to run `[\w.]*{call.__name__}`"):
        data.cifar100(folder)
    assert not (tmp_path / "touched").exists()


def _harm(path: Path, how: str) -> None:
    held = path.read_bytes()
    path.write_bytes({"cut": held[: len(held) // 2], "empty": b"", "other": b"\x80\x02}q\x00."}[how])


@pytest.mark.parametrize("how", ["cut", "empty", "other"])
@pytest.mark.parametrize("file", ["cifar10/cifar-10-batches-py/data_batch_3", "cifar10-npz/cifar10_train_3.npz"])
def test_damage_is_said_with_the_file(file, how, tmp_path):
    folder = folder_for(file.split("/")[0], tmp_path)
    _harm(tmp_path / file, how)
    with pytest.raises(ConfigError, match=f"{Path(file).name}` is not what its name says, or damaged"):
        data.cifar10(folder)


@pytest.mark.parametrize(("kind", "last"), [("cifar10", 9), ("cifar10-npz", 9), ("cifar100", 99)])
@pytest.mark.parametrize("beyond", [False, True])
def test_classes_that_a_set_does_not_have_are_refused(kind, last, beyond, tmp_path):
    folder, wrong = folder_for(kind, tmp_path), last + 1 if beyond else -1
    classes = [0, 1, wrong, *range(3, IMAGES)]
    if kind == "cifar10-npz":
        np.savez(folder / "cifar10_test.npz", d=pixels(7).transpose(1, 0, 2, 3), y=np.array(classes))
    else:
        path = folder / ("cifar-10-batches-py/test_batch" if kind == "cifar10" else "cifar-100-python/test")
        pickled(path, {"data": pixels(7).reshape(IMAGES, -1), "labels": classes, "fine_labels": classes})
    with pytest.raises(ConfigError, match=f"test.* an image of class {wrong}, .* 0 to {last}.; download and unpack it"):
        data.cifar10(folder) if last == 9 else data.cifar100(folder)


def test_commands_that_fill_a_folder_make_it_and_quote_it(tmp_path):
    folder = tmp_path / "not yet"
    for load in (data.cifar10, data.cifar100, data.ett, lambda place: data.words(place, block=2)):
        with pytest.raises(ConfigError) as told:
            load(folder)
        assert f"then give `--data '{folder}'`" in str(told.value)
        assert "--create-dirs" in str(told.value) or f"mkdir -p '{folder}'" in str(told.value)


def test_what_is_missing_comes_with_the_command_to_fetch_it(tmp_path):
    with pytest.raises(ConfigError) as none:
        data.cifar10(tmp_path)
    for part in ("data_batch_1", "cifar-10-batches-py/", "cifar10_test.npz", f"cifar-10-python.tar.gz -C {tmp_path}"):
        assert part in str(none.value)
    folder = folder_for("cifar10-npz", tmp_path)
    (folder / "cifar10_train_2.npz").unlink()
    with pytest.raises(ConfigError, match=r"missing: cifar10_train_2\.npz"):
        data.cifar10(folder)
    with pytest.raises(ConfigError, match=r"does not come with Thinwire.*-C DIR"):
        data.cifar100(None)


def test_a_source_on_a_device_gives_the_same(tmp_path):
    indices = np.array([3, 1, 4])
    for source in (
        digits(),
        data.cifar10(folder_for("cifar10", tmp_path)),
        data.words(folder_for("wikitext2", tmp_path), block=5),
    ):
        held = source.to("cpu")
        for part in ("train", "heldout"):
            for one, other in zip(getattr(source, part)(indices), getattr(held, part)(indices), strict=True):
                assert torch.equal(one, other)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    needs.package("PIL", "Pillow")
    return folder_for("imagenet", tmp_path_factory.mktemp("data"))


def test_an_image_folder_has_the_classes_of_its_folders(imagenet):
    source = data.image_folder(imagenet, size=16)
    assert source.classes == CLASSES
    assert (source.train_size, source.heldout_size) == (24, 6)
    x, y = source.heldout(np.arange(6))
    assert x.shape == (6, 3, 16, 16) and x.dtype == torch.uint8
    assert y.tolist() == [0, 0, 1, 1, 2, 2] and y.dtype == torch.int64
    assert torch.equal(x, source.heldout(np.arange(6))[0])


def test_the_fingerprint_of_an_image_folder_tells_names_and_numbers(imagenet, tmp_path):
    folder = shutil.copytree(imagenet, tmp_path / "copy")
    fingerprint = lambda: data.image_folder(folder, size=16).fingerprint()  # noqa: E731
    found = [data.image_folder(imagenet, size=16).fingerprint(), fingerprint()]
    assert found[0] == found[1]
    image = min((folder / "train" / CLASSES[1]).iterdir())
    for name in (f"{CLASSES[1]}/0.jpg", f"{CLASSES[0]}/z.jpg"):  # named otherwise, then the last of the class before
        image = image.rename(folder / "train" / name)
        found.append(fingerprint())
    assert len(set(found)) == 3


def test_crops_do_not_ask_how_many_workers_there_are(imagenet):
    indices = Batches(size=24, batch=9, seed=1).indices(2)
    whole, _ = data.image_folder(imagenet, size=16).train(indices, StepRNG(1, 2, batch=9))
    source = data.image_folder(imagenet, size=16, threads=3)
    parts = [source.train(share(indices, r, 2), StepRNG(1, 2, batch=9, rank=r, world_size=2))[0] for r in range(2)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, source.train(indices, StepRNG(1, 3, batch=9))[0])
    assert not torch.equal(whole, source.train(indices)[0])  # without random numbers, the middle


def test_evaluation_sees_the_middle_of_the_short_side_resized(imagenet):
    from PIL import Image

    source = data.image_folder(imagenet, size=14, crop_pct=0.875)
    with Image.open(imagenet / "val" / "n01" / "n01_1.png") as image:
        scale = 16 / min(image.size)
        whole = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (whole.width - 14) / 2, (whole.height - 14) / 2
    middle = np.asarray(whole.crop((round(left), round(top), round(left) + 14, round(top) + 14))).transpose(2, 0, 1)
    seen = source.heldout(np.array([1]))[0][0].numpy()
    assert np.abs(seen.astype(int) - middle).mean() < 12  # up to half a pixel apart


@pytest.mark.parametrize(("width", "height"), [(100, 80), (33, 90), (400, 20), (20, 400), (1, 1)])
def test_random_crops_lie_within_the_image(width, height):
    for chance in [*np.random.default_rng(0).random((50, TRIES, 4)).tolist(), [[1.0] * 4] * TRIES]:
        left, top, right, bottom = random_box(width, height, (0.08, 1.0), chance)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert (right - left) * (bottom - top) >= 0.07 * width * height or max(width, height) >= 400


def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same(tmp_path):
    Image = needs.package("PIL.Image", "Pillow")
    for part in ("train", "validation"):
        (tmp_path / part / "a").mkdir(parents=True)
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8))
    big = coarse.resize((320, 400), Image.Resampling.BICUBIC)
    big.save(tmp_path / "train" / "a" / "1.jpg", quality=95)
    big.save(tmp_path / "validation" / "a" / "1.png")
    source = data.image_folder(tmp_path, size=32)
    drafted, exact = source.train(np.array([0]))[0], source.heldout(np.array([0]))[0]
    assert (drafted.int() - exact.int()).abs().float().mean() < 2


def test_grey_images_of_16_bits_keep_their_shades(tmp_path):
    Image = needs.package("PIL.Image", "Pillow")
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
    shades = np.random.default_rng(0).integers(0, 2**16, (32, 32), dtype=np.uint16)
    shades[0, :2] = 0, 2**16 - 1
    deep, plain = Image.fromarray(shades), Image.fromarray((shades >> 8).astype(np.uint8))
    assert deep.mode.startswith("I")
    deep.save(tmp_path / "train" / "a" / "1.png")
    plain.save(tmp_path / "val" / "a" / "1.png")
    source = data.image_folder(tmp_path, size=32, crop_pct=1.0)
    (x, _), (wanted, _) = source.train(np.array([0])), source.heldout(np.array([0]))
    assert torch.equal(x, wanted) and np.array_equal(x[0, 2].numpy(), shades >> 8)
    assert np.array_equal(np.asarray(_in_bytes(deep.convert("I"))), shades >> 8)  # as older versions of Pillow read it


def test_errors_of_an_image_folder_name_what_is_wrong(imagenet, tmp_path):
    with pytest.raises(ConfigError, match=r"no folder `train` in .*DIR/train/CLASS") as told:
        data.image_folder(tmp_path, size=16)
    for part in ("image-net.org/download.php", "bash extract_ILSVRC.sh", "imagenet/train/CLASS", "`--data imagenet`"):
        assert part in str(told.value)
    folder = shutil.copytree(imagenet, tmp_path / "copy")
    _harm(folder / "train" / "n01" / "n01_0.JPEG", "cut")
    with pytest.raises(ConfigError, match=r"n01_0\.JPEG` cannot be decoded"):
        data.image_folder(folder, size=16).train(np.arange(4))
    (folder / "val" / "n03").rename(folder / "val" / "n04")
    with pytest.raises(ConfigError, match=r"only in `.*train`: n03; only in `.*val`: n04"):
        data.image_folder(folder, size=16)


@pytest.mark.parametrize("layout", ["{}.txt", "wiki.{}.tokens", "wikitext2_{}.txt.gz"])
def test_words_are_numbered_as_they_appear(layout, tmp_path):
    for name, text in (("train", " a b \n a <unk> \n"), ("valid", " b c \n b"), ("test", " d a \n a")):
        path = tmp_path / layout.format(name)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    source = data.words(tmp_path, block=2)
    assert source.tokens == ("a", "b", "<eos>", "<unk>") and source.vocabulary == 4
    assert source.train_ids.tolist() == [0, 1, 2, 0, 3, 2]
    assert source.validation_ids.tolist() == [1, 3, 2, 1]
    assert source.heldout_ids.tolist() == [3, 0, 2, 0]
    assert (source.train_size, source.validation_size, source.heldout_size) == (4, 1, 1)
    assert [t.tolist() for t in source.validation(np.array([0]))] == [[[1, 3]], [[3, 2]]]


def test_errors_of_words_name_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match=rf"no WikiText in .*-o {tmp_path}/valid.txt https://.*/wikitext-2/valid.txt"):
        data.words(tmp_path, block=2)
    for name, text in (("train", "a b c"), ("valid", "a b e"), ("test", "a b c")):
        (tmp_path / f"{name}.txt").write_text(text)
    with pytest.raises(ConfigError, match=r"valid.txt` has the word 'e', which"):
        data.words(tmp_path, block=2)
    (tmp_path / "valid.txt").write_text("a b c")
    with pytest.raises(ConfigError, match="has 3 tokens, too few for one window of `block` 3"):
        data.words(tmp_path, block=3)
    (tmp_path / "valid.txt").unlink()
    (tmp_path / "valid.txt.gz").write_bytes(gzip.compress(b"a b c")[:-6])
    with pytest.raises(ConfigError, match=r"valid\.txt\.gz` cannot be read"):
        data.words(tmp_path, block=2)


def test_any_text_goes_by_byte(tmp_path):
    folder = folder_for("text", tmp_path)
    source = data.by_bytes(folder, block=8, heldout=100)
    plain = (folder / "a.txt").read_bytes() + gzip.decompress((folder / "b.txt.gz").read_bytes())
    assert bytes(source.train_ids) == plain[:-100] and bytes(source.heldout_ids) == plain[-100:]
    assert source.vocabulary == 256
    assert len(data.by_bytes(folder / "a.txt", block=8).heldout_ids) == len(plain) // 20
    with pytest.raises(ConfigError, match=r"no \*\.txt and no"):
        data.by_bytes(tmp_path, block=8)
