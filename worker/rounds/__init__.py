"""The algorithm: DiLoCo's rounds, when each fragment is sent and merged, and how one is exchanged for its mean."""
