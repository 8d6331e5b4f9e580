"""The command line where no coordinator is needed: help, usage, exit codes, missing extras."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from docs.write_commands import commands
from outerstep.cli import ENTRIES, app
from outerstep.cli.errors import UsageError, exit_code, import_extra
from outerstep.cli.options import checked_url, find_token
from outerstep.common.exit_codes import IN_WORDS
from protocol.errors import OuterstepError, Problem, SpecError, Transient, UnexpectedAnswer
from tests.outerstep.conftest import outerstep
from tests.outerstep.examples import SPEC
from tests.support.python import python

# What shows nothing that a program could want: the exit code says it.
SHOW_NOTHING = {
    *{("coordinator",), ("aggregator",), ("worker",)},  # processes, which log
    *{("coordinator", "notify-test"), ("coordinator", "rotate-secret"), ("run", "export")},  # "it is done"
    *{("run", "rm"), ("token", "revoke")},
    ("run", "chat"),  # a conversation
    ("run", "track"),  # writes what it shows; `--to jsonl` is JSON
    ("run", "pin"),  # TOML for programs
}


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_help_says_what_a_command_does_and_shows_an_example(command: tuple[str, ...]):
    code, out, _ = outerstep(*command, "--help")
    assert outerstep(*command, "-h")[:2] == (code, out)
    assert code == 0
    assert "Example:\n" in out
    assert f"outerstep {' '.join(command)}" in out
    # What shows something shows it as JSON, too, by the one option for it: some had --json instead.
    assert ("--format <table|json>" in out) == (command not in SHOW_NOTHING)
    assert "--json" not in out


@pytest.mark.parametrize("name", ENTRIES)
def test_the_list_of_commands_says_what_a_command_says_itself(name: str):
    """It has its own copy, so that no command is imported for it."""
    help_text = get_group(app).commands[name].help or ""
    assert " ".join(help_text.split()).startswith(ENTRIES[name].help)


@pytest.mark.slow
def test_a_shell_completes_commands():
    words = "outerstep run ch"
    done = python("-m", "outerstep", _OUTERSTEP_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD="2")
    assert done.stdout.split() == ["chat"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (SpecError("x"), 2),
        (Problem("not-found", "x"), 3),
        (Problem("run-exists", "x"), 3),
        (UnexpectedAnswer("x"), 3),
        (Transient("x"), 75),
        (Problem("not-ready", "x"), 75),
        (Problem("internal", "x"), 75),
    ],
)
def test_exit_codes(error: OuterstepError, code: int):
    assert exit_code(error) == code


def test_the_exit_codes_are_told_as_they_are():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for told in (readme, outerstep("--help")[1], outerstep("worker", "--help")[1]):
        assert IN_WORDS in " ".join(told.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Usage: outerstep"),
        (["no-such-command"], "No such command 'no-such-command'"),
        (["run", "ls"], "a token is needed: --token-file FILE, or OUTERSTEP_TOKEN in the environment"),
        (["run", "ls", "--token", "a", "--token-file", "b"], "--token or --token-file, not both"),
        (["run", "ls", "--token", "two words"], "--token: this is not a token"),
        (["run", "ls", "--token", "t", "--url", "coordinator:8470"], "coordinator:8470: not an address such as"),
        (["run", "show", "r", "--units", "--workers", "--token", "t"], "give only one of --workers, --worker, --check"),
        (["run", "member", "r", "box-7", "--token", "t"], "Missing argument 'action'. Choose from"),
        (["run", "member", "r", "box-7", "kick", "--token", "t"], "'kick' is not one of 'evict', 'ban'"),
        (["token", "ls", "--limit", "3", "--token", "t"], "--limit needs --audit"),
        (["token", "create", "--token", "t"], "Missing option '--scope'"),
        (["worker", "http://c"], "a token is needed: --token-file FILE, or OUTERSTEP_TOKEN in the environment"),
        (["worker", "http://c", "--run", "r", "--mode", "fsdp"], "No such option: --mode"),
        (["worker", "http://c", "--run", "r", "--precision", "fp8"], "'fp8' is not one of 'float8', 'bf16'"),
        (["coordinator", "--log-level", "loud"], "'--log-level': Value error, 'loud' is not one of 'debug', 'info'"),
        (["demo", "--codec", "int3"], "'int3' is not one of 'fp32', 'bf16', 'int8'"),
    ],
)
def test_bad_usage_is_one_clear_message_and_exit_code_2(arguments: list[str], said: str):
    code, out, err = outerstep(*arguments)
    assert code == 2
    assert said in out + err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ([], {}, "URL is missing, and so is OUTERSTEP_URL in the environment; --run is missing"),
        (["coordinator:8470"], {"OUTERSTEP_RUN": "r"}, "'coordinator:8470' is not an address"),
        (["http://c", "--run", "Not A Run"], {}, "--run = 'Not A Run': a name has at most 63"),
        (["--micro-batch", "many"], {}, "--micro-batch = 'many': give auto, or a number of sequences, at least 1"),
        ([], {"OUTERSTEP_MICRO_BATCH": "0"}, "OUTERSTEP_MICRO_BATCH = '0': give auto, or a number"),
        ([], {"OUTERSTEP_MAX_UP": "8"}, "OUTERSTEP_MAX_UP = '8': '8' is not a rate in bits per second"),
        ([], {"OUTERSTEP_ALLOW_CODE": "a:b,c"}, "OUTERSTEP_ALLOW_CODE.1 = 'c': give module:function"),
        (["http://c", "--run", "r"], {"OUTERSTEP_DATAROOT": "/"}, "did you mean OUTERSTEP_DATA_ROOT?"),
        (["http://localhost", "--run", "r", "--gpus", "99"], {}, "--gpus 99: torch sees "),
    ],
)
def test_a_wrong_setting_of_a_worker_is_named_as_it_was_given(
    arguments: list[str], variables: dict[str, str], said: str
):
    code, out, err = outerstep("worker", *arguments, **{"OUTERSTEP_TOKEN": "t", **variables})
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (SPEC + "sync.codec = 'int8'\n", "sync.codec: unknown key"),
        (
            SPEC.replace('preset = "tiny"', 'config = { model_type = "gpt2" }') + "[data]\nsequence_length = 1025\n",
            "data.sequence_length = 1,025 is more than the 1,024 positions of the model (n_positions)",
        ),
    ],
)
def test_a_wrong_spec_is_refused_before_any_request(tmp_path: Path, spec: str, said: str):
    path = tmp_path / "run.toml"
    path.write_text(spec)
    code, _, err = outerstep("run", "create", str(path), "--token", "t")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"outerstep: {path}: ")
    assert said in err


def test_a_directory_that_holds_something_is_not_written_to(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    code, _, err = outerstep("demo", "--keep", str(tmp_path))
    assert code == 2
    assert "not empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_token_is_the_flags_then_the_files_then_the_environments(tmp_path: Path):
    path = tmp_path / "token"
    path.write_text("from-file\n")
    environment = {"OUTERSTEP_TOKEN": "from-environment"}
    assert find_token("from-flag", None, environment) == "from-flag"
    assert find_token(None, path, environment) == "from-file"
    assert find_token(None, None, environment) == "from-environment"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8470", "https://coordinator.example.org/prefix", "http://[::1]:80"])
def test_addresses(url: str):
    assert checked_url(url) == url


@pytest.mark.system
@pytest.mark.parametrize("command", ["coordinator", "worker"])
def test_a_missing_extra_is_named_with_its_cure(command: str):
    extra, library = ("worker", "torch") if command == "worker" else ("coordinator", "sqlalchemy")
    # None in sys.modules makes `import` raise ModuleNotFoundError.
    program = f"import sys; sys.modules[{library!r}] = None; from outerstep.cli import main; main()"
    arguments = ["worker", "http://c", "--run", "r"] if command == "worker" else [command]
    done = python("-c", program, *arguments, OUTERSTEP_TOKEN="t")
    last = done.stderr.splitlines()[-1]  # a worker has said before that it imports torch
    assert (done.returncode, last.endswith(f"run: pip install 'outerstep[{extra}]'")) == (2, True), last
    assert f"`outerstep {command}` needs {library}, which is not installed" in last


def test_a_missing_module_of_ours_is_a_bug_and_not_a_missing_extra():
    with pytest.raises(ModuleNotFoundError):
        import_extra("worker.no_such_module", extra="worker", command="outerstep worker")


def test_what_nobody_expected_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outerstep.rest.Client.runs", Mock(side_effect=ZeroDivisionError))
    assert isinstance(CliRunner().invoke(app, ["run", "ls", "--token", "t"]).exception, ZeroDivisionError)


@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_one_line():
    """It was a traceback: the output on a full disk, for example."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "outerstep", "token", "ls", "--help"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        75,
        "outerstep: the output or an open file: no space left on device\n",
    )
