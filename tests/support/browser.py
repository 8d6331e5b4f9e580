"""For tests that need a browser (`harness/browser.py`)."""

import pytest

from harness.browser import CHROMIUM

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium")
