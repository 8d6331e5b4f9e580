"""Work that aggregators do

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def name(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
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
    op.add_column("contributions", sa.Column("lateness", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("contributions", "lateness")
    for table in ("tasks", "aggregators"):
        op.drop_table(table)
