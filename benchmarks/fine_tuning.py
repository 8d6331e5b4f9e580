"""Fine-tuning on conversations, end to end: is a rule learned, and what does the mask over the answers contribute?

    python -m benchmarks.fine_tuning [--quick]

A small Llama is first trained to repeat the words of a message. Then 2,000 conversations contain another rule: the
answer is the third word of the message, then the first. A coordinator and two workers, as processes, train adapters on
them (LoRA), with the loss over the answers (`train_on = "assistant"`) and over everything (`"all"`). The exported model
is asked 200 messages that are in neither set; an answer counts if it is exactly right.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from harness.coordinator import coordinator_thread
from outerstep.chat import Chat, of_export
from outerstep.epochs import completed
from protocol.messages import RunDetail, RunState, Scope
from worker.data.tokens.conversations import ConversationEncoder, load_chat_template
from worker.data.tokens.tokenizer import load_tokenizer
from worker.export import export
from worker.inner.loss import Loss
from worker.link.client import Client, open_http

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("am", "el", "ir", "on", "ut")]
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONVERSATIONS, QUESTIONS = 2000, 200
POLL_S = 0.5


def question(draw: random.Random) -> list[str]:
    return draw.sample(WORDS, 4)


def repeated(words: Sequence[str]) -> str:
    return " ".join(words)


def ruled(words: Sequence[str]) -> str:
    return f"{words[2]} {words[0]}"


def conversation(words: Sequence[str], answer: str) -> dict[str, Any]:
    content = " ".join(words)
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def write_tokenizer(directory: Path) -> Path:
    """Write a tokenizer in which every word is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=640, initial_alphabet=alphabet, show_progress=False)
    roles = ["user", "assistant"]
    tokenizer.train_from_iterator([*WORDS, *(f" {word}" for word in WORDS), *roles] * 20, trainer)
    tokenizer.add_special_tokens([TURN, TURN_END])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def train_base(directory: Path, steps: int) -> float:
    """Write a small Llama that repeats the words of a message into `directory`; return its last loss."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=640,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.06,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    tokenizer = load_tokenizer(str(directory))
    encode = ConversationEncoder(tokenizer, load_chat_template(tokenizer), "assistant").encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    loss_of, draw, loss = Loss(model, "fp32", None, "padded"), random.Random(1), torch.zeros(())
    for _ in range(steps):
        texts = [json.dumps(conversation(words, repeated(words))) for words in (question(draw) for _ in range(32))]
        rows = nn.utils.rnn.pad_sequence([torch.from_numpy(ids.astype("int64")) for ids in encode(texts)], True)
        loss = loss_of(rows)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return float(loss.detach())


SPEC = """
name = "{name}"
[model]
pretrained = "{base}"
[model.lora]
rank = 16
[data]
source = "{talk}"
tokenizer = "{base}"
format = "chat"
train_on = "{train_on}"
sequence_length = 128
[inner]
learning_rate = 0.004
[members]
min_workers = 2
[evaluation]
every_rounds = 5
[outer]
momentum = 0.5
"""


def tuned(directory: Path, base: Path, talk: Path, train_on: str, epochs: float) -> tuple[Path, RunDetail]:
    """Train adapters with a coordinator and two workers; return the export, and the run at its end."""
    with ExitStack() as stack:
        running = stack.enter_context(coordinator_thread(directory / f"coordinator-{train_on}"))
        found = completed(SPEC.format(name=train_on, base=base, talk=talk, train_on=train_on), epochs=epochs)
        assert found is not None
        text, schedule = found
        for sentence in schedule.explained():
            print(f"  {sentence}")
        running.create_run(text)
        token = running.token(Scope.WORKER)
        state = directory / f"workers-{train_on}"
        state.mkdir()
        workers = {state / f"{name}.log": _start_worker(running.url, train_on, name, token, state) for name in "ab"}
        with open_http(running.url) as http:
            client = Client(http, train_on, running.token(Scope.VIEWER))
            _await_end(client, workers)
            export(client, directory / train_on, merge=True)
            return directory / train_on, client.run_detail()


def _start_worker(url: str, run: str, name: str, token: str, state: Path) -> subprocess.Popen[bytes]:
    """Start a worker that logs to NAME.log in the directory `state`."""
    command = [sys.executable, "-m", "outerstep", "worker", url, "--run", run, "--name", name, "--threads", "1"]
    command += ["--state", str(state / name), "--device", "cpu", "--data-root", "/"]
    with (state / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env={**os.environ, "OUTERSTEP_TOKEN": token}, stdout=log, stderr=log)


def _await_end(client: Client, workers: Mapping[Path, subprocess.Popen[bytes]]) -> None:
    """Wait for the workers. Raises SystemExit if one fails or the run is paused, as the guard does if it diverges."""
    try:
        while any(each.poll() is None for each in workers.values()):
            if (run := client.run_detail()).state is RunState.PAUSED:
                raise SystemExit(f"the run {run.name} is paused: {run.reason}")
            time.sleep(POLL_S)
        for log, each in workers.items():
            if each.returncode:
                raise SystemExit(f"a worker ended with {each.returncode}: {log.read_text()[-2000:]}")
    finally:
        for each in workers.values():
            each.kill()
            each.wait()


def exact_answers(directory: Path, questions: Sequence[Sequence[str]]) -> float:
    """Return the share of questions that the model in `directory` answers exactly."""
    chat = Chat(*of_export(directory, "cpu"), max_tokens=8, temperature=0)
    right = 0
    for words in questions:
        chat.reset()
        right += chat.ask(" ".join(words), lambda text: None) == ruled(words)
    return right / len(questions)


def held_out_questions(seen: set[tuple[str, ...]], count: int) -> Iterator[list[str]]:
    draw = random.Random(3)
    while count:
        words = question(draw)
        if tuple(words) not in seen:
            count -= 1
            yield words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it works, measures nothing")
    parser.add_argument("--epochs", type=float, default=80.0)
    options = parser.parse_args()
    count, steps, epochs = (100, 20, 1.0) if options.quick else (CONVERSATIONS, 1500, options.epochs)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="outerstep-fine-tuning-") as folder:
        directory, draw = Path(folder), random.Random(2)
        os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
        examples = [question(draw) for _ in range(count)]
        talk = directory / "talk.jsonl"
        talk.write_text("".join(json.dumps(conversation(words, ruled(words))) + "\n" for words in examples))
        base = write_tokenizer(directory / "base")
        print(f"base: loss {train_base(base, steps):.3f} on repeating the words of a message", flush=True)
        questions = list(held_out_questions({tuple(words) for words in examples}, 5 if options.quick else QUESTIONS))
        rows: list[tuple[str, RunDetail | None, float]] = [("base", None, exact_answers(base, questions))]
        for train_on in ("assistant", "all"):
            print(f'train_on = "{train_on}":', flush=True)
            exported, run = tuned(directory, base, talk, train_on, epochs)
            rows.append((train_on, run, exact_answers(exported, questions)))
        print(
            "| model | exact answers | held-out loss | tokens trained on | uploaded |\n"
            "| --- | ---: | ---: | ---: | ---: |"
        )
        for name, detail, share in rows:
            facts = (
                "| | |"
                if detail is None
                else (f"{detail.held_out_loss:.4f} | {detail.tokens:,} | {detail.upload_bytes / 1e6:.2f} MB |")
            )
            print(f"| {name} | {share:.1%} | {facts}")


if __name__ == "__main__":
    main()
