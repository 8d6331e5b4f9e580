"""Files that were written on Windows: UTF-8 with a byte-order mark, and UTF-16, which PowerShell writes."""

import base64
import codecs
import shutil
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from coordinator.settings import Settings
from outerstep.cli import app
from outerstep.cli.errors import UsageError
from outerstep.cli.options import find_token
from outerstep.cli.run.runs import read_spec
from protocol.text import UTF_16
from tests.support.tokenizers import CHATML, write_chat_tokenizer
from worker.data.tokens.conversations import load_chat_template
from worker.data.tokens.tokenizer import load_tokenizer
from worker.errors import DataError

SPEC = 'name = "r"  # Größe\nmodel.preset = "tiny"\nsync.rounds = 1\n'


def marked(path: Path, encoding: str) -> Path:
    """Write the file anew in this encoding, with a byte-order mark."""
    mark = {"utf-8": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}[encoding]
    path.write_bytes(mark + path.read_text(encoding="utf-8").encode(encoding))
    return path


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding="utf-8")
    return marked(path, encoding)


def test_a_mark_before_utf_8_is_no_part_of_the_text(tmp_path: Path) -> None:
    text, spec = read_spec(written(tmp_path / "run.toml", SPEC))
    assert (text, spec.name) == (SPEC, "r")
    assert find_token(None, written(tmp_path / "token", "secret\r\n"), {}) == "secret"
    secret = f"whsec_{base64.b64encode(bytes(32)).decode()}"
    settings = Settings(notify_secret=SecretStr(f"@{written(tmp_path / 'secret', secret)}"))
    assert settings.notify_secret == SecretStr(secret)
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text(CHATML)
    copy = Path(shutil.copytree(tokenizer, tmp_path / "copy"))
    for file in copy.iterdir():
        marked(file, "utf-8")
    plain, with_marks = load_tokenizer(str(tokenizer)), load_tokenizer(str(copy))
    assert (plain.digest, plain.end, plain.vocabulary) == (with_marks.digest, with_marks.end, with_marks.vocabulary)
    assert plain.encoder()(["the worker"])[0].tolist() == with_marks.encoder()(["the worker"])[0].tolist()
    template, same = load_chat_template(plain), load_chat_template(with_marks)
    assert template is not None
    assert same is not None
    assert template.templates == same.templates


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_named_with_the_remedy(tmp_path: Path, encoding: str) -> None:
    spec = written(tmp_path / "run.toml", SPEC, encoding)
    with pytest.raises(UsageError) as refused:
        read_spec(spec)
    assert str(refused.value) == f"{spec}: {UTF_16}"
    stdin = CliRunner().invoke(app, ["run", "create", "-", "--token", "t"], input=spec.read_bytes())
    assert (stdin.exit_code, stdin.stderr) == (2, f"outerstep: -: {UTF_16}\n")
    with pytest.raises(UsageError, match="UTF-16, not UTF-8"):
        find_token(None, written(tmp_path / "token", "secret", encoding), {})
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer")
    written(tokenizer / "chat_template.jinja", CHATML, encoding)
    with pytest.raises(DataError, match="chat_template.jinja .*UTF-16, not UTF-8"):
        load_chat_template(load_tokenizer(str(tokenizer)))
    marked(tokenizer / "tokenizer.json", encoding)
    with pytest.raises(DataError, match="tokenizer.json .*UTF-16, not UTF-8"):
        load_tokenizer(str(tokenizer))
