"""Property tests draw the same examples every time and are not timed: a slow or unlucky machine is no fault of the code."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "outerstep", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outerstep")
