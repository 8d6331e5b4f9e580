"""Health: for containers and load balancers; no token needed."""

from importlib.metadata import version

from fastapi import APIRouter

from coordinator.http.access import Service
from coordinator.http.describing import refusing
from coordinator.http.limits import LimitedRoute
from protocol.messages import Health, Readiness

router = APIRouter(tags=["health"], route_class=LimitedRoute)


@router.get("/healthz", responses=refusing(token=False))
async def healthz() -> Health:
    """The process lives."""
    return Health(status="ok", version=version("outerstep"))


@router.get("/readyz", responses=refusing("not-ready", token=False))
def readyz(service: Service) -> Readiness:
    """The database answers and the data directory takes writes."""
    service.check_ready()
    return Readiness(status="ready", version=version("outerstep"), last_backup_at=service.last_backup_at)
