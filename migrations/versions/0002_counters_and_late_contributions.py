"""Counters that outlive the history, late contributions, and consumed units of many workers in one row

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# What rows of the history say until now. The fragments of one contribution tell the same tokens.
COUNT = """
    UPDATE workers SET
        contributions = (SELECT count(DISTINCT c.round) FROM contributions c
            WHERE c.run_id = workers.run_id AND c.worker = workers.name),
        tokens = (SELECT coalesce(sum(t), 0) FROM (SELECT max(c.tokens) AS t FROM contributions c
            WHERE c.run_id = workers.run_id AND c.worker = workers.name GROUP BY c.round)),
        upload_bytes = (SELECT coalesce(sum(c.size), 0) FROM contributions c
            WHERE c.run_id = workers.run_id AND c.worker = workers.name);
    UPDATE runs SET
        tokens = (SELECT coalesce(sum(tokens), 0) FROM workers w WHERE w.run_id = runs.id),
        upload_bytes = (SELECT coalesce(sum(upload_bytes), 0) FROM workers w WHERE w.run_id = runs.id),
        divergences = (SELECT count(*) FROM events e WHERE e.run_id = runs.id AND e.kind = 'diverged')
"""

COUNTERS = {
    "runs": ("tokens", "upload_bytes", "divergences", "checked_epochs"),
    "workers": ("contributions", "tokens", "upload_bytes", "divergences"),
}
SUMS = {
    "rounds": (("tokens", sa.Integer), ("loss", sa.Double), ("upload_bytes", sa.Integer), ("delta_bytes", sa.Integer)),
    "fragments": (("closed_at", sa.Double),),
}


def upgrade() -> None:
    for table, counters in COUNTERS.items():
        for counter in counters:
            op.add_column(table, sa.Column(counter, sa.Integer(), nullable=False, server_default="0"))
    for table, columns in SUMS.items():
        for name, kind in columns:
            op.add_column(table, sa.Column(name, kind(), nullable=True))
    op.create_table(
        "late_contributions",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("fragment", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=False),
        sa.Column("late_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_late_contributions_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "fragment", "worker", name=op.f("pk_late_contributions")),
    )
    _rebuild_unit_ranges("state = 'consumed' OR (state = 'free') = (worker IS NULL)")
    for statement in COUNT.split(";"):
        op.execute(statement)


def downgrade() -> None:
    op.execute("UPDATE unit_ranges SET worker = '' WHERE state = 'consumed' AND worker IS NULL")
    _rebuild_unit_ranges("(state = 'free') = (worker IS NULL)")
    op.drop_table("late_contributions")
    for table, columns in SUMS.items():
        for name, _ in columns:
            op.drop_column(table, name)
    for table, counters in COUNTERS.items():
        for counter in counters:
            op.drop_column(table, counter)


def _rebuild_unit_ranges(workerless: str) -> None:
    """SQLite cannot change a constraint, so the rows move into a new table of the same name."""
    op.rename_table("unit_ranges", "unit_ranges_before")
    op.create_table(
        "unit_ranges",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("stop", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=True),
        sa.Column("round", sa.Integer(), nullable=True),
        sa.Column("consumed_round", sa.Integer(), nullable=True),
        sa.CheckConstraint(
            "(state = 'consumed') = (consumed_round IS NOT NULL)", name=op.f("ck_unit_ranges_consumed_once")
        ),
        sa.CheckConstraint(workerless, name=op.f("ck_unit_ranges_free_has_no_worker")),
        sa.CheckConstraint("state IN ('free', 'assigned', 'consumed')", name=op.f("ck_unit_ranges_state")),
        sa.CheckConstraint("start < stop", name=op.f("ck_unit_ranges_not_empty")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_unit_ranges_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_unit_ranges")),
        sa.UniqueConstraint("run_id", "start", name=op.f("uq_unit_ranges_run_id_start")),
    )
    op.execute("INSERT INTO unit_ranges SELECT * FROM unit_ranges_before")
    op.drop_table("unit_ranges_before")
