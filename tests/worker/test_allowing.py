"""A run's spec is somebody else's text: what of it a machine does is for the machine's owner to say."""

import os
import select
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.coordinator import InThread
from outerstep.common.exit_codes import Exit
from protocol.messages import Scope
from protocol.spec.run import RunSpec, parse_spec
from tests.support import at_terminal
from tests.support.cases import in_the_night
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.workers import worker_settings
from worker.agent import run_worker
from worker.allowing import Allowed, not_allowed, options_for, permit
from worker.errors import DataError, NotAllowed
from worker.export import export, load_checkpoint
from worker.link.client import Client, open_http


def spec(*, model: str = 'preset = "tiny"', data: str = "", inner: str = "") -> RunSpec:
    return parse_spec(f'name = "r"\n[model]\n{model}\n[data]\n{data}\n[inner]\n{inner}\n[sync]\nrounds = 1\n')


def source(name: object) -> RunSpec:
    return spec(data=f"source = '{name}'")


def refused(given: RunSpec, *roots: object, factories: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    return [(each.option, each.value) for each in not_allowed(given, Allowed(factories, tuple(map(str, roots))))]


# --- code ---------------------------------------------------------------------------------------------------------


def test_what_comes_with_outerstep_needs_nothing() -> None:
    assert refused(spec()) == []
    assert refused(spec(data='tokenizer = "bytes"', inner='optimizer = "sgd"')) == []
    assert refused(parse_spec('name = "r"\ndata.source = "custom"\nsync.rounds = 1')) == []


def test_code_needs_its_very_name() -> None:
    given = spec(model='factory = "http.server:test"', inner='optimizer = "os:abort"')
    assert refused(given) == [("--allow-code", "http.server:test"), ("--allow-code", "os:abort")]
    assert refused(given, factories=("http.server:test",)) == [("--allow-code", "os:abort")]
    assert refused(given, factories=("http.server", "http.server:tes", "http.server:test2", "os:abort")) == [
        ("--allow-code", "http.server:test")
    ]
    assert refused(given, factories=("http.server:test", "os:abort")) == []
    assert len(refused(given, "/")) == 2, "a place is no code"


# --- places on this machine ---------------------------------------------------------------------------------------


def test_a_place_needs_a_root_that_it_lies_below(text: Path, tmp_path: Path) -> None:
    for name in (text, f"{text}/*.txt", f"{text}/0.txt", f"{tmp_path}/*/0.txt"):
        assert len(refused(source(name))) == 1
        assert refused(source(name), tmp_path) == []
        assert refused(source(name), tmp_path / "other", f"{tmp_path}/te") != []
    assert refused(source(text)) == refused(source(f"{text}/*.txt")) == [("--data-root", str(text))]
    assert refused(source(f"{text}/0.txt")) == [("--data-root", f"{text}/0.txt")]
    assert refused(source(f"{text}/0.txt"), f"{text}/0.txt") == []


@pytest.mark.covers("security:foreign-data-source")
def test_links_and_dots_are_resolved_before_anything_is_compared(text: Path, tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    write_chapters(secret)
    (root / "link").symlink_to(secret)
    for name in (f"{root}/../secret", f"{root}/link", f"{root}/link/0.txt", f"{root}/link/*.txt"):
        ((option, value),) = refused(source(name), root)
        assert (option, Path(value).is_relative_to(secret)) == ("--data-root", True)
    assert refused(source(f"{root}/link"), root, secret) == []
    for name in (str(root), f"{root}/**/*.txt"):  # which follow the link
        assert refused(source(name), root) == [("--data-root", str(secret))]
    (tmp_path / "alias").symlink_to(text)
    assert refused(source(text), tmp_path / "alias") == []


@pytest.mark.covers("security:foreign-data-source")
def test_a_wildcard_leads_nowhere_else(text: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.txt").symlink_to(text / "0.txt")
    assert refused(source(f"{tmp_path}/a/*/c.txt"), tmp_path / "a") == [("--data-root", str(text))]
    assert refused(source(f"{tmp_path}/a"), tmp_path / "a") == [("--data-root", str(text))], "nor does a walk"
    with pytest.raises(DataError, match="has '..' after a wildcard"):
        refused(source(f"{tmp_path}/a/*/../../text/*"), tmp_path / "a")


def test_what_a_data_set_of_the_hub_calls_itself_may_be_a_directory(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """datasets reads a directory where there is one of that name."""
    monkeypatch.chdir(tmp_path)
    assert refused(source(f"hub:{text}"), "hub:") == [("--data-root", str(text))]
    assert refused(source("hub:text"), "hub:") == [("--data-root", str(text))]
    assert refused(source("hub:../.."), "hub:") == [("--data-root", str(tmp_path.parents[1]))]


def test_tokenizers_and_weights_are_places_too(tmp_path: Path) -> None:
    given = spec(model=f"pretrained = '{tmp_path}'", data=f"tokenizer = '{tmp_path}/words'")
    assert refused(given) == [("--data-root", str(tmp_path)), ("--data-root", f"{tmp_path}/words")]
    assert refused(given, tmp_path) == []


@pytest.mark.parametrize("name", ["~nobody-of-this-name/text", r"a\u0000b"])
def test_what_can_be_no_place_is_told(name: str) -> None:
    with pytest.raises(DataError, match="not a possible place"):
        refused(spec(data=f'source = "{name}"'), "/")


def test_a_name_that_is_too_long_is_no_place_of_a_root(tmp_path: Path) -> None:
    assert len(refused(spec(data=f'tokenizer = "/{"x" * 5000}"'), tmp_path)) == 1


# --- places elsewhere ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "root", "fits"),
    [
        ("https://a.org/sets/web", "https://a.org/sets", True),
        ("https://a.org.evil.org/sets", "https://a.org", False),
        ("https://a.org@evil.org/sets", "https://a.org", False),
        ("https://a.org/sets/../admin", "https://a.org/sets", False),
        ("https://a.org/sets/%2e%2e/admin", "https://a.org/sets", False),
        ("https://a.org/sets/x?reboot=", "https://a.org/sets", False),
        ("http://a.org/sets", "https://a.org", False),
        ("http://192.168.0.1/reboot?now=", "/", False),
        ("s3://bucket/web", "s3://bucket", True),
        ("hub:allenai/c4:en", "hub:allenai/c4", True),
        ("hub:allenai/c4:en", "hub:allenai/c", False),
        ("hf://datasets/allenai/c4@main/en", "hub:allenai/c4", True),
        ("hf://datasets/evil/c4", "hub:allenai", False),
    ],
)
def test_an_address_needs_its_beginning(name: str, root: str, fits: bool) -> None:
    assert (refused(source(name), root) == []) is fits
    ((_, value),) = refused(source(name))
    assert refused(source(name), value) == [], "what is told to be as_options allows it"


def test_a_folder_of_a_repository_leads_nowhere_else() -> None:
    with pytest.raises(DataError, match="has '..' in it"):
        refused(source("hf://datasets/allenai/c4/../../../evil/set/resolve/main"), "hub:allenai")


def test_repositories_of_the_hub() -> None:
    given = spec(model='pretrained = "org/model"', data='tokenizer = "org/words"')
    assert refused(given) == [("--data-root", "hub:org/model"), ("--data-root", "hub:org/words")]
    assert refused(given, "hub:org") == []


# --- asking -------------------------------------------------------------------------------------------------------


def test_the_refusal_says_what_to_type() -> None:
    given = spec(model='factory = "a:b"', data="source = '/a b'")
    with pytest.raises(
        NotAllowed, match="run r .*model.factory = 'a:b' is code.*data.source = '/a b' reads files"
    ) as told:
        permit(given, Allowed())
    assert str(told.value).endswith("add: --allow-code a:b --data-root '/a b'")


def test_the_owner_is_asked_once_for_all_of_it(text: Path) -> None:
    questions: list[str] = []

    def ask(question: str) -> bool:
        questions.append(question)
        return len(questions) == 1

    given = spec(model='factory = "a:b"', data=f"source = '{text}'")
    permit(given, Allowed(), ask)
    assert len(questions) == 1
    assert "'a:b'" in questions[0]
    assert questions[0].endswith(f"data.source = '{text}' reads files of this machine. Allow it?")
    with pytest.raises(NotAllowed):
        permit(given, Allowed(), ask)


def test_the_options_for_ones_own_spec_allow_all_of_it(text: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "c.txt").symlink_to(text / "0.txt")
    given = spec(model='factory = "a:b"', data=f"source = '{tmp_path}/links'\ntokenizer = 'org/words'")
    words = options_for(given)
    assert shlex.join(words) == (
        f"--allow-code a:b --data-root hub:org/words --data-root {tmp_path}/links --data-root {text}"
    )
    pairs = list(zip(words[::2], words[1::2], strict=True))
    roots = [value for option, value in pairs if option == "--data-root"]
    assert refused(given, *roots, factories=("a:b",)) == []


# --- in a run -----------------------------------------------------------------------------------------------------

TOUCHES = """
import pathlib, torch
pathlib.Path({file!r}).touch()
def make():
    return torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))
"""


@pytest.mark.slow
@pytest.mark.covers("security:foreign-factory")
def test_a_worker_runs_no_code_and_reads_nothing_unless_its_owner_says_so(
    coordinator: InThread,
    text: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touched, name = tmp_path / "touched", f"{tmp_path.name.replace('-', '_')}_model"
    (tmp_path / f"{name}.py").write_text(TOUCHES.format(file=str(touched)))
    monkeypatch.syspath_prepend(tmp_path)
    whole = tiny_spec("hostile", text, seed=1, rounds=1, min_workers=1).replace(
        'preset = "tiny"', f'factory = "{name}:make"'
    )
    coordinator.create_run(whole)
    state = tmp_path / "state"

    def work(ask: Any = None, **changes: Any) -> Exit:
        caplog.clear()
        return run_worker(worker_settings(coordinator, "hostile", state, **changes), ask=ask)

    assert work(data_root=()) == Exit.REFUSED
    assert caplog.records[-1].getMessage().endswith(f"add: --allow-code {name}:make --data-root {text}")
    assert work(data_root=(str(text),)) == Exit.REFUSED
    assert work(data_root=(), ask=lambda _: False) == Exit.REFUSED
    assert work(data_root=(), allow_code=(f"{name}:make",)) == Exit.REFUSED
    assert not touched.exists()
    assert f"{name}" not in sys.modules
    assert not state.exists(), "nothing was begun"
    assert work(data_root=(), data=str(text), allow_code=(f"{name}:make",)) == Exit.DONE
    assert touched.exists()
    with open_http(coordinator.url) as http:
        client = Client(http, "hostile", coordinator.token(Scope.VIEWER))
        with pytest.raises(NotAllowed, match=f"add: --allow-code {name}:make"):
            load_checkpoint(client)
        with pytest.raises(NotAllowed, match=f"add: --allow-code {name}:make"):
            export(client, tmp_path / "model")
        assert not (tmp_path / "model").exists()
        export(client, tmp_path / "model", factories=(f"{name}:make",))


@pytest.mark.system
@pytest.mark.parametrize(
    ("answer", "code"), [in_the_night("y", Exit.DONE), ("n", Exit.REFUSED), in_the_night("\x03", Exit.REFUSED)]
)
def test_at_a_terminal_the_owner_is_asked(
    coordinator: InThread, text: Path, tmp_path: Path, answer: str, code: Exit
) -> None:
    """Ctrl-C is a no. Once more where it came just before the terminal was waited for, when Python does not wake."""
    coordinator.create_run(tiny_spec("r", text, seed=1, rounds=1, min_workers=1))
    command = [sys.executable, "-m", "outerstep", "worker", coordinator.url, "--run", "r", "--name", "a"]
    command += ["--device", "cpu", "--state-dir", str(tmp_path / "state")]
    environment = os.environ | {"OUTERSTEP_TOKEN": coordinator.token(Scope.WORKER), "OMP_NUM_THREADS": "1"}
    process, ours = at_terminal.start(command, environment)
    said = b""
    try:
        while b"[y/N]" not in said:
            said += os.read(ours, 4096)
        os.write(ours, answer.encode() + (b"" if answer == "\x03" else b"\n"))
        while True:
            while answer == "\x03" and b"ERROR" not in said and not select.select([ours], [], [], 2.0)[0]:
                os.write(ours, answer.encode())
            if not (piece := _read(ours)):
                break
            said += piece
        assert process.wait() == code, said.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert f"data.source = '{text}' reads files of this machine. Allow it? [y/N]" in " ".join(said.decode().split())


def _read(terminal: int) -> bytes:
    """What was written; nothing once nobody has the other side open any more."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
