"""Autoformer beside slow versions of its parts and transformers' own, and the series it is trained on."""

import gzip
import logging
import math
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import needs
import thinwire
from thinwire.base.errors import ConfigError
from thinwire.experiments import data
from thinwire.experiments.data.series import COLUMNS, Series, time_marks
from thinwire.experiments.models.autoformer import AutoCorrelation, Autoformer, Decomposition, _SeasonalNorm

SIZES = {"inputs": 16, "label": 8, "horizon": 12, "width": 16, "heads": 4, "hidden": 32, "window": 5}


def small(**changes: Any) -> Autoformer:
    torch.manual_seed(0)
    return Autoformer(**{**SIZES, **changes})


def example(batch: int = 3) -> tuple[Tensor, Tensor]:
    """A sine and a slope with noise, from any phase."""
    g = torch.Generator().manual_seed(batch)
    times = torch.arange(28)[None, :, None] + 30 * torch.rand(batch, 1, 7, generator=g)
    values = torch.sin(times / 2) + times / 30 + 0.1 * torch.randn(batch, 28, 7, generator=g)
    marks = torch.rand(batch, 28, 5, generator=g) - 0.5
    x = torch.cat([F.pad(values[:, :16], (0, 0, 0, 12)), marks], 2)
    return x, values[:, 16:]


# The parts.


def test_a_trend_is_the_moving_average_with_the_ends_held() -> None:
    x = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(0))
    season, trend = Decomposition(5)(x)
    for t in range(11):
        around = [x[:, min(max(t + move, 0), 10)] for move in range(-2, 3)]
        torch.testing.assert_close(trend[:, t], torch.stack(around).mean(0))
    torch.testing.assert_close(season + trend, x)


