"""Tokenising text: `outerstep data prepare` compared with `datasets.map`, same tokenizer, same JSON lines.

    python -m benchmarks.prepare [--processes N] [--quick] [--json]

The text is the sources of Python's standard library, repeated up to the requested size, one document per file. The
tokenizer is a byte-level BPE of 8192 ids, trained on a part of them first. Both use the same number of processes and
take turns. MB/s are 10^6 bytes of UTF-8 text per process, median over the repeats. Ours reads the lines and writes a
token set. `datasets` has read them into Arrow before its time starts, and writes an Arrow file of ids, without a
held-out part. It uses batches of 1000 documents, its default, and calls `tokenizers` directly; with transformers'
tokenizers, the usual way, it is slower.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from worker.data.sources.files import PYTHON_STDLIB, source_files
from worker.data.sources.rows import TextRows
from worker.data.sources.source import find_source
from worker.data.tokens.preparing import Recipe, cores, prepare
from worker.data.tokens.tokenizer import load_tokenizer

END = "<|endoftext|>"
VOCABULARY = 8192
TRAINED_ON_BYTES = 2_000_000

Work = Callable[[], Callable[[], int]]


def write_text(file: Path, size: int) -> int:
    """Write JSON lines with at least `size` bytes of text; return how many."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for _, path in source_files(PYTHON_STDLIB)]
    written = number = 0
    with file.open("w", encoding="utf-8") as opened:
        while written < size:
            text = texts[number % len(texts)]
            opened.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written, number = written + len(text.encode()), number + 1
    return written


def train_tokenizer(file: Path, directory: Path) -> None:
    """Train a tokenizer on the start of the text, and write it as a directory."""
    with file.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines.readlines(TRAINED_ON_BYTES)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def by_outerstep(file: Path, tokenizer: Path, out: Path, processes: int) -> Work:
    """Return a function that makes a token set and returns a function that counts its tokens."""

    def run() -> Callable[[], int]:
        source = find_source(str(file), TextRows("text"), 0.005)
        index = prepare(Recipe([source], load_tokenizer(str(tokenizer))), out, processes=processes)
        return lambda: sum(shard.tokens for shard in index.shards)

    return run


def by_datasets(file: Path, tokenizer: Path, out: Path, processes: int) -> Work:
    """Load a data set. Return a function that maps it and returns a function that counts its tokens."""
    import datasets

    datasets.disable_progress_bars()
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(out / "loaded"))
    fast = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = fast.token_to_id(END) or 0  # it is the first one

    def tokenised(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = fast.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"ids": [[*each.ids, end] for each in found]}

    def run() -> Callable[[], int]:
        mapped = loaded.map(
            tokenised,
            batched=True,
            num_proc=processes,
            remove_columns=["text"],
            features=datasets.Features({"ids": datasets.List(datasets.Value("uint16"))}),
            load_from_cache_file=False,
        )
        return lambda: sum(len(ids) for ids in mapped["ids"])

    return run


def seconds(run: Work) -> tuple[float, int]:
    start = time.perf_counter()
    count = run()
    return time.perf_counter() - start, count()


def measure(size: int, processes: int, repeats: int) -> dict[str, Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # only the processes run in parallel
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        text_bytes = write_text(root / "text.jsonl", size)
        train_tokenizer(root / "text.jsonl", root / "tokenizer")
        took: dict[str, list[float]] = {"outerstep": []}
        tokens: dict[str, int] = {}
        try:
            mapping = by_datasets(root / "text.jsonl", root / "tokenizer", root, processes)
            took["datasets"] = []
        except ModuleNotFoundError:
            mapping = None
        for repeat in range(repeats):
            ours = by_outerstep(root / "text.jsonl", root / "tokenizer", root / f"set-{repeat}", processes)
            for name, run in (("outerstep", ours), ("datasets", mapping)):
                if run is not None:
                    spent, tokens[name] = seconds(run)
                    took[name].append(spent)
    medians = {name: statistics.median(times) for name, times in took.items()}
    return {
        "benchmark": "prepare",
        "machine": platform.processor() or platform.machine(),
        "processes": processes,
        "repeats": repeats,
        "text_bytes": text_bytes,
        "tokens": tokens,
        "seconds": medians,
        "mb_per_second_per_process": {name: text_bytes / 1e6 / s / processes for name, s in medians.items()},
        "ratio": medians["datasets"] / medians["outerstep"] if "datasets" in medians else None,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['text_bytes'] / 1e6:.0f} MB of text, {result['processes']} processes, median of {result['repeats']}",
        f"{'':12}{'s':>8}{'MB/s per process':>20}{'tokens':>14}",
    ]
    for name, spent in result["seconds"].items():
        speed = result["mb_per_second_per_process"][name]
        lines.append(f"{name:12}{spent:8.1f}{speed:20.2f}{result['tokens'][name]:14,}")
    if result["ratio"] is None:
        lines.append("datasets is not installed, so there is nothing to compare with: pip install 'outerstep[data]'")
    else:
        lines.append(f"{result['ratio']:.2f} times as fast as datasets.map")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=cores(), help="default: one per core")
    parser.add_argument("--quick", action="store_true", help="a few MB, once: says nothing about speed")
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    arguments = parser.parse_args()
    result = measure(2_000_000 if arguments.quick else 60_000_000, arguments.processes, 1 if arguments.quick else 3)
    print(table(result))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
