"""A run on conversations: weighed by trained tokens, evaluated, exported with its chat template."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from harness.coordinator import InThread, coordinator_thread
from outerstep import DiLoCo, unpack
from outerstep.common.exit_codes import Exit
from outerstep.models import evaluate_model
from protocol.messages import Scope
from tests.support.conversations import write_conversations
from tests.support.tokenizers import CHATML_MARKED, write_chat_tokenizer
from tests.support.trained import save_trained
from tests.worker.runs import shown, work
from worker.export import export
from worker.link.client import Client, open_http
from worker.settings import BoxSettings


@pytest.fixture
def coordinator(tmp_path: Path):
    with coordinator_thread(tmp_path / "coordinator") as running:
        yield running


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("worker.data.tokens.preparing.cores", lambda: 1)


def create(coordinator: InThread, tmp_path: Path, model: str = "") -> Path:
    """A run on conversations, and its tokenizer."""
    save_trained(tmp_path / "trained", vocab_size=300, max_position_embeddings=200)
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", CHATML_MARKED)
    coordinator.create_run(
        f'name = "talk"\n[model]\npretrained = "{tmp_path / "trained"}"\n{model}\n[data]\n'
        f'source = "{write_conversations(tmp_path / "talk.jsonl")}"\ntokenizer = "{tokenizer}"\n'
        'format = "chat"\nsequence_length = 160\nholdout = 0.2\n[inner]\nbatch_size = 2\nlearning_rate = 0.01\n'
        "warmup_steps = 0\n[sync]\nrounds = 3\ninner_steps = 4\n[checkpoints]\nevery_rounds = 1\n"
    )
    return tokenizer


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
        again = evaluate_model(http, token, run, BoxSettings(), exported=tmp_path / "merged")
    assert again.loss == pytest.approx(run.held_out_loss, rel=1e-4)
    generation = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 283, "<|im_end|>"
    assert (tokenizer / "tokenizer.json").read_bytes() == (tmp_path / "merged" / "tokenizer.json").read_bytes()


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
