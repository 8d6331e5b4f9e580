"""Property tests draw the same examples every time and are not timed: a slow or unlucky machine is no fault of the code.
A failing test's report has what went wrong in it, and not a line for each request."""

import logging

from hypothesis import HealthCheck, settings

settings.register_profile(
    "outerstep", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outerstep")

logging.getLogger("httpx").setLevel(logging.WARNING)
