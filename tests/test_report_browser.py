"""`report.html` in a real browser: what is seen, sorted and clicked, and that nobody is asked for anything."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import needs
from browser import Browser, browser
from pages import HOSTILE, add_panels, add_records, page_of, write_bench, write_comparison, write_run
from thinwire.commands.report import page_of_bench

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    needs.chromium()
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def _column(opened: Browser, name: str) -> list[str]:
    place = opened.evaluate("[...document.querySelectorAll('#runs th')].map(e => e.textContent)").index(name)
    return opened.evaluate(f"[...document.querySelectorAll('#runs tbody tr')].map(e => e.cells[{place}].textContent)")


def _canvases(opened: Browser) -> dict[str, int]:
    """How many canvases with something on them each section has."""
    painted = (
        "(e) => new Set(new Uint32Array(e.getContext('2d').getImageData(0, 0, e.width, e.height).data.buffer)).size > 2"
    )
    found = opened.evaluate(
        f"[...document.querySelectorAll('canvas')].filter({painted}).map(e => e.closest('section').id)"
    )
    return {section: found.count(section) for section in dict.fromkeys(found)}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_and_asks_nobody_for_anything(width, dark, folder, chromium, tmp_path_factory):
    add_panels(folder / "ab-seed0", "features.0")
    page = page_of(folder)
    chromium.open(page, width, dark=dark)
    assert _canvases(chromium) == {"pareto": 1, "curves": 7, "layers": 1 + 3 + 2}
    assert chromium.evaluate("[...document.querySelectorAll('canvas')].filter(e => !e.width).length") == 0
    assert chromium.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
    # Nor is anything of the table hidden in what holds it, which would scroll.
    overflow = "(e) => e.scrollWidth - e.clientWidth"
    assert chromium.evaluate(f"[document.querySelector('#runs').parentElement].map({overflow})") == [0]
    paper = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == dark
    chromium.click("#details summary")
    chromium.wait("document.querySelector('#details pre') !== null")
    assert chromium.evaluate("document.querySelector('#details pre').textContent").startswith("thinwire run digits")
    chromium.screenshot(tmp_path_factory.mktemp("shots") / f"{width}-{dark}.png")
    assert chromium.errors() == [] and chromium.requests() == [page.as_uri()]


def test_a_click_sorts_and_a_word_filters(folder, chromium):
    chromium.open(page_of(folder), 1280)
    assert [text[-5:] for text in _column(chromium, "run")] == ["seed0", "seed1"] * 3
    place = 1 + chromium.evaluate("[...document.querySelectorAll('#runs th')].map(e => e.textContent)").index(
        "slow link"
    )
    wanted = ["5.0 kB", "5.0 kB", "40.0 kB", "40.0 kB", "1.0 MB", "1.0 MB"]
    for expected in (wanted, wanted[::-1]):
        chromium.click(f"#runs th:nth-child({place}) button")
        assert _column(chromium, "slow link") == expected
    chromium.type("#filter", "ab seed1")
    assert _column(chromium, "method") == ["ab"] and chromium.errors() == []


def test_buttons_choose_what_bars_show(folder, chromium):
    chromium.open(page_of(folder), 1280)
    assert chromium.evaluate("document.querySelectorAll('#bars .bar-row').length") == 6
    names = chromium.evaluate("[...document.querySelectorAll('#bars .choice button')].map(e => e.textContent)")
    assert names == ["bytes by purpose", "bytes by link"]
    assert "gradients" in chromium.evaluate("document.querySelector('#bars .legend').textContent")
    chromium.click("#bars .choice button:last-child")
    chromium.wait("document.querySelector('#bars .legend').textContent === 'slow link'")
    assert chromium.errors() == []


def test_a_browser_shows_time_per_step_at_each_rate(tmp_path, chromium):
    page_of_bench(write_bench(tmp_path), silent=True)
    for width in (1280, 400):
        chromium.open(tmp_path / "report.html", width)
        rows = chromium.evaluate("[...document.querySelectorAll('#benches .bar-row')].map(e => e.textContent)")
        assert rows == ["allreduce400 ms1 ×", "ab40 ms10 ×", "allreduce50 ms1 ×", "ab5 ms10 ×"]
        assert chromium.evaluate("document.documentElement.scrollWidth") == width
    assert chromium.errors() == []


def test_a_browser_shows_hostile_names_as_text(tmp_path, chromium):
    write_run(tmp_path / "a", HOSTILE, 0, slow=9, accuracy=0.9, recipe=HOSTILE, config={HOSTILE: HOSTILE})
    add_records(tmp_path / "a", {"kind": "ranks", "step": 1, "ranks": {HOSTILE: 3}})
    add_panels(tmp_path / "a", HOSTILE)
    chromium.open(page_of(tmp_path, (HOSTILE,)), 1280)
    chromium.click("#details summary")
    chromium.wait("document.querySelector('#details pre') !== null")
    assert _column(chromium, "method") == [HOSTILE] and chromium.evaluate("document.querySelectorAll('b').length") == 0
    for place in (
        "h1",
        "#problems li",
        "#layers .legend",
        "#timeline .events",
        "#details pre",
        "#details td.text",
        ".bar-row, .legend",
    ):
        assert "alert" in chromium.evaluate(f"document.querySelector({json.dumps(place)}).textContent")
    assert chromium.errors() == []
