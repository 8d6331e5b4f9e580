"""Train with Lightning on the bytes of a file: python examples/lightning_fit.py FILE. `# +` marks Outerstep's lines."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from outerstep.integrations.lightning import DiLoCoCallback  # +

LENGTH, BATCH = 64, 16


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
torch.manual_seed(0)
trainer = Trainer(max_steps=1000, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.callbacks.append(DiLoCoCallback("example"))  # +
trainer.fit(Language(), DataLoader(rows, batch_size=BATCH, shuffle=True))
