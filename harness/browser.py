"""Headless Chromium, and what a page writes to its console."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from harness.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    # Root cannot use the sandbox, and /dev/shm is small in a container. Only our own page is opened.
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=1000 * PATIENCE_S)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Tab:
    """A page in a fresh browser context, the URLs that it requested, and its console errors and warnings."""

    page: Page
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()


@contextmanager
def tab(browser: Browser, **options: Any) -> Iterator[Tab]:
    """Open a tab. `options` are Playwright's: viewport, color_scheme and so on."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * PATIENCE_S)
    opened = Tab(context.new_page())
    opened.page.on("request", lambda request: opened.asked.append(request.url))
    opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.page.on(
        "console",
        lambda line: opened.complaints.append(line.text) if line.type in ("error", "warning") else None,
    )
    try:
        yield opened
    finally:
        context.close()
