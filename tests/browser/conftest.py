"""A Chromium for the tests of the run page; without it, or without selenium, they are skipped and say why."""

from __future__ import annotations

import shutil
import time

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """A headless Chromium with one page open."""

    DESKTOP, PHONE = (1400, 900), (390, 844)

    def __init__(self, driver):
        self.driver = driver

    def open(self, url, *, size=DESKTOP, dark=False):
        """Open `url` in a window of `size`; returns once the page has shown its data."""
        self.driver.get("about:blank")
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == self.PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get_log("browser")
        self.driver.get(url)
        self.wait("return document.documentElement.dataset.ready")
        return self

    def js(self, script):
        return self.driver.execute_script(script)

    def wait(self, script, seconds=20.0):
        """The first true value of `script`; fails with what it returned last."""
        end = time.monotonic() + seconds
        while not (value := self.js(script)):
            assert time.monotonic() < end, f"{script} is still {value!r}; log: {self.complaints()}"
            time.sleep(0.05)
        return value

    def text(self, selector):
        return self.js(f"return document.querySelector({selector!r}).textContent")

    def texts(self, selector):
        return self.js(f"return [...document.querySelectorAll({selector!r})].map((e) => e.textContent)")

    def click(self, selector):
        self.js(f"document.querySelector({selector!r}).click()")

    def type(self, selector, text):
        self.js(
            f"const e = document.querySelector({selector!r}); e.value = {text!r};"
            "e.dispatchEvent(new Event('input', {bubbles: true}));"
        )

    def choose(self, selector, value):
        self.js(
            f"const e = document.querySelector({selector!r}); e.value = {value!r};"
            "e.dispatchEvent(new Event('change'));"
        )

    def keys(self, text):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(text).perform()

    def complaints(self):
        """Errors in the browser's log: also what the content security policy has refused."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="session")
def chromium():
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: pip install selenium, or `make test-browser`"
    )
    from selenium.webdriver.chrome.service import Service

    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    chromedriver = shutil.which("chromedriver")
    if program is None or chromedriver is None:
        pytest.skip(
            "Chromium or its driver is not installed; in Debian: apt install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = program
    # A container's root has no sandbox, and a container little shared memory.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    yield Browser(driver)
    driver.quit()


@pytest.fixture
def browser(chromium):
    """The Chromium; the test fails if the page it opened has complained."""
    yield chromium
    assert chromium.complaints() == []
