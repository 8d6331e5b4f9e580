"""Runs in miniature: a spec as it is, section by section, with sizes that a CPU trains in seconds."""

import json
import tomllib
from pathlib import Path
from typing import Any

from protocol.spec.model import PRESETS
from tests.support.conversations import write_conversations
from tests.support.text import write_text
from tests.support.tokenizers import write_chat_tokenizer, write_tokenizer
from tests.support.trained import save_trained

VOCABULARY = 300
SMALL_MODEL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL: dict[str, dict[str, Any]] = {
    "data": {"sequence_length": 16, "holdout": 0.2},
    "inner": {"batch_size": 2, "warmup_steps": 2},
    "sync": {"wait": "always", "rounds": 2, "inner_steps": 4, "overlap": 1, "fragment_elements": 2048},
    "members": {"min_workers": 1},
    "evaluation": {"max_tokens": 256},
}


def miniature(text: str, home: Path) -> str:
    """Return the spec `text`, TOML, with its sizes cut; its text, tokenizer and weights are made below `home`."""
    document = tomllib.loads(text)
    for section, sizes in SMALL.items():
        own = document.setdefault(section, {})
        own.update({key: value for key, value in sizes.items() if key in own or key != "overlap"})
    model, data = document["model"], document["data"]
    if data.get("format", "text") == "text":
        data["source"] = str(write_text(home / "text", seed=1, words=400))
        data["tokenizer"] = str(write_tokenizer(home / "tokenizer"))
    else:
        home.mkdir(exist_ok=True)
        data["source"] = str(write_conversations(home / "talk.jsonl"))
        data["tokenizer"] = str(write_chat_tokenizer(home / "tokenizer"))
        data["sequence_length"] = 64  # the longest conversation is longer than 16 tokens
    if "preset" in model:
        model["config"] = {"model_type": "llama", **PRESETS[model.pop("preset")], **SMALL_MODEL}
    if "pretrained" in model:
        save_trained(home / "trained", **SMALL_MODEL)
        model["pretrained"] = str(home / "trained")
    if "lora" in model:
        model["lora"]["rank"] = 2
    return toml_of(document)


def toml_of(table: dict[str, Any], path: tuple[str, ...] = ()) -> str:
    """Return a document of tables, texts, numbers, booleans and lists of them as TOML."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    head = [f"[{'.'.join(path)}]"] if path else []
    tables = [toml_of(value, (*path, key)) for key, value in table.items() if isinstance(value, dict)]
    return "\n".join([*head, *plain, *tables])
