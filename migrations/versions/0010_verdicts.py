"""What each contribution of a fragment counts in its delta

Revision ID: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("fragments") as batch:
        batch.add_column(sa.Column("reference", sa.Double(), nullable=True))
        batch.add_column(sa.Column("verdicts", sa.JSON(), nullable=False, server_default="{}"))


def downgrade() -> None:
    with op.batch_alter_table("fragments") as batch:
        batch.drop_column("verdicts")
        batch.drop_column("reference")
