"""Every chat template that TRL ships: the same tokens are trained on as with TRL's training template, but for the
differences that docs/data.md lists, and always the token that ends an answer."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

from tests.support.tokenizers import write_tokenizer
from worker.data.tokens.conversations import conversation_encoder, load_chat_template
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.data.tokens.rendering import BadConversation
from worker.data.tokens.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

DIRECTORY = Path(trl.__file__).parent / "chat_templates"
SOURCES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DIRECTORY.glob("*.jinja"))}
NAMES = [name for name in SOURCES if not name.endswith("_training")]

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
SPECIAL = [
    *{*ENDS.values(), "<s>", "<|endoftext|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|assistant|>"},
    *("<|system|>", "<|observation|>", "[gMASK]", "<sop>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>"),
    *("<start_of_turn>", "<|turn>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
]  # fmt: skip
REWRITE = {"gptoss", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}  # earlier answers once others follow

WANT_A_QUESTION = {"qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"}  # before any answer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


TALK = [user("who waits?"), assistant("the worker."), user("and sends?"), assistant("the delta.")]
GREETING = [assistant("hello."), *TALK[2:]]
THOUGHTS = [
    user("who?"),
    assistant("<think>\nhm\n</think>\n\nall."),
    user("sure?"),
    assistant("<think>\noh\n</think>\n\nyes."),
]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "lookup", "arguments": {"key": "x"}}}
TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "d", "parameters": {"type": "object"}}}]
CALLING = [
    user("who waits?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "lookup", "tool_call_id": "abcdefghi", "content": "it"},
    assistant("the worker."),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens of all families."""
    directory = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    fast = Fast.from_file(str(directory / "tokenizer.json"))
    fast.add_special_tokens(SPECIAL)
    fast.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def transformers_own(directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), bos_token="<s>")


def end_of(name: str) -> str:
    return next(end for start, end in ENDS.items() if name.startswith(start))


def trained(tokenizer: Any, ids: list[int], marks: list[bool]) -> Iterator[str]:
    """The text of each run of tokens that are trained on."""
    run: list[int] = []
    for token, mark in zip([*ids, 0], [*marks, False], strict=True):
        if mark:
            run.append(token)
        elif run:
            yield tokenizer.decode(run, skip_special_tokens=False)
            run = []


class Ours:
    """What is trained on with a template: the answers, and the ids of each part."""

    def __init__(self, directory: Path, name: str, messages: list[dict[str, Any]], tools: Any = None) -> None:
        (directory / "chat_template.jinja").write_text(SOURCES[name], encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_of(name), "bos_token": "<s>"}))
        tokenizer = load_tokenizer(str(directory))
        encode = conversation_encoder(tokenizer, load_chat_template(tokenizer), "assistant")
        ids = encode(json.dumps({"messages": messages} | ({"tools": tools} if tools else {})), Counter())
        parts = np.split(ids, np.flatnonzero(ids & BEGINS)[1:])
        self.parts = [(part & IDS).tolist() for part in parts]
        marks = [((part & TRAINED) != 0).tolist() for part in parts]
        fast = tokenizer.fast()
        self.answers = [each for pair in zip(self.parts, marks, strict=True) for each in trained(fast, *pair)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_on(directory: Path, transformers_own: Any, name: str) -> None:
    ours, source, end = Ours(directory, name, TALK), SOURCES[name], end_of(name)
    assert len(ours.parts) == (2 if name in REWRITE else 1)
    assert [answer.rstrip().endswith(end) for answer in ours.answers] == [True, True]
    if "endgeneration" in source or f"{name}_training" in SOURCES:
        _compare(ours, transformers_own, name)
    if "</think>" in source and "endgeneration" not in source:
        assert ["hm" in answer or "oh" in answer for answer in Ours(directory, name, THOUGHTS).answers] == [True, True]
    if "tool_calls" in source and name not in {"cohere2", "idefics3", "llava_next", "smolvlm"}:
        call, answer = Ours(directory, name, CALLING, TOOLS).answers
        assert "lookup" in call
        assert answer.rstrip().endswith("the worker." + end)


@pytest.mark.parametrize("name", NAMES)
def test_the_text_before_a_first_answer_is_not_trained_on(directory: Path, name: str) -> None:
    """Neither its role, nor the template's own system prompt."""
    if name in {"cohere", "cohere2", "gemma", "gemma3"}:
        with pytest.raises(BadConversation, match="must alternate"):
            Ours(directory, name, GREETING)
        return
    answers = Ours(directory, name, GREETING).answers
    assert len(answers) == (1 if name in WANT_A_QUESTION else 2)
    assert ("the delta." if name in WANT_A_QUESTION else "hello.") in answers[0]
    assert not {"system", "helpful", "assistant", "Assistant"} & set(answers[0].replace("|", " ").split())


def _compare(ours: Ours, tokens: Any, name: str) -> None:
    tokens.chat_template, tokens.eos_token = SOURCES[name], end_of(name)
    talk: list[dict[str, Any]] = TALK
    if name in {"idefics3", "llava_next", "smolvlm"}:
        talk = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in TALK]
    training = get_training_chat_template(tokens) or SOURCES[name]
    theirs = tokens.apply_chat_template(
        talk, chat_template=training, return_dict=True, return_assistant_tokens_mask=True
    )
    prompt = tokens.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    answers = list(trained(tokens, theirs["input_ids"], [bool(mark) for mark in theirs["assistant_masks"]]))
    if name not in REWRITE:
        assert ours.parts == [theirs["input_ids"]]
    for mine, their in zip(ours.answers, answers, strict=True):
        if name == "gptoss":  # an earlier answer ends as it is generated
            their = their.replace("<|end|>", "<|return|>")
        assert their.rstrip().endswith(mine.rstrip())
        assert their.rstrip().removesuffix(mine.rstrip()) in prompt, "TRL trains on a part of the prompt for an answer"
