"""Health: for containers and load balancers; no token needed."""

from importlib.metadata import version

from fastapi import APIRouter

from coordinator.api.access import Service
from coordinator.api.limits import LimitedRoute
from protocol.messages import Health

router = APIRouter(tags=["health"], route_class=LimitedRoute)


@router.get("/healthz")
async def healthz() -> Health:
    """The process lives."""
    return Health(status="ok", version=version("outerstep"))


@router.get("/readyz")
def readyz(service: Service) -> Health:
    """The database answers and the data directory takes writes."""
    service.check_ready()
    return Health(status="ready", version=version("outerstep"))