def by_definition(layer: AutoCorrelation, x: Tensor, memory: Tensor, heads: int) -> Tensor:
    """Auto-correlation with every sum written out, head by head."""
    batch, length, width = x.shape
    q, k, v = layer.query(x), layer.key(memory), layer.value(memory)
    k, v = (F.pad(part, (0, 0, 0, max(0, length - part.shape[1])))[:, :length] for part in (k, v))
    alike = torch.zeros(batch, heads, width // heads, length)
    for channel in range(width):
        for delay in range(length):
            moved = torch.stack([q[:, (t + delay) % length, channel] for t in range(length)], 1)
            place = divmod(channel, width // heads)
            alike[:, place[0], place[1], delay] = (moved * k[:, :, channel]).sum(1)
    alike = alike.mean(1).mean(1)  # (batch, delays)
    count = int(layer.factor * math.log(length))
    rows = []
    for i in range(batch):
        judged = alike.detach().mean(0) if layer.training else alike.detach()[i]
        delays = sorted(range(length), key=judged.tolist().__getitem__, reverse=True)[:count]
        weights = torch.stack([alike[i, d] for d in delays]).softmax(0)
        rows.append(sum(w * torch.roll(v[i], -d, 0) for w, d in zip(weights, delays, strict=True)))
    return layer.out(torch.stack(rows))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("lengths", [(12, 12), (13, 13), (14, 9), (9, 14)])
def test_auto_correlation_is_what_it_is_by_definition(training: bool, lengths: tuple[int, int]) -> None:
    torch.manual_seed(1)
    layer = AutoCorrelation(8, 2).train(training)
    x, memory = (3 * torch.randn(3, length, 8) for length in lengths)
    found, wanted = layer(x, memory), by_definition(layer, x, memory, heads=2)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(out.square().sum(), layer.query.weight)[0] for out in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_parts_agree_with_those_of_transformers(training: bool) -> None:
    needs.package("transformers")
    from transformers import AutoformerConfig
    from transformers.models.autoformer import modeling_autoformer as theirs

    torch.manual_seed(2)
    config = AutoformerConfig(prediction_length=4, d_model=8, moving_average=7)
    x = torch.randn(1, 20, 8)
    pairs = zip(Decomposition(7)(x), theirs.AutoformerSeriesDecompositionLayer(config)(x), strict=True)
    for ours, wanted in pairs:
        torch.testing.assert_close(ours, wanted)
    torch.testing.assert_close(_SeasonalNorm(8)(x), theirs.AutoformerLayernorm(config)(x))
    # One example: transformers mixes up examples and heads where there are several of both.
    attention = theirs.AutoformerAttention(8, 4, autocorrelation_factor=2).train(training)
    layer = AutoCorrelation(8, 2).train(training)
    for name, other in {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}.items():
        getattr(layer, name).load_state_dict(getattr(attention, other).state_dict())
    for memory in (x, torch.randn(1, 24, 8)):
        torch.testing.assert_close(layer(x, memory), attention(x, memory)[0], rtol=1e-4, atol=1e-5)


# The whole.


def test_it_has_as_many_parameters_as_the_published_one() -> None:
    with torch.device("meta"):
        model = Autoformer()
        out = model(torch.empty(2, 192, 12))
    width, hidden = 512, 2048
    correlations, feeds = 4 * 4 * (width**2 + width), 3 * 2 * width * hidden
    embeddings, norms = 2 * (3 * 7 + 5) * width, 2 * 2 * width
    trend, head = 3 * 7 * width, 7 * width + 7
    assert sum(p.numel() for p in model.parameters()) == correlations + feeds + embeddings + norms + trend + head
    assert out.shape == (2, 96, 7)


def test_it_does_not_see_what_is_to_come() -> None:
    model = small().eval()
    x, y = example()
    peeking = x.clone()
    peeking[:, 16:, :7] = y
    assert model(x).shape == y.shape
    assert torch.equal(model(x), model(peeking))


def test_marks_matter_everywhere_and_examples_do_not_mix() -> None:
    model = small().eval()
    x, _ = example()
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-4, atol=1e-5)
    for row in (0, 15, 27):
        other = x.clone()
        other[:, row, 7:] += 0.3
        assert not torch.allclose(model(x), model(other), atol=1e-4)


def test_without_layers_the_mean_goes_on() -> None:
    model = small(encoder_layers=0, decoder_layers=0).eval()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    x, _ = example()
    torch.testing.assert_close(model(x), x[:, :16, :7].mean(1, keepdim=True).expand(-1, 12, -1))


def test_half_precision_leaves_the_transform_alone() -> None:
    model = small(inputs=15, label=7, width=16).eval()  # 15 and 19 rows: no powers of 2
    x, _ = example()
    x = x[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x)
    assert (half - model(x)).abs().mean() < 0.05


@pytest.mark.slow
def test_it_can_be_exported() -> None:
    model = small().eval()
    x, _ = example(5)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    torch.testing.assert_close(program.module()(x[:2]), model(x[:2]))


@pytest.mark.parametrize(
    "config",
    [
        thinwire.AB.paper(total_steps=4, warmup=0, every=0.5, cutoff=0.6),
        thinwire.OIALR(total_steps=4, factor_at=1, redecompose=1, layer_fraction=0.5),
    ],
    ids=["ab-paper", "oialr"],
)
def test_it_trains_at_low_rank(config: Any) -> None:
    model = small(dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, config)
    x, y = example(8)
    losses, factored = [], False
    for _ in range(4):
        loss = F.mse_loss(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        factored |= any(name.endswith(("_a", "_u", "_s")) for name, _ in model.named_parameters())
    assert factored
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"heads": 3}, "`width=16` must be a multiple of `heads=3`"),
        ({"window": 4}, "`window=4` must be odd"),
        ({"label": 17}, "`label=17` must be from 0 to `inputs=16`"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small(**change)


# The data.


def table(rows: int) -> np.ndarray:
    """Values that come again after 100 rows, so that writing many is quick."""
    some = np.random.default_rng(0).normal(5, 3, (100, 7)).round(3) + np.arange(7)
    return np.resize(some, (rows, 7))


def write(folder: Path, values: np.ndarray, name: str = "ETTm2.csv") -> Path:
    start, quarter = datetime(2016, 7, 1), timedelta(minutes=15)
    ends = [",".join(map(str, row)) for row in values[:100].tolist()]
    lines = [f"{start + i * quarter},{ends[i % 100]}" for i in range(len(values))]
    text = "\n".join([f"date,{','.join(COLUMNS)}", *lines]) + "\n"
    packed = name.endswith(".gz")
    (folder / name).write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return folder


@pytest.fixture(scope="module")
def months(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """As long as the real one's twenty months, and a little more; nothing is to be said of it."""
    log = logging.getLogger("thinwire")
    log.addFilter(refuse)
    try:
        return data.ett(write(tmp_path_factory.mktemp("ett"), table(57_700), "ETTm2.csv.gz"))
    finally:
        log.removeFilter(refuse)


def refuse(record: logging.LogRecord) -> bool:
    raise AssertionError(record.getMessage())


def test_ett_is_split_as_published(months: Series) -> None:
    assert (months.train_size, months.validation_size, months.heldout_size) == (34_369, 11_425, 11_425)
    for rows, begin, end in (
        (months.train_rows, 0, 34_560),
        (months.validation_rows, 34_560 - 96, 46_080),
        (months.heldout_rows, 46_080 - 96, 57_600),
    ):
        assert (rows[0], rows[-1] + 96 + 96) == (begin, end)


def test_ett_is_standardised_by_what_is_trained_on(months: Series) -> None:
    raw = table(57_700)
    mean, deviation = raw[:34_560].mean(0), raw[:34_560].std(0)
    np.testing.assert_allclose(months.values.numpy(), (raw - mean) / deviation, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(months.mean.numpy(), mean, rtol=1e-6)
    np.testing.assert_allclose(months.deviation.numpy(), deviation, rtol=1e-6)


def test_a_window_has_what_is_known_and_when_it_was(months: Series) -> None:
    x, y = months.validation(np.array([7, 0]))
    assert x.shape == (2, 192, 12) and y.shape == (2, 96, 7) and x.dtype == y.dtype == torch.float32
    row = 34_560 - 96 + 7
    assert torch.equal(x[0, :96, :7], months.values[row : row + 96])
    assert not x[:, 96:, :7].any()
    assert torch.equal(x[0, :, 7:], months.marks[row : row + 192])
    assert torch.equal(y[0], months.values[row + 96 : row + 192])
    with pytest.raises(IndexError):
        months.train(np.array([34_369]))
    moved = months.to("cpu").heldout(np.array([11_424]))
    assert torch.equal(moved[1][0, -1], months.values[57_599])
    assert months.to("meta").train(np.array([1]))[0].device.type == "meta"


def test_marks_of_known_dates() -> None:
    assert time_marks(datetime(2018, 1, 1)) == (-0.5, -0.5, -0.5, -0.5, -0.5)  # a Monday
    leap = time_marks(datetime(2016, 12, 31, 23, 59))  # a Saturday, the 366th day
    assert leap == pytest.approx((0.5, 0.5, 5 / 6 - 0.5, 0.5, 0.5))
    summer = time_marks(datetime(2016, 7, 1, 6, 15))  # a Friday, the 183rd day
    assert summer == pytest.approx((15 / 59 - 0.5, 6 / 23 - 0.5, 4 / 6 - 0.5, -0.5, 182 / 365 - 0.5))


def test_a_short_file_is_cut_in_parts_of_60_20_and_20(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = table(200)
    values[:, 3] = 0.1  # never changes
    source = data.ett(write(tmp_path, values, "ETTm1.csv"), inputs=16, label=8, horizon=12, name="ETTm1")
    assert (source.train_size, source.validation_size, source.heldout_size) == (93, 29, 29)
    assert source.heldout_rows[-1] + 28 == 200
    assert source.values[:, 3].abs().max() < 1e-6
    [told] = caplog.records
    assert (told.name, told.levelno) == ("thinwire", logging.WARNING) and "ETTm1.csv` has 200 rows" in told.message
    assert "not the 57600 of 20 months: split into 120 to train on, 40 to validate and 40 held out" in told.message
    with pytest.raises(ConfigError, match=r"ETTm1.csv` has 200 rows, too few for a window of 16 \+ 41 to validate on"):
        data.ett(tmp_path, inputs=16, horizon=41, name="ETTm1")


def test_a_missing_file_says_how_to_get_it(tmp_path: Path) -> None:
    origin = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/ETTm2.csv"
    with pytest.raises(ConfigError) as told:
        data.ett(tmp_path)
    assert f"no `ETTm2.csv` and no `ETTm2.csv.gz` in `{tmp_path}`" in str(told.value)
    assert f"curl -fL --create-dirs -o {tmp_path}/ETTm2.csv {origin}; then give" in str(told.value)
    with pytest.raises(ConfigError) as told:
        data.ett(None)
    assert f"curl -fL --create-dirs -o DIR/ETTm2.csv {origin}; then give `--data DIR`" in str(told.value)


HEADER = "date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n"


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "line 1: no column `date`"),
        (HEADER.replace(",OT", ""), "line 1: no column `OT` in `date,HUFL"),
        (HEADER + "2016-07-01,1,2,3,4,5,6,7\n2016-07-02,1,2,x3,4,5,6,7\n", "line 3: `MUFL` is `x3`, which is no"),
        (HEADER + "2016-07-01,1,2,nan,4,5,6,7\n", "line 2: `MUFL` is `nan`, which is not a finite number"),
        (HEADER + "2016-07-01,1,2,,4,5,6,7\n", "line 2: `MUFL` is ``"),
        (HEADER + "01.07.2016,1,2,3,4,5,6,7\n", "line 2: `date` is `01.07.2016`, which is not a date"),
        (HEADER + "2016-07-01 00:00+01:00,1,2,3,4,5,6,7\n", "line 2: `date` is `2016-07-01 00:00+01:00`, which is no"),
        (HEADER + "2016-07-01,1,2,3\n", "line 2: 4 values where the first line names 8 columns"),
        (HEADER, "has 0 rows, too few"),
    ],
)
def test_a_malformed_file_is_shown_where_it_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "ETTm2.csv").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as told:
        data.ett(tmp_path)
    assert f"`{tmp_path / 'ETTm2.csv'}`" in str(told.value) and said in str(told.value)


