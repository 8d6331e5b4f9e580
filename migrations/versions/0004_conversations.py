"""The weight of a unit of private conversations

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("workers", sa.Column("unit_tokens", INTEGER, nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "unit_tokens")
