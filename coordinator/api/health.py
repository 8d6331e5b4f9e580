"""Health: for containers and load balancers; no token needed."""

from fastapi import APIRouter

from coordinator.http.access import Service
from coordinator.http.describing import refusing
from coordinator.http.limits import LimitedRoute
from protocol import PROTOCOL_VERSION, __version__
from protocol.messages import Health, Readiness

router = APIRouter(tags=["health"], route_class=LimitedRoute)


@router.get("/healthz", responses=refusing(token=False))
async def healthz() -> Health:
    """The process lives."""
    return Health(status="ok", version=__version__, protocol=PROTOCOL_VERSION)


@router.get("/readyz", responses=refusing("not-ready", token=False))
def readyz(service: Service) -> Readiness:
    """The database answers and the data directory takes writes."""
    service.check_ready()
    return Readiness(
        status="ready", version=__version__, protocol=PROTOCOL_VERSION, last_backup_at=service.last_backup_at
    )
