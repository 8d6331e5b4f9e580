"""docs/diagrams are what docs/write_diagrams.py draws from the code, and every one is on a page."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from coordinator.run.decide import TRANSITIONS
from docs.write_diagrams import DIAGRAMS, FOLDER, SCHEDULES, path_of

DOCS = Path(__file__).parents[1] / "docs"


def words_of(name: str) -> list[str]:
    return [
        text for each in ElementTree.fromstring(path_of(name).read_text(encoding="utf-8")).iter() if (text := each.text)
    ]


@pytest.mark.parametrize("name", DIAGRAMS)
def test_a_diagram_is_current(name: str) -> None:
    drawn = DIAGRAMS[name]()
    assert path_of(name).read_text(encoding="utf-8") == drawn, "run: python -m docs.write_diagrams"


@pytest.mark.parametrize("name", DIAGRAMS)
def test_nothing_is_drawn_beyond_the_edge(name: str) -> None:
    drawing = ElementTree.fromstring(path_of(name).read_text(encoding="utf-8"))
    width, height = (float(each) for each in drawing.attrib["viewBox"].split()[2:])
    for each in drawing.iter():
        if "x" in each.attrib:
            ends = float(each.attrib["x"]) + float(each.attrib.get("width", 0))
            if each.text and each.attrib["text-anchor"] == "start":
                ends += 0.55 * float(each.attrib["font-size"]) * len(each.text)  # of a letter, about
            assert 0 <= ends <= width, each.attrib
            assert 0 <= float(each.attrib["y"]) + float(each.attrib.get("height", 0)) <= height, each.attrib


def test_every_diagram_is_shown_and_there_is_no_other() -> None:
    shown = {
        name for page in DOCS.glob("*.md") for name in re.findall(r"\]\(diagrams/([\w-]+)\.svg\)", page.read_text())
    }
    assert shown == set(DIAGRAMS) == {path.stem for path in FOLDER.iterdir()}


def test_states_and_schedules_are_those_of_the_code() -> None:
    outcomes = {what for each in TRANSITIONS.values() for what in each}
    assert {*map(str, TRANSITIONS), *outcomes} <= set(words_of("fragment-states"))
    assert set(SCHEDULES) <= set(words_of("schedules"))
