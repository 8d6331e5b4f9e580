"""Train with accelerate on the bytes of a file: python examples/accelerate_loop.py FILE. `# +` marks Outerstep's
lines."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from outerstep import DiLoCo  # +

LENGTH = 64

text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
)
accelerator = Accelerator()
loader = DataLoader(rows, batch_size=16, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with DiLoCo.connect(model, optimizer, run="example") as diloco:  # +
    for batch in diloco.batches(loader):  # + instead of: for epoch in range(EPOCHS), for batch in loader
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
