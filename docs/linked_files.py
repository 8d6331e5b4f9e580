"""A hook of mkdocs: files of the repository that pages link to become pages of the site.

On a git host `../deploy/Caddyfile` is a link to the file. The site has only docs/ and no host to point at. So each file
or folder outside docs/ that a page links to becomes a page below `repository/`, and so do the files that those link to.
A broken link is a warning, which ends a strict build.
"""

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDER = "repository"  # of the site
DOCS = "docs"
NOT_PROSE = re.compile(r"(^```.*?^```$|``.+?``|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r'(\]\(|src=")([^)"#:\s]+)(?=[#)"])')
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".json": "json", ".conf": "nginx"}

log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file and folder outside docs/ that a page links to, directly or through another such page."""
    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        page, text = waiting.pop()
        for target in sorted(_targets(page, text)):
            if files.get_file_from_path(_address(target)) is not None:
                continue
            path = ROOT / target
            if target.startswith("..") or not path.exists():
                log.warning("%s links to %s, which is not there in the repository", page, target)
                continue
            made = _content(path)
            files.append(File.generated(config, _address(target), content=made))
            if not isinstance(made, bytes):
                waiting.append((_address(target), made))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point each link at its target's place on the site. In tables, show `\\|` within code as `|`, as git hosts do."""
    here = page.file.src_uri

    def led(target: str) -> str:
        to = _address(posixpath.normpath(posixpath.join(_folder(here), target)))
        return posixpath.relpath(to, posixpath.dirname(here) or ".")

    linked = _with_links(markdown, led)
    return re.sub(r"^\|.*$", lambda row: _PIPED.sub(_unescaped, row[0]), linked, flags=re.MULTILINE)


_PIPED = re.compile(r"`[^`\n]+`")


def _unescaped(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")


def _targets(page: str, text: str) -> set[str]:
    """Return the repository paths that a page links to."""
    found: set[str] = set()

    def note(target: str) -> str:
        found.add(posixpath.normpath(posixpath.join(_folder(page), target)))
        return target

    _with_links(text, note)
    return found


def _with_links(text: str, led: Callable[[str], str]) -> str:
    parts = NOT_PROSE.split(text)
    prose = (LINK.sub(lambda link: link[1] + led(link[2]), part) for part in parts[::2])
    return "".join(part for pair in zip(prose, [*parts[1::2], ""], strict=True) for part in pair)


def _folder(page: str) -> str:
    """Return the repository folder of the file that a page of the site shows."""
    if not page.startswith(f"{FOLDER}/"):
        return posixpath.join(DOCS, posixpath.dirname(page))
    path = page.removeprefix(f"{FOLDER}/")
    return posixpath.dirname(path)


def _address(target: str) -> str:
    """Return where a path of the repository is on the site."""
    path = ROOT / target
    within = target.removeprefix(f"{DOCS}/")
    if within != target and path.is_file() and path.suffix in (".md", ".svg", ".png"):
        return within
    if path.is_dir():
        return f"{FOLDER}/{target}/index.md"
    return f"{FOLDER}/{target}" if path.suffix in (".md", ".png") else f"{FOLDER}/{target}.md"


def _content(path: Path) -> str | bytes:
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        there = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
        readme = path / "README.md"
        if readme in there:
            return readme.read_text(encoding="utf-8")
        return f"# {name}/\n\n" + "".join(f"- [{each.name}]({each.name})\n" for each in there)
    if path.suffix == ".png":
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    fence = "````"  # a file may have three of its own
    return f"# {name}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
