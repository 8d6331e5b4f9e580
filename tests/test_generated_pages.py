"""Generated pages are what their generators write, so every command, setting, metric and answer is on its page."""

from importlib import import_module

import pytest

from docs import write_diagrams

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["commands", "life", "metrics", "recipes", "rounds", "settings"])
def test_a_page_is_current(name: str) -> None:
    writer = import_module(f"docs.write_{name}")
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(), f"run: python -m docs.write_{name}"


@pytest.mark.parametrize("name", write_diagrams.DIAGRAMS)
def test_a_diagram_is_current(name: str) -> None:
    drawn = write_diagrams.path_of(name).read_text(encoding="utf-8")
    assert drawn == write_diagrams.DIAGRAMS[name](), "run: python -m docs.write_diagrams"
