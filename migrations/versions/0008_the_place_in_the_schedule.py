"""The inner steps of the schedule before a run's open round: a round that everybody handed in early is no whole one

Revision ID: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

RUNS = sa.table(
    "runs",
    sa.column("id", sa.Integer),
    sa.column("spec", sa.JSON),
    sa.column("round", sa.Integer),
    sa.column("step", sa.Integer),
)


def upgrade() -> None:
    op.add_column("runs", sa.Column("step", sa.Integer(), nullable=False, server_default="0"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(RUNS.c.id, RUNS.c.spec, RUNS.c.round)).all():
        sync = row.spec["sync"]
        inner_steps = sync["nominal_inner_steps"] if sync["inner_steps"] == "auto" else sync["inner_steps"]
        connection.execute(sa.update(RUNS).where(RUNS.c.id == row.id).values(step=row.round * inner_steps))


def downgrade() -> None:
    op.drop_column("runs", "step")
