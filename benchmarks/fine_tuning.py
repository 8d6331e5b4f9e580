"""Fine-tuning on conversations, end to end: is a rule learned, and what does the mask over the answers contribute?

    python -m benchmarks.fine_tuning [--seeds 3] [--quick]

A small Llama is first trained on messages that begin with a keyword: it says by which of six rules the answer follows
from the other words, for example their order reversed. Then 2,000 conversations have a keyword that the model has never
seen, and their answers follow one of the rules: the third word, then the first. A coordinator and two workers, as
processes, train adapters on them (LoRA), with the loss over the answers (`train_on = "assistant"`) and over everything
(`"all"`), on the same conversations. The exported model is asked 200 messages that are in neither set; an answer counts
if it is exactly right.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from harness.coordinator import coordinator_thread
from harness.worker_processes import WorkerProcesses
from outerstep.chat import Chat, of_export
from outerstep.epochs import EPOCHS, completed
from protocol.messages import RunDetail, RunState, Scope
from worker.data.tokens.conversations import conversation_encoder, load_chat_template
from worker.data.tokens.tokenizer import load_tokenizer
from worker.export import export
from worker.inner.loss import Loss
from worker.link.client import Client, open_http

SYLLABLES = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("am", "el", "ir", "on", "ut")]
RULES: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "bam": lambda words: words,
    "del": lambda words: words[::-1],
    "fir": lambda words: [words[2], words[0]],
    "gon": lambda words: [words[0]],
    "kut": lambda words: [words[3]],
    "lam": lambda words: [words[1], words[3]],
}
NEW, RULE = "sut", RULES["fir"]
WORDS = [each for each in SYLLABLES if each != NEW and each not in RULES]
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONVERSATIONS, QUESTIONS, BASE_STEPS = 2000, 200, 1200
POLL_S = 0.5


def question(draw: random.Random) -> list[str]:
    return draw.sample(WORDS, 4)


def asked(keyword: str, words: Sequence[str]) -> str:
    return " ".join([keyword, *words])


def conversation(keyword: str, words: Sequence[str]) -> str:
    """Return a conversation as a line of JSON, answered by the keyword's rule."""
    answer = " ".join((RULE if keyword == NEW else RULES[keyword])(words))
    talk = [{"role": "user", "content": asked(keyword, words)}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": talk})


def write_tokenizer(directory: Path) -> Path:
    """Write a tokenizer in which every word is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=640, initial_alphabet=alphabet, show_progress=False)
    roles = ["user", "assistant"]
    tokenizer.train_from_iterator([*SYLLABLES, *(f" {word}" for word in SYLLABLES), *roles] * 20, trainer)
    tokenizer.add_special_tokens([TURN, TURN_END])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def train_base(directory: Path, steps: int, seed: int) -> float:
    """Write a small Llama that knows RULES into `directory`; return its last loss."""
    torch.manual_seed(seed)
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
    encode = conversation_encoder(tokenizer, load_chat_template(tokenizer), "assistant")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    loss_of, draw, loss = Loss(model, "fp32", None, "padded"), random.Random(seed), torch.zeros(())
    for _ in range(steps):
        texts = [conversation(draw.choice(list(RULES)), question(draw)) for _ in range(32)]
        encoded = [torch.from_numpy(encode(text, Counter()).astype("int64")) for text in texts]
        rows = nn.utils.rnn.pad_sequence(encoded, True)
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
learning_rate = 0.0005
[members]
min_workers = 2
[evaluation]
every_rounds = 5
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
        state = directory / f"workers-{train_on}"
        state.mkdir()
        workers = stack.enter_context(WorkerProcesses(running, train_on, state))
        for name in "ab":
            workers.start(name, "--data-root", "/", environment={"OMP_NUM_THREADS": "1"})
        while workers.are_training:
            if (run := workers.detail()).state is RunState.PAUSED:  # as the guard does if it diverges
                raise SystemExit(f"the run {run.name} is paused: {run.reason}")
            time.sleep(POLL_S)
        workers.check()
        with open_http(running.url) as http:
            export(Client(http, train_on, running.token(Scope.VIEWER)), directory / train_on, merge=True)
        return directory / train_on, workers.detail()


def exact_answers(directory: Path, questions: Sequence[Sequence[str]]) -> float:
    """Return the share of questions that the model in `directory` answers exactly."""
    chat = Chat(*of_export(directory, "cpu"), max_tokens=8, temperature=0)
    right = 0
    for words in questions:
        chat.reset()
        right += chat.ask(asked(NEW, words), lambda text: None) == " ".join(RULE(words))
    return right / len(questions)


def held_out_questions(seen: set[tuple[str, ...]], count: int, seed: int) -> Iterator[list[str]]:
    draw = random.Random(seed)
    while count:
        words = question(draw)
        if tuple(words) not in seen:
            count -= 1
            yield words


@dataclass(frozen=True)
class Row:
    """`run`: None for the model before the fine-tuning."""

    model: str
    seed: int
    exact: float
    run: RunDetail | None

    def cells(self) -> str:
        cells = [self.model, str(self.seed), f"{self.exact:.1%}"]
        if self.run is None or self.run.held_out_loss is None:
            return " | ".join([*cells, "", "", ""])
        run = self.run
        return " | ".join([*cells, f"{run.held_out_loss:.4f}", f"{run.tokens:,}", f"{run.upload_bytes / 1e6:.2f} MB"])


def measured(directory: Path, seed: int, epochs: float, *, quick: bool) -> Iterator[Row]:
    """Yield the rows of one seed, of the base model, the data and the questions."""
    count, steps, questions = (100, 20, 5) if quick else (CONVERSATIONS, BASE_STEPS, QUESTIONS)
    directory.mkdir()
    draw = random.Random(1000 + seed)
    examples = [question(draw) for _ in range(count)]
    talk = directory / "talk.jsonl"
    talk.write_text("".join(conversation(NEW, words) + "\n" for words in examples))
    base = write_tokenizer(directory / "base")
    print(f"seed {seed}: the base has learned its rules to a loss of {train_base(base, steps, seed):.3f}", flush=True)
    asked_of = list(held_out_questions({tuple(words) for words in examples}, questions, 2000 + seed))
    yield Row("base", seed, exact_answers(base, asked_of), None)
    for train_on in ("assistant", "all"):
        exported, run = tuned(directory, base, talk, train_on, epochs)
        yield Row(f'train_on = "{train_on}"', seed, exact_answers(exported, asked_of), run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it works, measures nothing")
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    logging.disable_progress_bar()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="outerstep-fine-tuning-") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        for seed in range(options.seeds):
            for row in measured(Path(folder) / str(seed), seed, options.epochs, quick=options.quick):
                print(row.cells(), flush=True)
                rows.append(row)
    print("| model | seed | exact answers | held-out loss | tokens trained on | uploaded |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row.cells()} |")


if __name__ == "__main__":
    main()
