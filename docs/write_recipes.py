"""Write recipes/README.md, what each recipe needs and costs: run `python -m docs.write_recipes` in the repository.

The costs come from `outerstep plan`. A test fails while the page is not what this writes.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from outerstep import plan
from outerstep.common.quantities import UNKNOWN, bytes_text, count_text, duration_text
from outerstep.plan import Setting, Workload
from protocol.spec.run import RunSpec, parse_spec
from worker.inner.optimizers import hidden_matrices
from worker.memory import Sizes, needs
from worker.models.building import build_model, bytes_in_4_bits

FOLDER = Path(__file__).parents[1] / "recipes"
PAGE = FOLDER / "README.md"
WIDTH = 120  # columns
META = torch.device("meta")

# The box and the line that the costs are for. An H100 SXM has 989 TFLOP/s in bf16 without sparsity (NVIDIA's data
# sheet); training reaches less than half of that.
FLOPS, UTILISATION = 989e12, 0.45
GPU_BYTES = 80e9
TWO_BOXES = {"chat-lora-8b": 2}
DAY_S = 86_400
UP, DOWN, LATENCY_S = 110e6, 500e6, 0.04
LINE = f"{DOWN / 1e6:.0f} Mbit/s down and {UP / 1e6:.0f} up"

# The shapes of the models that the recipes fine-tune, from config.json on the hub: nothing is fetched for this page.
PRETRAINED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-360M": {
        "vocab_size": 49_152,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "tie_word_embeddings": True,
    },
    "HuggingFaceTB/SmolLM2-1.7B": {
        "vocab_size": 49_152,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": True,
    },
    "NousResearch/Hermes-3-Llama-3.1-8B": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen/Qwen2.5-32B-Instruct": {
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "mistralai/Mistral-7B-v0.1": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}

HEAD = f"""\
# Recipes

Run specs to start from:

```sh
outerstep run create recipes/opendiloco-150m-h500.toml
outerstep worker https://coordinator.example.org --run opendiloco-150m-h500 --data-root hub:
```

`--data-root hub:` allows the recipe to use data, tokenizers and weights from the Hugging Face hub. Without it the
worker asks you at a terminal; elsewhere it ends and prints the option to add. Directories in a recipe work the same
way. At its first start a worker downloads and tokenises `data.source` once, into its cache (C4 in English: 305 GB).
Text from the hub (`hub:…`) needs `pip install 'outerstep[data]'` on the workers. A gated repository, as Mistral's has
been, also needs HF_TOKEN there, from an account that has accepted its terms.

With many boxes, prepare the set on one of them instead, and set `data.source` to where you put it, which may be
`https://`, `hf://` or `s3://`. Without `data.tokenizer` the other boxes do not need the tokenizer:

```sh
outerstep data prepare hub:allenai/c4:en --tokenizer mistralai/Mistral-7B-v0.1 --holdout 0.001 --out /data/c4
```

What depends on the box, such as its precision, is an option of the worker: `outerstep worker --help`.

## What they need and cost

Computed by `docs/write_recipes.py` with the arithmetic of `outerstep plan`, for workers with one H100 each that reach
{UTILISATION:.0%} of its {FLOPS / 1e12:.0f} TFLOP/s in bf16, and lines of {LINE}.
Syncs take longer if the coordinator's line is slower than the lines of all workers together; `outerstep plan` prints
the rate it needs.
We ran none of these at full size; the tests run each recipe in miniature.

- **tokens**: what all workers together train on, in several epochs if the set has fewer.
- **GPU**: fp32 weights, gradients and the optimizer's state, without the activations of a micro-batch.
- **at least**: the same with the leanest settings that `--fit auto` may choose, such as a frozen model in 4 bits.
- **time**: of inner steps, and of syncs that training waits for.
- **a sync**: the bytes of one worker, up and down. **in inner steps**: the share of the time spent training rather than
  waiting for syncs.
- **against all-reduce**: how many times as much a fp32 all-reduce after every step would move.

"""


@dataclass(frozen=True)
class Recipe:
    """A recipe and its costs."""

    file: str
    comment: str
    spec: RunSpec
    trained: int
    parameters: int
    gpu_bytes: int
    least_bytes: int
    step_s: float
    setting: Setting


def recipe(path: Path) -> Recipe:
    """Return the recipe in a file with its costs."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    comment = " ".join(line.removeprefix("# ") for line in lines[: lines.index("")] if line.startswith("# "))
    spec = parse_spec(text)
    with META:
        model = shape(spec)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    step_s = spec.unit_tokens * flops_per_token(model, spec.data.sequence_length) / (FLOPS * UTILISATION)
    workload = Workload(trained, UP, DOWN, step_s, workers_of(spec), LATENCY_S, spec.total_inner_steps)
    sync = spec.sync
    exchange = plan.sync_cost(
        workload, sync.upload_codec, sync.download_codec, zstd=sync.zstd, fragment=sync.fragment_elements
    )
    setting = plan.setting(workload, exchange, sync.inner_steps)
    parameters = sum(each.numel() for each in model.parameters())
    frozen = parameters - trained
    sizes = Sizes(trained, frozen, in_4_bits(spec) if frozen else 0)
    least = needs(sizes, on_gpu=True)[-1].device
    return Recipe(path.name, comment, spec, trained, parameters, gpu_bytes(model, spec), least, step_s, setting)


def workers_of(spec: RunSpec) -> int:
    """Return how many workers the recipe is for. A run of two boxes goes on with one of them."""
    return TWO_BOXES.get(spec.name, spec.members.min_workers)


def in_4_bits(spec: RunSpec) -> int:
    """Return the bytes of the run's frozen model in 4 bits."""
    with META:
        return bytes_in_4_bits(AutoModelForCausalLM.from_config(pretrained(spec)))


def pretrained(spec: RunSpec) -> LlamaConfig:
    assert spec.model.pretrained is not None
    return LlamaConfig(**PRETRAINED[spec.model.pretrained])


def shape(spec: RunSpec) -> nn.Module:
    """Return the run's model on the meta device, with adapters of the right shapes beside the matrices that get one."""
    if spec.model.pretrained is None:
        return build_model(spec, META)
    model: nn.Module = AutoModelForCausalLM.from_config(pretrained(spec))
    if spec.model.lora is not None:
        model.requires_grad_(False)
        rank = spec.model.lora.rank
        for name, each in list(model.named_modules()):
            if isinstance(each, nn.Linear) and name != "lm_head":
                wide = nn.Linear(rank, each.out_features, bias=False)
                each.adapter = nn.Sequential(nn.Linear(each.in_features, rank, bias=False), wide)
    return model


def flops_per_token(model: nn.Module, length: int) -> float:
    """Return the FLOPs per token of a forward and a backward pass (PaLM, arXiv 2204.02311, appendix B): six for each
    weight of a matrix product, four for a frozen one, plus attention, where a mask saves none."""
    weights = [each.weight for each in model.modules() if isinstance(each, nn.Linear)]
    products = sum(each.numel() * (6 if each.requires_grad else 4) for each in weights)
    config: Any = model.config
    return float(products + 12 * config.num_hidden_layers * config.hidden_size * length)


def gpu_bytes(model: nn.Module, spec: RunSpec) -> int:
    """Return the bytes of fp32 weights, gradients and the state of the optimizer."""
    trained = [each for each in model.parameters() if each.requires_grad]
    two_moments = {id(each) for each in trained} if spec.inner.optimizer in ("adamw", "muon") else set()
    if spec.inner.optimizer == "muon":
        two_moments -= {id(each) for each in hidden_matrices(model)}
    states = sum(each.numel() * (3 if id(each) in two_moments else 2) for each in trained)
    return 4 * (sum(each.numel() for each in model.parameters()) + states)


def time_text(each: Recipe) -> str:
    """Return how long the whole run takes."""
    seconds = each.spec.total_inner_steps * each.step_s / (1.0 if hidden(each) else each.setting.utilisation)
    return duration_text(seconds) if seconds < DAY_S else f"{seconds / DAY_S:.1f} days"


def hidden(each: Recipe) -> bool:
    """Return True if training continues during the whole sync. Workers whose memory is short wait for it."""
    own, enough = each.spec.sync.overlap, each.setting.overlap
    if each.spec.sync.wait == "never":
        return enough is not None and each.gpu_bytes <= GPU_BYTES
    return enough is not None and (own == "eager" or (isinstance(enough, int) and own >= enough))


def row(each: Recipe) -> str:
    spec, cost = each.spec, each.setting.cost
    tokens = spec.total_inner_steps * spec.unit_tokens * workers_of(spec)
    cells = [
        f"[{each.file.removesuffix('.toml')}]({each.file})",
        str(workers_of(spec)),
        f"{spec.sync.rounds:,} × {spec.sync.inner_steps}",
        count_text(tokens),
        count_text(each.trained) + ("" if each.trained == each.parameters else f" of {count_text(each.parameters)}"),
        bytes_text(each.gpu_bytes),
        bytes_text(each.least_bytes),
        f"{each.step_s:.2f} s",
        time_text(each),
        f"{bytes_text(cost.upload_bytes)}, {bytes_text(cost.download_bytes)}",
        "100 %, hidden" if hidden(each) else f"{100 * each.setting.utilisation:.1f} %",
        f"{count_text(each.setting.factor)} ×" if workers_of(spec) > 1 else UNKNOWN,
    ]
    return f"| {' | '.join(cells)} |\n"


COLUMNS = (
    "recipe",
    "workers",
    "rounds × H",
    "tokens",
    "parameters",
    "GPU",
    "at least",
    "inner step",
    "time",
    "a sync",
    "in inner steps",
    "against all-reduce",
)


def page() -> str:
    """Return the page as Markdown."""
    found = [recipe(path) for path in sorted(FOLDER.glob("*.toml"))]
    table = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n" + "".join(map(row, found))
    comments = "".join(
        textwrap.fill(f"- **{each.file.removesuffix('.toml')}**: {each.comment}", WIDTH, subsequent_indent="  ") + "\n"
        for each in found
    )
    return HEAD + table + "\n## What they are\n\n" + comments


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
