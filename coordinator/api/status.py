"""The status of the coordinator itself, for operators of all runs."""

from fastapi import APIRouter, Request

from coordinator.http.access import OperatorOfAll, Service
from coordinator.http.describing import refusing
from coordinator.http.limits import LimitedRoute
from coordinator.server_status import status_of
from protocol.messages import ServerStatus

router = APIRouter(prefix="/v1", tags=["health"], route_class=LimitedRoute)


@router.get("/status", responses=refusing("forbidden"))
def get_status(http: Request, service: Service, _: OperatorOfAll) -> ServerStatus:
    """Disks, backups, version, database, clients, notifications and recent errors; what is wrong, and what to do."""
    gate = http.app.state.gate
    return status_of(service, 0 if gate is None else len(gate))
