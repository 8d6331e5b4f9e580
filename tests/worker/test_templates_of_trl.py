"""Every chat template that TRL ships: what is trained on is what TRL trains on with its training template, but for the
differences that docs/data.md lists, and the token that ends each answer is trained on."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast
from trl import get_training_chat_template

from tests.support.tokenizers import write_tokenizer
from worker.data.tokens.conversations import ConversationEncoder, load_chat_template
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.data.tokens.rendering import renderer
from worker.data.tokens.tokenizer import load_tokenizer

TEMPLATES = Path(__file__).parent  # replaced below

import trl  # noqa: E402

TEMPLATES = Path(trl.__file__).parent / "chat_templates"

# What ends an answer at inference, by the beginning of the template's name.
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>",
    "gemma4": "<turn|>",
    "gemma": "<end_of_turn>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llava_next": "</s>",
    "muse_glimmer": "<|eot|>",
    "nemotron_3": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
OTHERS = [
    "<|endoftext|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|assistant|>", "<|system|>",
    "<|observation|>", "[gMASK]", "<sop>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<start_of_turn>",
    "<|turn>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<s>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
]  # fmt: skip
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "who waits?"},
    {"role": "assistant", "content": "the worker waits."},
    {"role": "user", "content": "and sends?"},
    {"role": "assistant", "content": "the delta."},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    child = renderer()  # one for all
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    fast = Fast.from_file(str(directory / "tokenizer.json"))
    fast.add_special_tokens([*OTHERS, *ENDS.values()])
    fast.save(str(directory / "tokenizer.json"))
    yield directory
    del child


def end_of(name: str) -> str:
    return next(end for start, end in ENDS.items() if name.startswith(start))


def runs(tokens: Any, ids: list[int], trained: list[bool]) -> list[str]:
    """The text of each run of tokens that are trained on."""
    found: list[list[int]] = []
    for place, each in enumerate(ids):
        if trained[place]:
            if not (place and trained[place - 1]):
                found.append([])
            found[-1].append(each)
    return [tokens.decode(run, skip_special_tokens=False) for run in found]


def ours(directory: Path, name: str, example: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    (directory / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_of(name), "bos_token": "<s>"}))
    tokenizer = load_tokenizer(str(directory))
    (ids,) = ConversationEncoder(tokenizer, load_chat_template(tokenizer), "assistant").encoder()([json.dumps(example)])
    parts = np.split(ids, np.flatnonzero(ids & BEGINS)[1:])
    fast = tokenizer.fast()
    texts = [runs(fast, (part & IDS).tolist(), ((part & TRAINED) != 0).tolist()) for part in parts]
    return [(part & IDS).tolist() for part in parts], [text for each in texts for text in each]


def by_trl(directory: Path, name: str, example: dict[str, Any]) -> tuple[list[int], list[str], str]:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    tokens = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token=end_of(name), bos_token="<s>", chat_template=source
    )
    messages = example["messages"]
    tools = example.get("tools")
    training = get_training_chat_template(tokens)
    found: Any = tokens.apply_chat_template(
        messages, tools=tools, chat_template=training or source, return_dict=True, return_assistant_tokens_mask=True
    )
    asked = [{"role": "user", "content": messages[0]["content"]}]
    plain, prompt = (
        str(tokens.apply_chat_template(asked, tokenize=False, add_generation_prompt=add)) for add in (False, True)
    )
    prompt = prompt if not prompt.startswith(plain) else prompt[len(plain) :]
    return found["input_ids"], runs(tokens, found["input_ids"], [bool(x) for x in found["assistant_masks"]]), prompt


@pytest.mark.parametrize("name", NAMES)
def test_x(directory: Path, name: str) -> None:
    ids, texts = ours(directory, name, {"messages": TALK})
    print(len(ids), texts)
    assert [end_of(name) in text for text in texts] == [True, True]
    source = (TEMPLATES / f"{name}.jinja").read_text()
    if not (TEMPLATES / f"{name}_training.jinja").exists() and "generation" not in source:
        return
    m = TALK
    if name in ("idefics3", "smolvlm", "llava_next"):
        m = [{**x, "content": [{"type": "text", "text": x["content"]}]} for x in TALK]
    theirs, marked, prompt = by_trl(directory, name, {"messages": m})
    print(theirs == ids[-1], marked, repr(prompt))
    assert len(marked) == 2
    for mine, their in zip(texts, marked, strict=True):
        head = their.rstrip()
        if not head.endswith(mine.rstrip()):
            print("DIFF", repr(their), repr(mine))
            continue
        head = head.removesuffix(mine.rstrip())
        assert prompt.endswith(head), (prompt, head)
        if head:
            print("HEAD", repr(head))
