"""CONTRIBUTING.md: the code it shows is the code in the files that it names, and these files exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXCERPTS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
LEFT_OUT = re.compile(r"^ *\.\.\.\n", re.MULTILINE)


def without_layout(code: str) -> str:
    """Return the code without comments and white space. (No excerpt has a `#` in a string.)"""
    return re.sub(r"\s", "", re.sub(r"#.*", "", code))


@pytest.mark.parametrize("path", EXCERPTS)
def test_an_excerpt_is_in_its_file(path: str) -> None:
    """Its parts, between lines of `...`, are there in that order."""
    rest = without_layout((ROOT / path).read_text(encoding="utf-8"))
    for part in LEFT_OUT.split(EXCERPTS[path]):
        _, found, rest = rest.partition(without_layout(part))
        assert found, f"not in {path}:\n{part}"


def test_the_round_is_shown_whole() -> None:
    names = ["rounds", "schedule", "decide", "mean", "outer_step"]
    assert [Path(path).stem for path in EXCERPTS] == names


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"(?<![\w/])((?:[\w-]+/)+[\w.-]+\.(?:py|md|js|yml))(?![\w/])", PAGE))
    named |= {path.replace("NAME.", "") for path in re.findall(r"`((?:[\w-]+/)+)`", PAGE)}
    assert len(named) > 60
    assert [name for name in sorted(named) if "NAME" not in name and not (ROOT / name).exists()] == []
