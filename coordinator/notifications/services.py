"""A notification to one of the services that Apprise knows (https://appriseit.com/services/), by a URL such as
discord://ID/TOKEN.

Apprise runs in a process of its own, which ends with each notification. So a service that answers slowly or without end
cannot take the coordinator's memory or keep it from stopping, and nothing that its libraries log reaches our log.
"""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress

from coordinator.notifications.notification import DeliveryError, Notification, shown
from protocol.errors import OuterstepError

TIMEOUT_S = 60.0  # including the start of the process
MAX_BYTES = 2 << 30  # of the process's memory
MAX_CHARACTERS = 1500  # of a message: Discord accepts 2,000 characters


def check_installed() -> None:
    """Raise OuterstepError if Apprise is not installed."""
    if importlib.util.find_spec("apprise") is None:
        raise OuterstepError(
            "to notify another URL than https:// needs apprise, which is not installed; run: pip install "
            "'outerstep[coordinator,notify]'"
        )


def send(url: str, each: Notification) -> None:
    """Send the notification. Raises DeliveryError."""
    what = each.kind.replace("-", " ") + (": resolved" if each.state == "resolved" else "")
    calm = each.state == "resolved" or each.kind in ("run-finished", "test")
    order = {
        "url": url,
        "title": f"{each.run or 'Outerstep coordinator'}: {what}",
        "body": each.message[:MAX_CHARACTERS],
        "notify_type": "success" if calm else "warning",
        "timeout_s": TIMEOUT_S,
    }
    scheme = url.partition(":")[0]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=json.dumps(order).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)},
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeliveryError(f"{scheme}: no answer within {TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise DeliveryError(f"{scheme}: {error.strerror}") from error
    if done.returncode:
        reasons = done.stdout.decode(errors="replace").splitlines() or [f"apprise ended with {done.returncode}"]
        raise DeliveryError(f"{scheme}: {shown(reasons[-1], url)}")


def _main() -> int:
    """Read an order from stdin and send it by Apprise. The last line that this prints is why it failed."""
    order = json.load(sys.stdin)
    timeout_s, url = order.pop("timeout_s"), order.pop("url")
    if sys.platform != "win32":
        import resource

        signal.setitimer(signal.ITIMER_REAL, timeout_s)  # ends this process, even if the coordinator has ended before
        with suppress(ValueError, OSError):  # macOS
            resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    from apprise import Apprise, AppriseAsset, NotifyFormat

    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    apprise = Apprise(asset=AppriseAsset(app_id="Outerstep", http_redirects=False))
    return 0 if apprise.add(url) and apprise.notify(**order, body_format=NotifyFormat.TEXT) else 1


if __name__ == "__main__":
    sys.exit(_main())
