"""Small tokenizers for tests, as their directories: byte-level BPE of a few merges, the same for the same words."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


def write_tokenizer(
    directory: Path, words: str = "the worker sends the delta and waits", *, end: str | None = END
) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words] * 10, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if end is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return directory
