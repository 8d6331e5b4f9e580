"""Private data: each worker's own work units, and held-out losses by worker

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

COUNTERS = ("place", "next_unit", "checked_epochs")
PLACE = """
    UPDATE workers SET place = (
        SELECT count(*) FROM workers AS earlier WHERE earlier.run_id = workers.run_id AND earlier.id < workers.id
    )
"""


def upgrade() -> None:
    for counter in COUNTERS:
        op.add_column("workers", sa.Column(counter, sa.Integer(), nullable=False, server_default="0"))
    op.add_column("workers", sa.Column("units", sa.Integer(), nullable=True))
    op.execute(PLACE)
    op.create_index("ix_workers_run_id_place", "workers", ["run_id", "place"], unique=True)
    _rebuild_evaluations("run_id", "round", "worker")


def downgrade() -> None:
    op.execute(
        "DELETE FROM evaluations AS e WHERE worker > (SELECT min(worker) FROM evaluations AS other"
        " WHERE other.run_id = e.run_id AND other.round = e.round)"
    )
    _rebuild_evaluations("run_id", "round")
    op.drop_index("ix_workers_run_id_place", "workers")
    for column in ("units", *COUNTERS):
        op.drop_column("workers", column)


def _rebuild_evaluations(*key: str) -> None:
    """SQLite cannot change a key, so the rows move into a new table of the same name."""
    op.rename_table("evaluations", "evaluations_before")
    op.create_table(
        "evaluations",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=False),
        sa.Column("loss", sa.Double(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluations_run_id")),
        sa.PrimaryKeyConstraint(*key, name=op.f("pk_evaluations")),
    )
    op.execute("INSERT INTO evaluations SELECT * FROM evaluations_before")
    op.drop_table("evaluations_before")
