"""A headless Chromium, driven through chromedriver with the standard library alone (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element, as the standard has it


def find_browser() -> tuple[str, str] | None:
    """The paths of a Chromium and its driver, or None where either is missing."""
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    drivers = (shutil.which("chromedriver", path=path) for path in (os.environ.get("CHROMEWEBDRIVER"), None))
    browser, driver = next(filter(None, browsers), None), next(filter(None, drivers), None)
    return None if browser is None or driver is None else (browser, driver)


class Browser:
    """One window. Scripts return what JSON can hold; keys go to an element as a user's do."""

    def __init__(self, address: str) -> None:
        self._address = address

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read().decode()[:500]}") from error

    def open(self, page: Path) -> None:
        self.call("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def press(self, selector: str, keys: str) -> None:
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        self.call("POST", f"/element/{found}/value", {"text": keys})

    def click(self, selector: str) -> None:
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]
        self.call("POST", f"/element/{found}/click", {})

    def resize(self, width: int, height: int) -> None:
        """Give the page so many pixels, as on a device of that size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._chromium("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """Take the "light" or the "dark" colour scheme."""
        self._chromium("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def _chromium(self, command: str, parameters: dict[str, Any]) -> None:
        self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextmanager
def headless_browser(paths: tuple[str, str], profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile; it and its driver end with the context."""
    browser, driver = paths
    log = profile.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen([driver, "--port=0"], stdout=output, stderr=subprocess.STDOUT)
    window: Browser | None = None
    try:
        server = Browser(f"http://127.0.0.1:{_port(process, log)}")
        options = {"binary": browser, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        window = Browser(f"{server._address}/session/{server.call('POST', '/session', wanted)['sessionId']}")
        yield window
    finally:
        if window is not None:
            window.call("DELETE", "")
        process.terminate()
        process.wait(timeout=30)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port that the driver chose, which it prints."""
    for _ in range(300):
        _, is_there, after = log.read_text().partition("successfully on port ")
        if is_there and "." in after:
            return int(after.split(".")[0])
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"chromedriver did not start: {log.read_text()[:500]}")
