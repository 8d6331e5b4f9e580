"""What a token is for, whose a worker's name is, and who did what

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

TEXTS = {"run": 64, "worker": 64, "parent": 16}  # new columns of tokens, by their length
NUMBERS: dict[str, sa.types.TypeEngine[int] | sa.types.TypeEngine[float]] = {
    "names": sa.Integer(),
    "uses": sa.Integer(),
    "expires_at": sa.Double(),
    "last_used_at": sa.Double(),
}


def upgrade() -> None:
    for name, length in TEXTS.items():
        op.add_column("tokens", sa.Column(name, sa.String(length), nullable=True))
    for name, kind in NUMBERS.items():
        op.add_column("tokens", sa.Column(name, kind, nullable=True))
    op.add_column("tokens", sa.Column("used", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("workers", sa.Column("token", sa.String(16), nullable=True))
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("token", sa.String(16), nullable=True),
        sa.Column("address", sa.String(64), nullable=True),
        sa.Column("act", sa.String(32), nullable=False),
        sa.Column("run", sa.String(64), nullable=True),
        sa.Column("message", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )


def downgrade() -> None:
    """Tokens of scopes that there were not, of one run and of limited time go: they would be for more than that."""
    op.drop_table("audit")
    op.drop_column("workers", "token")
    op.execute("DELETE FROM tokens WHERE scope IN ('operator', 'join') OR run IS NOT NULL OR expires_at IS NOT NULL")
    for name in ("used", *NUMBERS, *TEXTS):
        op.drop_column("tokens", name)
