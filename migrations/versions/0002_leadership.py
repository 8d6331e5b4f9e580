"""Several coordinators on one database

Revision ID: 0002
Revises: 0001
"""

import os

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def name(length: int) -> sa.types.TypeEngine[str]:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "coordinators",
        sa.Column("id", name(64), nullable=False),
        sa.Column("address", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.Column("store_fault", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_coordinators")),
    )
    deployment = op.create_table(
        "deployment",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("bucket_owner", name(64), nullable=True),
        sa.Column("bucket_url", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deployment")),
    )
    leader = op.create_table(
        "leader",
        sa.Column("id", INTEGER, nullable=False),
        sa.Column("token", INTEGER, nullable=False),
        sa.Column("holder", name(64), nullable=True),
        sa.Column("address", sa.String(), nullable=True),
        sa.Column("taken_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader")),
    )
    op.bulk_insert(deployment, [{"id": 1, "secret": os.urandom(32)}])
    op.bulk_insert(leader, [{"id": 1, "token": 0, "taken_at": 0.0, "expires_at": 0.0}])


def downgrade() -> None:
    for table in ("leader", "deployment", "coordinators"):
        op.drop_table(table)
