"""The parameters of a run that are not trained

Revision ID: 0006
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("frozen", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "frozen")
