"""What rounds cost: accounts of bytes and seconds, and when a round came how far

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ACCOUNTS = ("runs", "workers", "rounds")
TIMES = {
    "rounds": ("quorum_at", "collected_at", "aggregated_at"),
    "fragments": ("quorum_at", "aggregated_at", "published_at"),
}


def upgrade() -> None:
    for table, times in TIMES.items():
        for time in times:
            op.add_column(table, sa.Column(time, sa.Double(), nullable=True))
    for table in ACCOUNTS:
        op.add_column(table, sa.Column("account", sa.JSON(), nullable=False, server_default="{}"))
    op.create_table(
        "reports",
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("account", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_reports_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "worker", "epoch", name=op.f("pk_reports")),
    )


def downgrade() -> None:
    op.drop_table("reports")
    for table in ACCOUNTS:
        op.drop_column(table, "account")
    for table, times in TIMES.items():
        for time in times:
            op.drop_column(table, time)
