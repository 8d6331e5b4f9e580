"""Train peft adapters with transformers' Trainer: python examples/lora.py FILE. `# +` marks Outerstep's lines.

Only the adapters are sent. All workers need the same base model, which is compared when they join. This example
draws it from a seed; you would load yours.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from outerstep.integrations.transformers import DiLoCoCallback  # +

LENGTH = 64

text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]
torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
arguments = TrainingArguments(
    "lora-output",
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    max_steps=1000,
    logging_steps=50,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.add_callback(DiLoCoCallback("example"))  # +
trainer.train()
