"""The memory calculator: its formula is that of measured peaks, and its page computes it in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from browser import Browser, find_browser, headless_browser
from retrograde.measure import MemoryTracker
from retrograde.measure.formatting import format_bytes
from retrograde.measure.pictures import style_of
from retrograde.models import ReversibleLM
from retrograde.models._positions import rotary_angles

DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA = json.loads(re.sub(r"^[^{]*", "", (DOCS / "memory-calculator-data.js").read_text()))
MODES = tuple(DATA["modes"])
SYMBOLS = {"stream": "*S*", "head": "*H*", "token": "*T*", "matrix": "*w*²", "width": "*w*"}
CHROMIUM = find_browser()
ARROW_RIGHT, TAB = "\ue014", "\ue004"  # as WebDriver writes these keys


class Sizes(NamedTuple):
    depth: int
    width: int
    length: int
    batch: int


def elements(counts: dict[str, int], sizes: Sizes) -> float:
    tokens = sizes.batch * sizes.length
    units = {
        "stream": tokens * sizes.width,
        "head": tokens * sizes.width / DATA["head_width"],
        "token": tokens,
        "matrix": sizes.width**2,
        "width": sizes.width,
    }
    return sum(count * units[unit] for unit, count in counts.items())


def predicted(mode: str, sizes: Sizes) -> float:
    """The formula of the page."""
    counts = DATA["modes"][mode]
    return DATA["bytes_per_element"] * (
        sizes.depth * elements(counts["block"], sizes) + elements(counts["stack"], sizes)
    )


def model_of(mode: str, sizes: Sizes) -> ReversibleLM:
    model = ReversibleLM(64, sizes.width, sizes.depth, sizes.width // DATA["head_width"], memory=mode)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def measured(mode: str, sizes: Sizes) -> int:
    """The peak of a training step of the stack, without the parameters and their gradients."""
    model = model_of(mode, sizes)
    x = torch.randn(sizes.batch, sizes.length, sizes.width, requires_grad=True)
    x.grad, gradient = torch.zeros_like(x), torch.randn_like(x)
    rotary = rotary_angles(torch.arange(sizes.length), model.head_width)
    with MemoryTracker(ignore=[model, x, gradient, *rotary]) as memory:
        model.stack(x, rotary=rotary).backward(gradient)
    return memory.peak


# The formula


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(depth=2, width=128, length=16, batch=1),
        Sizes(depth=12, width=128, length=64, batch=1),
        Sizes(depth=3, width=256, length=32, batch=4),
        Sizes(depth=5, width=384, length=8, batch=1),
        Sizes(depth=2, width=128, length=512, batch=2),
    ],
    ids=str,
)
def test_the_formula_is_within_5_percent_of_the_measured_peak(mode: str, sizes: Sizes) -> None:
    assert predicted(mode, sizes) == pytest.approx(measured(mode, sizes), rel=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_the_formula_is_within_5_percent_of_a_step_of_the_whole_language_model_with_few_tokens_to_choose_from(
    mode: str,
) -> None:
    sizes = Sizes(depth=6, width=128, length=128, batch=4)
    model, tokens = model_of(mode, sizes), torch.randint(64, (sizes.batch, sizes.length + 1))
    with MemoryTracker(ignore=[model, tokens]) as memory:
        model.loss(tokens).backward()
    assert predicted(mode, sizes) == pytest.approx(memory.peak, rel=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_the_formula_is_to_the_byte_where_the_page_says_so(mode: str) -> None:
    sizes = Sizes(depth=4, width=256, length=32, batch=2)
    assert predicted(mode, sizes) == measured(mode, sizes)


def test_the_formula_counts_the_parameters_of_the_stack() -> None:
    sizes = Sizes(depth=3, width=192, length=1, batch=1)
    parameters = sum(parameter.numel() for parameter in model_of("reverse", sizes).stack.parameters())
    assert sizes.depth * elements(DATA["parameters"], sizes) == parameters


def written(counts: dict[str, int]) -> str:
    return " + ".join((f"{count} " if count != 1 else "") + SYMBOLS[unit] for unit, count in counts.items())


@pytest.mark.parametrize("mode", MODES)
def test_the_page_writes_the_formula_that_it_computes(mode: str) -> None:
    block, stack = written(DATA["modes"][mode]["block"]), written(DATA["modes"][mode]["stack"])
    block = f"({block})" if "+" in block else block
    formula = f"depth × {block} + {stack}" if block else stack
    assert f'| `"{mode}"` | {formula} |' in (DOCS / "memory-calculator.md").read_text()


def test_the_modes_have_the_colours_of_all_pictures() -> None:
    assert {mode: each["colour"] for mode, each in DATA["modes"].items()} == {mode: style_of(mode)[0] for mode in MODES}


# The page


@pytest.fixture(scope="module")
def browser(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium with chromedriver on this machine: `make browser` installs them where it can")
    with headless_browser(CHROMIUM, tmp_path_factory.mktemp("browser") / "profile") as window:
        yield window


@pytest.fixture
def page(browser: Browser, site: Path) -> Browser:
    """The built page, opened from disk on a desktop screen."""
    browser.resize(1280, 900)
    browser.prefer("light")
    browser.open(site / "memory-calculator.html")
    return browser


def read(page: Browser, selector: str, what: str) -> list[str]:
    """A property of all elements that a selector finds, in the order of the page."""
    found: list[str] = page.run(f"return [...document.querySelectorAll({selector!r})].map(each => String(each.{what}))")
    return found


def shown_sizes(page: Browser) -> Sizes:
    values = read(page, "#calculator input[type=number]", "value")
    return Sizes(*map(int, values[: len(Sizes._fields)]))


def shown_peaks(page: Browser) -> dict[str, float]:
    modes, values = read(page, "#calculator output", "dataset.mode"), read(page, "#calculator output", "dataset.bytes")
    return dict(zip(modes, map(float, values), strict=True))


def enter(page: Browser, name: str, value: int) -> None:
    page.run(f"document.getElementById('calculator-{name}').select()")
    page.press(f"#calculator-{name}", f"{value}{TAB}")


@pytest.mark.slow
def test_moving_a_slider_by_the_keyboard_changes_size_peaks_and_chart(page: Browser) -> None:
    before, lines = shown_sizes(page), read(page, "#calculator circle", "outerHTML")
    page.press("#calculator [data-slider=depth]", 8 * ARROW_RIGHT)
    after = shown_sizes(page)
    assert after.depth > before.depth
    assert after._replace(depth=before.depth) == before
    assert shown_peaks(page) == {mode: predicted(mode, after) for mode in MODES}
    assert shown_peaks(page)["reverse"] == predicted("reverse", before)
    assert shown_peaks(page)["store"] > predicted("store", before)
    assert read(page, "#calculator circle", "outerHTML") != lines


@pytest.mark.slow
def test_the_page_shows_what_a_step_of_the_typed_size_was_measured_to_need(page: Browser) -> None:
    sizes = Sizes(depth=6, width=128, length=96, batch=2)
    for name, value in sizes._asdict().items():
        enter(page, name, value)
    peaks = {mode: measured(mode, sizes) for mode in MODES}
    assert shown_peaks(page) == pytest.approx(peaks, rel=0.05)
    assert read(page, "#calculator output", "textContent") == [format_bytes(int(predicted(m, sizes))) for m in MODES]


@pytest.mark.slow
def test_the_switch_adds_four_values_per_parameter(page: Browser) -> None:
    sizes, without = shown_sizes(page), shown_peaks(page)
    page.click("#calculator-state")
    state = 4 * 4 * sizes.depth * elements(DATA["parameters"], sizes)
    assert shown_peaks(page) == {mode: peak + state for mode, peak in without.items()}


@pytest.mark.slow
def test_the_deepest_stack_that_fits_fits_and_one_more_block_does_not(page: Browser) -> None:
    enter(page, "budget", 16)
    sizes = shown_sizes(page)
    deepest = dict(zip(MODES, read(page, "#calculator [data-deepest]", "textContent"), strict=True))
    for mode in ("store", "checkpoint"):
        depth = int(deepest[mode].replace(",", ""))
        assert (
            predicted(mode, sizes._replace(depth=depth))
            <= 16 * 2**30
            < predicted(mode, sizes._replace(depth=depth + 1))
        )
    assert deepest["reverse"] == "any"


@pytest.mark.slow
def test_what_is_typed_out_of_range_is_brought_into_it(page: Browser) -> None:
    enter(page, "width", 1000)
    enter(page, "batch", 0)
    enter(page, "depth", 10**9)
    assert shown_sizes(page)[:2] == (1024, 1024)
    assert shown_sizes(page).batch == 1
    assert shown_peaks(page) == {mode: predicted(mode, shown_sizes(page)) for mode in MODES}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_phones_and_desktops_in_light_and_dark(
    page: Browser, site: Path, width: int, scheme: str
) -> None:
    page.resize(width, 900)
    page.prefer(scheme)
    page.run("localStorage.clear()")  # where the theme remembers the scheme of the page before
    page.open(site / "memory-calculator.html")
    assert page.run("return document.documentElement.scrollWidth") == width
    inside = "const box = document.getElementById('calculator').getBoundingClientRect();"
    assert page.run(inside + "return [...document.querySelectorAll('#calculator *')].every(each =>"
                    " each.getBoundingClientRect().right <= box.right)")  # fmt: skip
    text, back = (page.run(f"return getComputedStyle({of}).{what}") for of, what in COLOURS)
    assert (brightness(text) > brightness(back)) == (scheme == "dark")
    assert read(page, "#calculator polyline", "getAttribute('stroke')") == [style_of(mode)[0] for mode in MODES]


COLOURS = (("document.querySelector('#calculator output')", "color"), ("document.body", "backgroundColor"))


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3]))
