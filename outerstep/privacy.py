"""The guarantee of [privacy] as (epsilon, delta), computed by Google's dp-accounting (extra `privacy`).

Two runs are neighbours if one has a worker's contributions and the other has zeros in their place, with the same noise
(zero-out, Kairouz et al. 2021, arXiv 2103.00039, definition 1.1): what this worker sends differs by at most S in each
round. So k contributions with noise of z · S are one Gaussian mechanism with z / √k (Dong, Roth, Su 2022, arXiv
1905.02383, corollary 3.3), whose epsilon is known exactly (Balle, Wang 2018, arXiv 1805.06530). A worker takes part in
every round, so there is no amplification by sampling.
"""

import math

from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian

from protocol.spec.sections import PrivacySpec


def epsilon(spec: PrivacySpec, contributions: float) -> float:
    """Return epsilon at the spec's delta for a worker with this many contributions; infinity without noise."""
    if contributions == 0:
        return 0.0
    return float(get_epsilon_gaussian(spec.noise_multiplier / math.sqrt(contributions), spec.delta))


def noise_multiplier(spec: PrivacySpec, contributions: float, wanted: float) -> float:
    """Return the smallest noise multiplier with which this many contributions have the epsilon `wanted` at the spec's
    delta."""
    return float(get_sigma_gaussian(wanted, spec.delta)) * math.sqrt(contributions)
