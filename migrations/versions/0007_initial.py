"""The initial schema. Builds before the first release had 0001 to 0006, whose databases are refused by their number.

Revision ID: 0007
Revises:
"""

import os

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def name(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("token", name(16), nullable=True),
        sa.Column("address", name(64), nullable=True),
        sa.Column("act", name(32), nullable=False),
        sa.Column("run", name(64), nullable=True),
        sa.Column("message", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_table(
        "runs",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("name", name(64), nullable=False),
        sa.Column("spec_toml", sa.String(), nullable=False),
        sa.Column("spec_digest", sa.LargeBinary(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("state", name(16), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("step", INTEGER, server_default="0", nullable=False),
        sa.Column("next_unit", INTEGER, nullable=False),
        sa.Column("layout", sa.JSON(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=True),
        sa.Column("frozen", sa.JSON(), nullable=True),
        sa.Column("tokens", INTEGER, server_default="0", nullable=False),
        sa.Column("upload_bytes", INTEGER, server_default="0", nullable=False),
        sa.Column("divergences", INTEGER, server_default="0", nullable=False),
        sa.Column("checked_epochs", INTEGER, server_default="0", nullable=False),
        sa.Column("account", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("guard", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("rolled_back", sa.JSON(), nullable=True),
        sa.Column("equal_work", sa.JSON(), server_default="[]", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", name(16), nullable=False),
        sa.Column("scope", name(16), nullable=False),
        sa.Column("note", name(200), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("run", name(64), nullable=True),
        sa.Column("worker", name(64), nullable=True),
        sa.Column("names", INTEGER, nullable=True),
        sa.Column("uses", INTEGER, nullable=True),
        sa.Column("used", INTEGER, server_default="0", nullable=False),
        sa.Column("parent", name(16), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_tokens_secret_hash")),
    )
    op.create_table(
        "assignments",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("worker", name(64), nullable=False),
        sa.Column("inner_steps", INTEGER, nullable=False),
        sa.Column("evaluate", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_assignments_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "worker", name=op.f("pk_assignments")),
    )
    op.create_table(
        "checkpoint_fragments",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("fragment", INTEGER, nullable=False),
        sa.Column("size", INTEGER, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("state_digest", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoint_fragments_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "fragment", name=op.f("pk_checkpoint_fragments")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("state_digest", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "contributions",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("fragment", INTEGER, nullable=False),
        sa.Column("worker", name(64), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("sha256", sa.LargeBinary(), nullable=True),
        sa.Column("size", INTEGER, nullable=False),
        sa.Column("tokens", INTEGER, nullable=False),
        sa.Column("inner_steps", INTEGER, nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("norm", sa.Double(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("lateness", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_contributions_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "fragment", "worker", name=op.f("pk_contributions")),
    )
    op.create_table(
        "evaluations",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("worker", name(64), nullable=False),
        sa.Column("loss", sa.Double(), nullable=False),
        sa.Column("tokens", INTEGER, nullable=False),
        sa.Column("bytes", INTEGER, nullable=True),
        sa.Column("confirmed", sa.Boolean(), server_default="1", nullable=False),
        sa.Column("without", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluations_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "worker", name=op.f("pk_evaluations")),
    )
    op.create_table(
        "events",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", name(32), nullable=False),
        sa.Column("message", sa.String(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_events_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_run_id"), "events", ["run_id"], unique=False)
    op.create_table(
        "fragments",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("fragment", INTEGER, nullable=False),
        sa.Column("state", name(16), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("contributors", sa.JSON(), nullable=True),
        sa.Column("late", sa.JSON(), server_default="[]", nullable=False),
        sa.Column("reference", sa.Double(), nullable=True),
        sa.Column("verdicts", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("delta_bytes", INTEGER, nullable=True),
        sa.Column("delta_digest", sa.LargeBinary(), nullable=True),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("quorum_at", sa.Double(), nullable=True),
        sa.Column("aggregated_at", sa.Double(), nullable=True),
        sa.Column("published_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "(state = 'published') = (delta_digest IS NOT NULL)", name=op.f("ck_fragments_published_has_delta")
        ),
        sa.CheckConstraint("state IN ('collecting', 'aggregating', 'published')", name=op.f("ck_fragments_state")),
        sa.Column("residual_bytes", INTEGER, nullable=True),
        sa.Column("residual_digest", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_fragments_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "fragment", name=op.f("pk_fragments")),
    )
    op.create_table(
        "late_contributions",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("fragment", INTEGER, nullable=False),
        sa.Column("worker", name(64), nullable=False),
        sa.Column("late_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_late_contributions_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "fragment", "worker", name=op.f("pk_late_contributions")),
    )
    op.create_table(
        "outer_states",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("fragment", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("state_digest", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_outer_states_run_id")),
        sa.PrimaryKeyConstraint("run_id", "fragment", name=op.f("pk_outer_states")),
    )
    op.create_table(
        "reports",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("worker", name(64), nullable=False),
        sa.Column("epoch", INTEGER, nullable=False),
        sa.Column("account", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_reports_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "worker", "epoch", name=op.f("pk_reports")),
    )
    op.create_table(
        "rounds",
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("round", INTEGER, nullable=False),
        sa.Column("step", INTEGER, nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("tokens", INTEGER, nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("upload_bytes", INTEGER, nullable=True),
        sa.Column("delta_bytes", INTEGER, nullable=True),
        sa.Column("quorum_at", sa.Double(), nullable=True),
        sa.Column("collected_at", sa.Double(), nullable=True),
        sa.Column("aggregated_at", sa.Double(), nullable=True),
        sa.Column("account", sa.JSON(), server_default="{}", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rounds_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", name=op.f("pk_rounds")),
    )
    op.create_table(
        "unit_ranges",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("start", INTEGER, nullable=False),
        sa.Column("stop", INTEGER, nullable=False),
        sa.Column("state", name(16), nullable=False),
        sa.Column("worker", name(64), nullable=True),
        sa.Column("round", INTEGER, nullable=True),
        sa.Column("consumed_round", INTEGER, nullable=True),
        sa.CheckConstraint(
            "(state = 'consumed') = (consumed_round IS NOT NULL)", name=op.f("ck_unit_ranges_consumed_once")
        ),
        sa.CheckConstraint(
            "state = 'consumed' OR (state = 'free') = (worker IS NULL)", name=op.f("ck_unit_ranges_free_has_no_worker")
        ),
        sa.CheckConstraint("state IN ('free', 'assigned', 'consumed')", name=op.f("ck_unit_ranges_state")),
        sa.CheckConstraint("start < stop", name=op.f("ck_unit_ranges_not_empty")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_unit_ranges_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_unit_ranges")),
        sa.UniqueConstraint("run_id", "start", name=op.f("uq_unit_ranges_run_id_start")),
    )
    op.create_table(
        "workers",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("run_id", INTEGER, nullable=False),
        sa.Column("name", name(64), nullable=False),
        sa.Column("state", name(16), nullable=False),
        sa.Column("epoch", INTEGER, nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=True),
        sa.Column("joined_at", sa.Double(), nullable=False),
        sa.Column("host", sa.JSON(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("state_round", INTEGER, nullable=True),
        sa.Column("state_digest", sa.LargeBinary(), nullable=True),
        sa.Column("contributions", INTEGER, server_default="0", nullable=False),
        sa.Column("tokens", INTEGER, server_default="0", nullable=False),
        sa.Column("upload_bytes", INTEGER, server_default="0", nullable=False),
        sa.Column("direct", sa.Boolean(), nullable=True),
        sa.Column("divergences", INTEGER, server_default="0", nullable=False),
        sa.Column("account", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("place", INTEGER, server_default="0", nullable=False),
        sa.Column("units", INTEGER, nullable=True),
        sa.Column("next_unit", INTEGER, server_default="0", nullable=False),
        sa.Column("checked_epochs", INTEGER, server_default="0", nullable=False),
        sa.Column("token", name(16), nullable=True),
        sa.Column("reputation", sa.JSON(), server_default="{}", nullable=False),
        sa.Column("suspected", sa.Boolean(), server_default="0", nullable=False),
        sa.Column("refuted_state", INTEGER, nullable=True),
        sa.Column("unit_tokens", INTEGER, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_workers_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
        sa.UniqueConstraint("run_id", "name", name=op.f("uq_workers_run_id_name")),
        sa.UniqueConstraint("token_hash", name=op.f("uq_workers_token_hash")),
    )
    op.create_index(op.f("ix_workers_run_id_place"), "workers", ["run_id", "place"], unique=True)
    op.create_table(
        "coordinators",
        sa.Column("id", name(64), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("store_fault", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_coordinators")),
    )
    deployment = op.create_table(
        "deployment",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("bucket_owner", name(64), nullable=True),
        sa.Column("bucket_url", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deployment")),
    )
    leader = op.create_table(
        "leader",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("token", INTEGER, nullable=False),
        sa.Column("holder", name(64), nullable=True),
        sa.Column("address", sa.String(), nullable=True),
        sa.Column("taken_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader")),
    )
    op.create_table(
        "aggregators",
        sa.Column("id", name(64), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_aggregators")),
    )
    op.create_table(
        "tasks",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=False),
        sa.Column("urgency", INTEGER, nullable=False),
        sa.Column("preferred", name(64), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("token", INTEGER, server_default="0", nullable=False),
        sa.Column("holder", name(64), nullable=True),
        sa.Column("expires_at", sa.Double(), server_default="0", nullable=False),
        sa.Column("result", sa.String(), nullable=True),
        sa.Column("failure", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
    )
    op.bulk_insert(deployment, [{"id": 1, "secret": os.urandom(32)}])
    op.bulk_insert(leader, [{"id": 1, "token": 0, "taken_at": 0.0, "expires_at": 0.0}])


def downgrade() -> None:
    for table in (
        *("tasks", "aggregators", "leader", "deployment", "coordinators", "workers", "unit_ranges"),
        *("rounds", "reports", "outer_states", "late_contributions", "fragments", "events", "evaluations"),
        *("contributions", "checkpoints", "checkpoint_fragments", "assignments", "tokens", "runs", "audit"),
    ):
        op.drop_table(table)
