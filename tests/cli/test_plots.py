"""Plots can be read on light and on dark pages, by people who see colours and who do not."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.report import MARKERS, looks
from drawn_svg import paper_and_colors

from diptych.plots import DARK, LIGHT, LINES, Scheme, new_figure, save

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def luminance(color: str) -> float:
    """As WCAG 2.2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_and_text_stand_out(scheme: Scheme) -> None:
    assert contrast(scheme.ink, scheme.paper) >= 7
    assert {line for line in LINES if contrast(line, scheme.paper) < 3} == set()


def test_no_two_lines_of_a_plot_look_alike() -> None:
    first = list(islice(looks(), len(LINES)))
    assert len({look["color"] for look in first}) == len({look["marker"] for look in first})
    assert len(LINES) == len(set(LINES)) == len(set(MARKERS))


def test_a_plot_follows_the_scheme_of_its_reader_and_is_the_same_file_again(tmp_path: Path) -> None:
    for name in ("one.svg", "again.svg"):
        figure = new_figure(3, 2)
        axes = figure.subplots()
        axes.plot([1, 2], [3, 4], label="tokens", **next(looks()))
        axes.legend()
        save(figure, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert (tmp_path / "again.svg").read_text() == text
    assert ">tokens</text>" in text
    assert DARK.ink in text.partition("prefers-color-scheme: dark")[2]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.svg")), ids=lambda path: path.stem)
def test_the_plots_of_the_pages_are_such(path: Path) -> None:
    text = path.read_text()
    ElementTree.fromstring(text)
    assert "prefers-color-scheme: dark" in text
    assert "var(" not in text, "only browsers know it: elsewhere all of it is black"
    paper, colors = paper_and_colors(text)
    assert paper == LIGHT.paper
    assert LIGHT.ink in colors
    assert colors & set(LINES)
    assert "#000000" not in text, "black letters cannot be read on a dark page"
