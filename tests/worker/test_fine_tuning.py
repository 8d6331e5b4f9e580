"""A run on conversations: weighed by trained tokens, evaluated, exported with its chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from harness.coordinator import InThread
from outerstep import DiLoCo, unpack
from outerstep.chat import Chat, of_export
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from outerstep.compare import Contender, measure
from protocol.messages import Scope
from tests.support.conversations import write_conversations
from tests.support.tokenizers import CHATML_MARKED, write_chat_tokenizer
from tests.support.trained import save_trained
from tests.worker.runs import shown, work
from worker.errors import DataError
from worker.export import export
from worker.link.client import Client, open_http
from worker.settings import BoxSettings


def create(coordinator: InThread, tmp_path: Path, model: str = "") -> Path:
    """A run on conversations, and its tokenizer."""
    save_trained(tmp_path / "trained", vocab_size=300, max_position_embeddings=200)
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", CHATML_MARKED)
    coordinator.create_run(
        f'name = "talk"\n[model]\npretrained = "{tmp_path / "trained"}"\n{model}\n[data]\n'
        f'source = "{write_conversations(tmp_path / "talk.jsonl")}"\ntokenizer = "{tokenizer}"\n'
        'format = "chat"\nsequence_length = 160\nholdout = 0.2\n[inner]\nbatch_size = 2\nlearning_rate = 0.01\n'
        'warmup_steps = 0\n[sync]\nwait = "always"\nrounds = 3\ninner_steps = 4\n[checkpoints]\nevery_rounds = 1\n'
    )
    return tokenizer


@pytest.mark.slow
def test_adapters_are_trained_on_conversations(coordinator: InThread, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs: pip install 'outerstep[peft]'")
    tokenizer = create(coordinator, tmp_path, "lora.rank = 4")
    assert work(coordinator, tmp_path, "talk") == Exit.DONE
    run = shown(coordinator, "talk")
    assert run.data is not None
    assert run.data.unit_tokens is not None
    assert 2 <= run.data.unit_tokens < run.spec.unit_tokens
    assert run.tokens == 3 * 4 * run.data.unit_tokens
    with coordinator.client() as http:
        rounds = http.get("/v1/runs/talk/rounds").json()["items"]
    first = rounds[-1]["held_out_loss"]
    assert run.held_out_loss is not None
    assert run.held_out_loss < first

    token = coordinator.token(Scope.VIEWER)
    with open_http(coordinator.url) as http:
        client = Client(http, "talk", token)
        for directory, merge in (("adapters", False), ("merged", True)):
            export(client, tmp_path / directory, merge=merge)
            assert (tmp_path / directory / "chat_template.jinja").read_text() == CHATML_MARKED
        merged = Contender("merged", directory=tmp_path / "merged")
        again = measure([merged], http, token, BoxSettings(data_root=(str(tmp_path),)))
    assert again.losses[0].mean == pytest.approx(run.held_out_loss, rel=1e-4)
    generation = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 283, "<|im_end|>"
    assert (tokenizer / "tokenizer.json").read_bytes() == (tmp_path / "merged" / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_a_script_unpacks_conversations(coordinator: InThread, tmp_path: Path) -> None:
    """Its loop sees what `outerstep worker` trains on, and the coordinator weighs it in the same way."""
    from transformers import AutoModelForCausalLM

    create(coordinator, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float32, use_cache=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    token = coordinator.token(Scope.WORKER)
    diloco = DiLoCo.connect(
        model, optimizer, run="talk", url=coordinator.url, token=token, name="a", state_dir=tmp_path / "state"
    )
    data = diloco.training_set(data_root=[str(tmp_path)])
    losses = []
    with diloco:
        for unit in diloco.units():
            tokens, targets, positions = unpack(data.unit(unit))
            logits = model(tokens, position_ids=positions).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            diloco.report_loss(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0]
    run = shown(coordinator, "talk")
    assert run.data is not None
    assert run.tokens == 12 * (run.data.unit_tokens or 0)


# --- talking to the result ------------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A model with random weights, and a tokenizer with a chat template."""
    save_trained(tmp_path / "export", vocab_size=300, max_position_embeddings=120, eos_token_id=283)
    write_chat_tokenizer(tmp_path / "export")
    return tmp_path / "export"


@pytest.mark.slow
def test_a_conversation_is_rendered_and_streamed(exported: Path) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = of_export(exported, "cpu")
    chat = Chat(model, tokenizer, system="be kind", max_tokens=5, temperature=0)
    shown: list[str] = []
    answer = chat.ask("who waits?", shown.append)
    assert answer == "".join(shown)
    assert len(shown) > 1
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]

    by_transformers = AutoTokenizer.from_pretrained(exported)
    prompt: Any = by_transformers.apply_chat_template(
        chat.messages[:2], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = model.generate(**prompt, max_new_tokens=5, do_sample=False, eos_token_id=283)  # type: ignore[operator]
    assert answer == by_transformers.decode(expected[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

    chat.ask("and then?", shown.append)
    assert len(chat.messages) == 5
    with pytest.raises(DataError, match="tokens, and the model takes 120"):
        chat.ask("long " * 120, shown.append)
    assert len(chat.messages) == 5
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "be kind"}]


def test_the_command_holds_a_conversation(exported: Path) -> None:
    command = ["run", "chat", "--export", str(exported), "--temperature", "0", "--max-tokens", "4", "--device", "cpu"]
    done = CliRunner().invoke(app, command, input="who?\n/reset\n\nwho?\n" + "long " * 120 + "\n")
    assert done.exit_code == 0, done.stderr
    first, second, *rest = done.stdout.splitlines()
    assert first == second, "the same question in a new conversation"
    assert rest == []
    assert "the model takes 120; /reset starts a new conversation" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "give the name of a run, or --export"),
        (["talk", "--export", "{}"], 2, "give the name of a run, or --export"),
        (["--export", "{}", "--round", "3"], 2, "leave it out with --export"),
        (["--export", "{}/none"], 3, "was not written by `outerstep run export`"),
        (["--export", "{}", "--device", "abacus"], 2, "--device"),
        (["--export", "{}", "--allow-code", "none"], 2, "--allow-code"),
    ],
)
def test_conversations_that_cannot_begin(exported: Path, arguments: list[str], code: int, said: str) -> None:
    done = CliRunner().invoke(app, ["run", "chat", *(each.format(exported) for each in arguments)])
    assert done.exit_code == code
    assert said in done.stderr


def test_a_model_without_a_template_cannot_be_talked_to(exported: Path) -> None:
    (exported / "chat_template.jinja").unlink()
    done = CliRunner().invoke(app, ["run", "chat", "--export", str(exported)])
    assert done.exit_code == 3
    assert "has no chat template; put its chat_template.jinja into" in done.stderr
