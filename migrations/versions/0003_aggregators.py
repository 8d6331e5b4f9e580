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


def upgrade() -> None:
    with op.batch_alter_table("contributions") as table:
        table.add_column(sa.Column("lateness", sa.JSON(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("contributions") as table:
        table.drop_column("lateness")
