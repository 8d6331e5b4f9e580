"""Contributions whose training loop has reported no loss

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("contributions") as batch:
        batch.alter_column("loss", existing_type=sa.Float(), nullable=True)


def downgrade() -> None:
    op.execute("UPDATE contributions SET loss = 0 WHERE loss IS NULL")
    with op.batch_alter_table("contributions") as batch:
        batch.alter_column("loss", existing_type=sa.Float(), nullable=False)
