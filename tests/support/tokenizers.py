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


# ChatML, the template of Qwen and others.
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_chat_tokenizer(
    directory: Path, template: str | None = CHATML, words: str = "the worker sends the delta and waits"
) -> Path:
    """Write a tokenizer with the tokens of ChatML, whose answers end with one of them. It has `template`."""
    write_tokenizer(directory, words)
    fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
    fast.add_special_tokens([TURN, TURN_END])
    fast.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TURN_END, "pad_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory
