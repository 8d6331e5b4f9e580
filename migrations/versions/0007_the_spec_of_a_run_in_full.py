"""The spec of a run in full, so that a run keeps the defaults it began with

Revision ID: 0007
Revises: 0006
"""

import json
import tomllib
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

RUNS = sa.table("runs", sa.column("id", sa.Integer), sa.column("spec_toml", sa.String), sa.column("spec", sa.JSON))

# What a key stood for that the spec of a run left out, up to this revision.
DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "model": {},
    "data": {
        "source": "python-stdlib",
        "tokenizer": None,
        "column": "text",
        "sequence_length": 256,
        "holdout": 0.05,
        "private": False,
    },
    "inner": {
        "batch_size": 8,
        "optimizer": "adamw",
        "learning_rate": 4e-4,
        "muon_learning_rate": None,
        "beta1": 0.9,
        "beta2": 0.95,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "schedule": "cosine",
        "decay_fraction": 0.2,
        "final_fraction": 0.1,
        "warmup_steps": 100,
        "joiner_warmup_steps": 10,
    },
    "outer": {"learning_rate": 0.7, "momentum": 0.9},
    "sync": {
        "inner_steps": 500,
        "round_s": None,
        "nominal_inner_steps": 500,
        "min_inner_steps": 10,
        "max_inner_steps": 10_000,
        "upload_codec": "int8",
        "download_codec": "int8",
        "zstd": True,
        "aggregation": "mean",
        "fragment_elements": 1 << 23,
        "fragment_layers": "sequential",
        "offsets": "together",
        "overlap": 0,
        "alpha": "carry",
    },
    "members": {
        "min_workers": 1,
        "lease_s": 60.0,
        "grace_factor": 0.5,
        "grace_min_s": 5.0,
        "grace_max_s": 600.0,
        "round_max_s": None,
    },
    "checkpoints": {"every_rounds": 10, "keep": 2},
    "evaluation": {"every_rounds": 1, "max_tokens": 65_536},
    "retention": {"rounds": 100, "events": 10_000},
}


def upgrade() -> None:
    op.add_column("runs", sa.Column("spec", sa.JSON(), nullable=False, server_default="{}"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(RUNS.c.id, RUNS.c.spec_toml)).all():
        spec = _in_full(tomllib.loads(row.spec_toml))
        connection.execute(sa.update(RUNS).where(RUNS.c.id == row.id).values(spec=spec))


def _in_full(given: dict[str, Any]) -> dict[str, Any]:
    filled = given | {
        key: default | given.get(key, {}) if isinstance(default, dict) else given.get(key, default)
        for key, default in DEFAULTS.items()
    }
    return json.loads(json.dumps(filled, default=str))  # TOML's dates, in model.config


def downgrade() -> None:
    op.drop_column("runs", "spec")
