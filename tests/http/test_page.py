"""The page at `/`: what it is without a browser, and what people do with it in one (Chromium, headless)."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from kaminari_core.config import EngineConfig
from kaminari_core.launch import open_engine
from kaminari_core.progress import silent
from kaminari_core.registry import load_registry
from kaminari_core.testing import TinyModel
from tests.http.echo_plugin import SlowEcho
from tests.http.serving import Running, Start, running

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

ROOT = Path(__file__).parents[2]
RECEIPT = ROOT / "assets" / "receipt.png"
PAGE = (ROOT / "kaminari_http" / "kaminari_http" / "page.html").read_text()
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
in_a_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="Chromium and its driver are not installed (Debian: chromium chromium-driver)"
)


def test_needs_no_key_and_may_load_nothing(start: Start) -> None:
    reply = start(SlowEcho, app={"api_keys": ("k",)}).http.get("/")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.text == PAGE
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    # No request goes anywhere else; the one address is the name of a vocabulary.
    assert set(re.findall(r"https?://[^'\" ]+", PAGE)) == {"http://www.w3.org/2000/svg"}
    assert len(PAGE) < 40_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(scheme: str) -> None:
    """Contrast of at least 4.5, as WCAG 2.2 asks of text (1.4.3)."""
    light, dark = re.findall(r":root \{(.*?)\}", PAGE, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark if scheme == "dark" else light))

    def luminance(name: str) -> float:
        parts = [int(colours[name][at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    pairs = "ink/card ink/ground ink/field quiet/card quiet/ground quiet/field accent/field accent/soft"
    for pair in [*pairs.split(), "on-accent/accent", "bad/bad-soft"]:
        darker, lighter = sorted(luminance(name) for name in pair.split("/"))
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, pair


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in [*OPTIONS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def tiny_with_a_key() -> Iterator[Running]:
    """The bundled checkpoint."""
    config = EngineConfig(device="cpu", dtype="float32", compile=False, slots=2, max_length=1024)
    registry = load_registry(only=frozenset({"core", "qwen3vl", "http"}))
    engine = open_engine(registry, "qwen3vl", "tiny", config, silent)
    with running(engine, name="qwen3vl", api_keys=("sesame",)) as server:
        yield server


class Page:
    """The page in the browser."""

    def __init__(self, driver: Chrome, url: str, *, width: int = 1280, scheme: str = "light") -> None:
        self.driver = driver
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        permissions = {"origin": url, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        driver.execute_cdp_cmd("Browser.grantPermissions", permissions)
        driver.get(url)

    def find(self, name: str) -> WebElement:
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        found: str = self.find(name).get_property("textContent")
        return found

    def wait_for(self, name: str, *texts: str) -> None:
        deadline = time.monotonic() + 40
        while not any(text in self.text(name) for text in texts):
            assert time.monotonic() < deadline, (self.text("state"), self.text("error"))
            time.sleep(0.05)

    def type(self, name: str, text: str) -> None:
        self.find(name).clear()
        self.find(name).send_keys(text)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        chain = ActionChains(self.driver)
        for key in keys[:-1]:
            chain.key_down(key)
        chain.send_keys(keys[-1])
        for key in keys[:-1]:
            chain.key_up(key)
        chain.perform()

    def unlock(self) -> None:
        from selenium.webdriver import Keys

        self.wait_for("state", "asks for a key")
        self.type("key", "sesame" + Keys.ENTER)
        self.wait_for("state", "Ready")

    def copied(self, name: str) -> str:
        self.find(name).click()
        self.wait_for(name, "Copied")
        found: str = self.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
        return found

    def facts(self, name: str) -> dict[str, str]:
        titles, values = (self.find(name).find_elements("css selector", tag) for tag in ("dt", "dd"))
        return {title.text: value.text for title, value in zip(titles, values, strict=True)}

    def complaints(self) -> list[Any]:
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def ask(server: Running) -> dict[str, Any]:
    image = f"data:image/png;base64,{base64.b64encode(RECEIPT.read_bytes()).decode()}"
    headers = {"Authorization": "Bearer sesame"}
    reply: dict[str, Any] = server.post("/generate", {"task": "ocr", "images": [image]}, headers=headers).json()
    return reply


@in_a_browser
def test_reads_the_receipt(chromium: Chrome, tiny_with_a_key: Running) -> None:
    page = Page(chromium, tiny_with_a_key.url)
    page.wait_for("state", "asks for a key")
    from selenium.webdriver import Keys

    page.type("key", "wrong" + Keys.ENTER)
    page.wait_for("state", "does not know this key")
    page.type("key", "sesame" + Keys.ENTER)
    page.wait_for("state", "Ready")
    # The browser itself logs the two refusals.
    assert all("401" in entry["message"] for entry in page.complaints())
    assert not page.find("run").is_enabled()
    page.find("file").send_keys(str(RECEIPT))
    page.wait_for("pictures", "receipt.png")
    # What it would cost is told before it is asked.
    page.wait_for("cost", "tokens")
    page.find("run").click()
    page.wait_for("state", "Done")
    expected = ask(tiny_with_a_key)
    used = expected["usage"]
    cost = f"{used['prompt_tokens']} tokens, {used['image_tokens']} of them for the picture; room for "
    assert page.text("cost") == f"{cost}{1024 - used['prompt_tokens']} more"
    assert page.text("text") == expected["text"]
    assert set((ROOT / "assets" / "receipt.txt").read_text().splitlines()) <= set(page.text("text").splitlines())
    assert page.complaints() == []

    [saw] = expected["saw"]
    seen = page.facts("seen")
    assert seen["Visual tokens"] == f"{saw['visual_tokens']} of {saw['budget']}"
    assert seen["Grid (rows x columns)"] == " x ".join(map(str, saw["grid"]))
    assert (seen["Rotation"], seen["File"]) == ("none", "PNG, " + " x ".join(map(str, saw["decoded"])))
    facts = page.facts("facts")
    assert facts["Prompt tokens"] == str(expected["usage"]["prompt_tokens"])
    assert facts["Reply tokens"] == str(expected["usage"]["completion_tokens"])
    assert float(facts["Tokens per second"]) > 0
    # The picture lies on the canvas at the place that the server named.
    pen = "const c = document.querySelector('canvas'), pen = c.getContext('2d');"
    pixels = f"{pen} return [c.width, c.height, ...pen.getImageData({', '.join(map(str, saw['content']))}).data]"
    width, height, *data = page.driver.execute_script(pixels)
    assert [width, height] == saw["canvas"]
    assert sum(value < 80 for value in data[::4]) > 500
    origins = page.driver.execute_script(
        "return performance.getEntriesByType('resource').map((each) => new URL(each.name).origin)"
    )
    assert set(origins) == {tiny_with_a_key.url}


@in_a_browser
def test_copies(chromium: Chrome, tiny_with_a_key: Running) -> None:
    page = Page(chromium, tiny_with_a_key.url)
    page.unlock()
    page.find("file").send_keys(str(RECEIPT))
    page.wait_for("pictures", "receipt.png")
    page.find("run").click()
    page.wait_for("state", "Done")
    text = ask(tiny_with_a_key)["text"]
    assert page.copied("copy-text") == text
    assert json.loads(page.copied("copy-json"))["text"] == text
    command = page.copied("copy-curl")
    assert "sesame" not in command
    if shutil.which("curl"):
        variables = {**os.environ, "KAMINARI_API_KEY": "sesame"}
        shell = ["bash", "-c", command.replace("curl ", "curl --noproxy '*' ", 1)]
        done = subprocess.run(shell, cwd=RECEIPT.parent, env=variables, capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["text"] == text


@in_a_browser
def test_pictures_are_dropped_pasted_and_removed(chromium: Chrome, tiny_with_a_key: Running) -> None:
    page = Page(chromium, tiny_with_a_key.url)
    page.unlock()
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, "PNG")
    script = """
        const data = new DataTransfer();
        data.items.add(new File([Uint8Array.from(arguments[0])], arguments[1], { type: arguments[2] }));
        document.dispatchEvent(arguments[3] === "drop" ? new DragEvent("drop", { dataTransfer: data, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: data, cancelable: true }));
    """
    page.driver.execute_script(script, [*file.getvalue()], "dropped.png", "image/png", "drop")
    page.wait_for("pictures", "dropped.png")
    page.driver.execute_script(script, [*file.getvalue()], "pasted.png", "image/png", "paste")
    page.wait_for("pictures", "pasted.png")
    page.driver.execute_script(script, [1, 2], "notes.txt", "text/plain", "drop")
    page.wait_for("error", "That is no picture.")
    page.find("pictures").find_element("css selector", "button").click()
    assert "dropped.png" not in page.text("pictures")
    assert page.find("run").is_enabled()
    # What the server refuses is shown in its words.
    page.driver.execute_script(script, [1, 2], "broken.png", "image/png", "drop")
    page.wait_for("pictures", "broken.png")
    page.find("run").click()
    page.wait_for("error", "images[1]")
    assert page.text("state") == "Failed"


@in_a_browser
def test_tasks_with_a_template(chromium: Chrome, start: Start) -> None:
    server = start(TinyModel, max_tokens=4)
    server.engine.tasks["extract"] = "Fill {template}"
    page = Page(chromium, server.url)
    page.wait_for("state", "Ready")
    page.find("file").send_keys(str(RECEIPT))
    page.wait_for("pictures", "receipt.png")
    assert not page.find("template").is_displayed()
    [chip] = [label for label in page.find("tasks").find_elements("css selector", "label") if label.text == "extract"]
    chip.click()
    page.type("template", "{no json")
    page.find("run").click()
    page.wait_for("error", "JSON")
    page.type("template", '{"total": "12"}')
    page.find("run").click()
    page.wait_for("error", "template.total")
    page.type("template", '{"total": ""}')
    page.find("run").click()
    page.wait_for("state", "Cut")
    assert page.text("error") == ""


@in_a_browser
def test_keyboard_alone_runs_and_stops(chromium: Chrome, start: Start) -> None:
    from selenium.webdriver import Keys

    server = start(SlowEcho, max_length=2000)
    page = Page(chromium, server.url)
    page.wait_for("state", "Ready")
    # A model without eyes: there is nothing to drop, and the one task is one's own words.
    assert not page.find("intake").is_displayed()
    for _ in range(10):
        page.press(Keys.TAB)
        if page.driver.switch_to.active_element.get_attribute("id") == "prompt":
            break
    words = 'It\'s 100% <b>bold</b> \\ "so"  '
    page.press(words)
    page.press(Keys.CONTROL, Keys.ENTER)
    page.wait_for("state", "Done")
    assert page.text("text") == words
    command = page.copied("copy-curl").replace("curl ", "curl --noproxy '*' ", 1)
    if shutil.which("curl"):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert json.loads(done.stdout)["text"] == words
    page.type("prompt", "x" * 900)
    page.press(Keys.CONTROL, Keys.ENTER)
    page.wait_for("text", "xxxxx")
    page.press(Keys.ESCAPE)
    page.wait_for("state", "Stopped")
    server.settle(1.0)
    assert server.engine.stats().finished["cancelled"] == 1
    assert len(page.text("text")) < 900


@in_a_browser
@pytest.mark.parametrize("width", [360, 390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_the_screen(chromium: Chrome, tiny_with_a_key: Running, width: int, scheme: str) -> None:
    page = Page(chromium, tiny_with_a_key.url, width=width, scheme=scheme)
    page.unlock()
    page.find("file").send_keys(str(RECEIPT))
    page.wait_for("pictures", "receipt.png")
    page.driver.execute_script("document.querySelector('details').open = true")
    page.type("max-tokens", "12")
    page.find("run").click()
    page.wait_for("state", "Cut at the most tokens")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    for element in page.driver.find_elements("css selector", "button, canvas, dd, input:not(.hidden)"):
        if element.is_displayed():
            assert 0 <= element.rect["x"] <= element.rect["x"] + element.rect["width"] <= width, element.text
    ground = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 246, 248)", "dark": "rgb(20, 21, 26)"}[scheme]
