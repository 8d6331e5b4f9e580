"""Train with transformers' Trainer on the bytes of a file: python examples/trainer.py FILE. `# +` marks Outerstep's
lines."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from outerstep.integrations.transformers import DiLoCoCallback  # +

LENGTH = 64

text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
arguments = TrainingArguments(
    "trainer-output",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    max_steps=1000,
    logging_steps=50,
    save_strategy="no",
    report_to=[],
)
torch.manual_seed(0)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
trainer.add_callback(DiLoCoCallback("example"))  # +
trainer.train()
