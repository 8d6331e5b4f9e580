"""How many rounds a small training set gives, and specs that are completed with them."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outerstep.epochs import MOST_INNER_STEPS, choose, completed
from protocol.spec.run import parse_spec
from tests.outerstep.conftest import Served, outerstep
from tests.support.conversations import write_conversations
from tests.support.text import write_text
from tests.support.tokenizers import write_chat_tokenizer


def test_five_hundred_conversations_on_four_workers() -> None:
    """About a hundred sequences of 1024 tokens, with what is held out."""
    found = choose(95, 4)
    assert (found.batch_size, found.inner_steps, found.rounds, found.warmup_steps) == (1, 5, 14, 7)
    assert found.planned_epochs == pytest.approx(3, abs=0.1)


def test_a_large_set_has_large_batches_and_long_rounds() -> None:
    found = choose(1_000_000, 4)
    assert (found.batch_size, found.inner_steps, found.rounds) == (8, 500, 187)
    assert choose(20_000, 4).rounds == 20


@pytest.mark.slow
@given(st.integers(1, 10**7), st.integers(1, 100), st.floats(0.1, 50.0))
def test_epochs_are_those_wanted_as_far_as_rounds_are_whole(sequences: int, workers: int, epochs: float) -> None:
    found = choose(sequences, workers, epochs)
    assert found.rounds >= 1
    assert 1 <= found.inner_steps <= MOST_INNER_STEPS
    assert 0 <= found.warmup_steps < found.rounds * found.inner_steps
    steps = max(epochs * (sequences // found.batch_size) / workers, 1)
    assert abs(found.rounds * found.inner_steps - steps) <= found.inner_steps + 1


# --- specs ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("worker.data.tokens.preparing.cores", lambda: 1)


def chat_spec(tmp_path: Path, rest: str = "") -> str:
    talk, tokenizer = write_conversations(tmp_path / "talk.jsonl", 200), write_chat_tokenizer(tmp_path / "tokenizer")
    return (
        f'name = "talk"\nmodel.preset = "tiny"\nmodel.vocab_size = 300\n[data]  # conversations\nsource = "{talk}"\n'
        f'tokenizer = "{tokenizer}"\nformat = "chat"\nsequence_length = 160\n{rest}'
    )


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["", "[sync]\nzstd = false\n[inner]\nlearning_rate = 0.001\n", "[inner]  # mine\n"])
def test_a_spec_is_completed(tmp_path: Path, rest: str) -> None:
    found = completed(chat_spec(tmp_path, rest), workers=4)
    assert found is not None
    text, schedule = found
    spec = parse_spec(text)
    assert "# conversations" in text
    assert (spec.sync.rounds, spec.sync.inner_steps) == (schedule.rounds, schedule.inner_steps)
    assert (spec.inner.batch_size, spec.inner.warmup_steps) == (schedule.batch_size, schedule.warmup_steps)
    assert tomllib.loads(text).items() >= {"name": "talk"}.items()
    assert completed(text) is None, "sync.rounds is given now"


def test_keys_that_are_given_are_not_changed(tmp_path: Path) -> None:
    found = completed(chat_spec(tmp_path, "[inner]\nbatch_size = 4\nwarmup_steps = 0\n[sync]\ninner_steps = 3\n"))
    assert found is not None
    spec = parse_spec(found[0])
    assert (spec.inner.batch_size, spec.inner.warmup_steps, spec.sync.inner_steps) == (4, 0, 3)
    assert found[1].workers == 1


def test_text_has_no_rounds_by_itself(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", seed=1, files=4, words=500)
    spec = f'name = "r"\nmodel.preset = "tiny"\ndata.source = "{text}"\n'
    assert completed(spec) is None
    found = completed(spec, epochs=2.0)
    assert found is not None
    assert parse_spec(found[0]).sync.rounds == found[1].rounds


@pytest.mark.slow
def test_run_create_explains_what_it_chose(served: Served, tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(chat_spec(tmp_path))
    code, out, err = served.outerstep("run", "create", str(spec), "--workers", "4")
    assert code == 0, err
    assert "rounds of 5 inner steps on 4 workers" in err
    assert out.startswith("run talk is created")
    assert "already exists with this spec" in served.outerstep("run", "create", str(spec), "--workers", "4")[1]
    given = spec.read_text() + "[sync]\nrounds = 4\n"
    code, _, err = served.outerstep("run", "create", "-", "--epochs", "2", stdin=given)
    assert (code, "--workers and --epochs choose sync.rounds" in err) == (2, True)


def test_plan_shows_the_rounds_of_a_set(tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(chat_spec(tmp_path))
    code, out, err = outerstep("plan", "--spec", spec, "--workers", 2, "--epochs", 1)
    assert code == 0, err
    assert "on 2 workers use" in out
    assert "[sync]\nrounds = " in out
    facts = json.loads(outerstep("plan", "--spec", spec, "--format", "json")[1])
    assert facts["workers"] == 4
    assert facts["units_per_epoch"] == facts["sequences"] // facts["batch_size"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --params, --up, --down and --step-time; or --box; or --params and --memory; or --spec"),
        (["--spec", "run.toml", "--up", "1mbit"], "leave out --up"),
        (["--epochs", "3", "--params", "1e6", "--up", "1mbit", "--down", "1mbit", "--step-time", "1"], "needs --spec"),
        (["--spec", "no.toml"], "no.toml"),
    ],
)
def test_options_that_do_not_fit_together(arguments: list[str], said: str) -> None:
    code, _, err = outerstep("plan", *arguments)
    assert (code, said in err) == (2, True), err
