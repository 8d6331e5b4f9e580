"""The site of docs/ builds without warnings, so every link and anchor works, and it needs no internet."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from tests.support.python import python

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = (
    *("protocol", "coordinator", "worker", "outerstep", "harness", "migrations"),
    *("benchmarks", "docs", "tests", "examples", ".ci"),
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site, without --quiet, which would ignore warnings."""
    return python("-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", built)
    assert done.returncode == 0, done.stderr
    return built


class Elements(HTMLParser):
    """What a page loads, and its links."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given["href"])
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])
        assert "mermaid" not in given.get("class", ""), "a mermaid diagram needs a script from elsewhere"


def test_every_page_is_in_the_navigation() -> None:
    # Its Python tags are for the site's builder and are not needed here.
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/.-]+\.md", str(yaml.safe_load(text)["nav"]))
    assert {path.name for path in DOCS.glob("*.md")} == {name for name in named if "/" not in name}
    assert len(named) == len(set(named))


@pytest.mark.system
@pytest.mark.covers("security:site-assets")
def test_pages_load_nothing_from_elsewhere_and_relative_links_work(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.glob("*.md")))
    for page in pages:
        elements = Elements(page)
        for address in elements.loaded:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
        for address in [*elements.loaded, *elements.links]:
            if not re.match(r"\w+:|#|/", address):
                named = unquote(address.partition("#")[0].partition("?")[0])
                assert (page.parent / named).exists(), f"{page}: {address}"


@pytest.mark.system
def test_a_linked_file_of_the_repository_becomes_a_page(site: Path) -> None:
    page = (site / "repository" / "deploy" / "Caddyfile.html").read_text(encoding="utf-8")
    assert "coordinator.example.org" in page
    assert 'href="repository/deploy/Caddyfile.html"' in (site / "deployment.html").read_text(encoding="utf-8")


@pytest.mark.system
def test_code_in_tables_and_anchors_are_as_on_a_git_host(site: Path) -> None:
    rest = (site / "rest.html").read_text(encoding="utf-8")
    assert "&quot;paused&quot; | &quot;draining&quot;" in rest or '"paused" | "draining"' in rest
    assert 'id="events-tokens-line-checks-metrics-health"' in rest


_FILE = re.compile(r"`([\w./-]+\.(?:py|c))`")
_NOT_OURS = {"protocol.py", "train.py"}  # a script's own


def test_source_files_that_pages_name_exist() -> None:
    """As paths, or as the end of one: pages name them beside the folder or module that they belong to."""
    ours = [f"/{path.relative_to(ROOT)}" for top in SOURCES for path in (ROOT / top).rglob("*") if path.is_file()]
    pages = [*ROOT.glob("*.md"), *(page for page in DOCS.glob("*.md") if page.name != "log.md")]
    named = {(page.name, file) for page in pages for file in _FILE.findall(page.read_text(encoding="utf-8"))}
    gone = [
        (page, file)
        for page, file in sorted(named)
        if "NAME" not in file and file not in _NOT_OURS and not any(each.endswith(f"/{file}") for each in ours)
    ]
    assert not gone
    assert len(named) > 100


BROKEN = [
    "[a page](no-page.md)",
    "[a heading](other.md#no-heading)",
    "[a heading here](#no-heading-here)",
    "[a file](../no-file.toml)",
    "[a file beyond the repository](../../no-repository.md)",
    "[a heading of a page outside](../README.md#no-heading-outside)",
    "![a picture](no-picture.svg)",
    '<img src="no-picture.png" alt="a picture">',
]


@pytest.mark.system
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.compile(r"^nav:\n(  .*\n)+", re.MULTILINE)
    assert navigation.search(config)
    (tmp_path / "mkdocs.yml").write_text(navigation.sub("", config))
    (tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "linked_files.py", tmp_path / "docs")
    (tmp_path / "README.md").write_text("# Outside\n\n[back](docs/other.md#there)\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## There\n\n[out](../README.md#outside)\n")
    page = tmp_path / "docs" / "index.md"
    (tmp_path.parent / "no-repository.md").write_text("# Somebody's own\n")
    page.write_text("# Here\n\n`[not a link](nowhere.md)`\n\n[fine](other.md#there)\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    page.write_text("# Here\n\n" + "\n\n".join(BROKEN))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    warnings = [
        line for line in done.stderr.splitlines() if line.startswith("WARNING") or "does not contain an anchor" in line
    ]
    for each in BROKEN:
        (target,) = re.findall(r"no-[\w-]+", each)
        assert [line for line in warnings if re.search(rf"{target}\b(?!-)", line)], f"{each}: {done.stderr}"
