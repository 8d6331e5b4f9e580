"""Train in a plain loop, like nanoGPT's, on the bytes of a file: python examples/plain.py FILE. `# +` marks Outerstep's
lines."""

import sys
from pathlib import Path

import torch
from torch import nn

from outerstep import DiLoCo  # +

LENGTH, BATCH, WIDTH = 64, 16, 64


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with DiLoCo.connect(model, optimizer, run="example") as diloco:  # +
    for step in diloco.units():  # + instead of range(1000)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step))
        batch = text[starts + torch.arange(LENGTH + 1)]
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