@pytest.mark.parametrize("clock", ["00:15:00", "00:00:00", "00:45:00", "00:30:01"])
def test_dates_that_are_not_a_quarter_of_an_hour_apart_are_refused(tmp_path: Path, clock: str) -> None:
    first, second, third = (f"2016-07-01 {time},1,2,3,4,5,6,7\n" for time in ("00:00:00", "00:15:00", clock))
    (tmp_path / "ETTm2.csv").write_text(HEADER + first + "\n" + second + third, encoding="utf-8")
    with pytest.raises(ConfigError) as told:
        data.ett(tmp_path)
    assert f"`{tmp_path / 'ETTm2.csv'}`, line 5: 2016-07-01 {clock} follows 2016-07-01 00:15:00" in str(told.value)


@pytest.mark.parametrize("how", ["cut", "flipped", "other", "not UTF-8"])
def test_a_packed_file_that_is_broken_is_refused(tmp_path: Path, how: str) -> None:
    packed = bytearray(gzip.compress((HEADER + "2016-07-01,1,2,3,4,5,6,7\n" * 99).encode()))
    flipped = bytes(b ^ 0xFF if 20 <= i < 60 else b for i, b in enumerate(packed))  # zlib's own error, no OSError
    broken = {"cut": bytes(packed[:-9]), "flipped": flipped, "other": b"404", "not UTF-8": gzip.compress(b"\xff")}
    (tmp_path / "ETTm2.csv.gz").write_bytes(broken[how])
    with pytest.raises(ConfigError, match=r"ETTm2.csv.gz` (cannot be read|is not UTF-8) .*download it again"):
        data.ett(tmp_path)
