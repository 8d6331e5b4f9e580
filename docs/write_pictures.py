"""Write docs/pictures/: the dashboard of the demo, in light on a desktop and in dark on a phone.

Run `make screenshots`, or `python -m docs.write_pictures` in the repository. It needs Chromium and takes a few minutes.
The demo is a real one with 4 workers; only the machine's name is replaced in the pictures.
"""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import Page, Route, expect
from rich.console import Console

from harness.browser import CHROMIUM, chromium, tab
from outerstep.demo import DemoPlan, trained
from outerstep.demo.processes import READY
from outerstep.demo.spec import ROUNDS, RUN, demo_spec
from outerstep.display import LineDisplay
from outerstep.follow import Look

PICTURES = Path(__file__).parent / "pictures"
WORKERS = 4
SHOT_AT = 16  # the round in which the pictures are taken

DESK: dict[str, Any] = {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "light"}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "color_scheme": "dark",
    "device_scale_factor": 2,
    "is_mobile": True,
}


expect.set_options(timeout=60_000)


class Shooting(LineDisplay):
    """A display of the demo that takes the pictures in round SHOT_AT."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Console())
        self._directory, self._done = directory, False

    def show(self, look: Look) -> None:
        super().show(look)
        if look.run.round >= SHOT_AT and not self._done:
            self._done = True
            found = READY.search((self._directory / "logs" / "coordinator.log").read_text())
            assert found is not None
            shoot(found[1], (self._directory / "coordinator" / "admin.token").read_text().strip())


def shoot(url: str, token: str) -> None:
    """Take all pictures of this coordinator's demo."""
    with chromium() as browser:
        for name, options in (("run-light", DESK), ("run-dark-phone", PHONE)):
            with tab(browser, **options) as found:
                open_run(found.page, f"{url}/#token={token}&run={RUN}")
                save(found.page, name)
                if name == "run-light":
                    scroll_to(found.page, "Workers")
                    save(found.page, "workers-light")
                else:
                    scroll_to(found.page, "Rounds by worker")
                    save(found.page, "rounds-dark-phone")


def open_run(page: Page, address: str) -> None:
    page.route("**/workers?*", rename_hosts)
    page.goto(address)
    expect(page.locator("table.workers tbody tr")).to_have_count(WORKERS)
    expect(page.locator('section[aria-label="Loss"] .scatterlayer path.js-line')).to_have_count(2)
    expect(page.locator('section[aria-label="Verdicts"]')).to_contain_text(
        re.compile(f"last ({SHOT_AT}|1[7-9]|2.) rounds")
    )


def scroll_to(page: Page, part: str) -> None:
    page.locator(f'section[aria-label="{part}"]').evaluate("part => scrollTo(0, part.offsetTop - 12)")
    page.wait_for_function("document.fonts.status === 'loaded'")


def save(page: Page, name: str) -> None:
    """Write a screenshot of the visible part in at most 256 colours, so that the file is small."""
    PICTURES.mkdir(exist_ok=True)
    path = PICTURES / f"{name}.png"
    page.screenshot(path=path)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def rename_hosts(route: Route) -> None:
    """Answer as the coordinator does, with made-up host names."""
    answer = route.fetch()
    page = answer.json()
    for number, worker in enumerate(page["items"]):
        worker["host"]["host"] = f"box-{number}"
    route.fulfill(response=answer, json=page)


def main() -> None:
    if CHROMIUM is None:
        sys.exit("no Chromium: apt install chromium")
    with TemporaryDirectory(prefix="outerstep-pictures-") as temporary:
        directory = Path(temporary)
        plan = DemoPlan(WORKERS, demo_spec(workers=WORKERS, rounds=ROUNDS, codec="int8"), directory)
        with trained(plan, Shooting(directory)):
            pass
    for path in sorted(PICTURES.glob("*.png")):
        print(f"{path.relative_to(Path.cwd())}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
