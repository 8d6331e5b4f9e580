"""Residuals of deltas, for the coordinator's error feedback

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("fragments", sa.Column("residual_bytes", INTEGER, nullable=True))
    op.add_column("fragments", sa.Column("residual_digest", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("fragments", "residual_digest")
    op.drop_column("fragments", "residual_bytes")
