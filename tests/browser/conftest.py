"""A browser, and the built site served to it. Every test fails at an error in the page, and at a foreign request.

The browser is the Chromium that the machine has; Playwright drives it and downloads none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from built_site import built_site
from playwright.sync_api import Browser, BrowserContext, Dialog, Page, sync_playwright

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    if chromium is None:
        reason = "no Chromium on this machine: install it (on Debian: apt-get install chromium fonts-dejavu)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and keeps its log to itself."""

    def log_message(self, *_: object) -> None:
        pass

    def copyfile(self, *files: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # a page that is left does not wait for what it asked for
            super().copyfile(*files)


@pytest.fixture(scope="session")
def address(browser: Browser) -> Iterator[str]:
    """Where the built site is served; without a browser it is not even built."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built_site())))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def wrong() -> list[str]:
    """What went wrong in any page, or was asked of another host. A test that expects some takes it out again."""
    return []


@pytest.fixture
def context(
    browser: Browser, address: str, wrong: list[str], request: pytest.FixtureRequest
) -> Iterator[BrowserContext]:
    """Its settings are those of an indirect parametrization. What is `wrong` at its end fails the test."""
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | getattr(request, "param", {})))
    context.set_default_timeout(10_000)

    def watch_request(url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about") and parts.netloc != urlsplit(address).netloc:
            wrong.append(f"foreign request: {url}")

    def dismiss(dialog: Dialog) -> None:
        wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def watch(page: Page) -> None:
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("dialog", dismiss)

    context.on("page", watch)
    context.on("request", lambda request: watch_request(request.url))
    yield context
    context.close()
    assert wrong == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()
