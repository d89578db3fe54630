"""The page in a real browser, its event stream, and its assets."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from service.reports import EngineFault, TelemetrySample
from tests.service.echo import BOTH, LAYER, EchoEngine
from tests.service.served import HTTP
from tests.service.test_attention import infer as infer_attention
from tests.service.test_attention import tokens as attention_tokens
from tests.service.test_client import changed

STATIC = Path("service/dashboard/static")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")


def gpu_sample(rank: int, watts: float, throttled: bool = False) -> TelemetrySample:
    return TelemetrySample(
        rank=rank,
        device="stand-in for a GPU",
        values={"power_watts": watts, "sm_clock_hertz": 1.6e9, "temperature_celsius": 50.0},
        clocks_events={"gpu_idle": False, "sw_power_cap": throttled},
    )


def events(server, count: int) -> list[tuple[str, object]]:
    found = []
    with HTTP.stream("GET", server.url + "/events", timeout=10) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append((name, json.loads(line[6:])))
                if len(found) == count:
                    break
    return found


def work(server, stop: threading.Event) -> None:
    import tritonclient.http as oip

    with oip.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        while not stop.wait(0.05):
            client.infer("moe", changed())


def test_events_carry_history_points_and_state(make_running):
    running = make_running()
    running.engine.telemetry(gpu_sample(0, 650.0, throttled=True))
    running.engine.telemetry(TelemetrySample(rank=1, unavailable="the rank runs without a GPU"))
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(running, stop))
    thread.start()
    try:
        found = events(running, 7)
    finally:
        stop.set()
        thread.join()
    kinds = [name for name, _ in found]
    assert kinds[:2] == ["history", "state"]
    points = [value for name, value in found if name == "point"]
    assert points
    last = points[-1]
    assert last["requests"] > 0
    assert last["p99_ms"] >= last["p50_ms"] > 0
    assert last["throttled"] is True
    # What rank 1 cannot read is null, not 0.
    assert last["power_watts"] == [650.0, None]
    state = [value for name, value in found if name == "state"][-1]
    assert state["status"]["state"] == "ready"
    assert state["layer"]["hidden"] == LAYER.hidden
    assert sum(state["step"]["expert_counts"]) > 0
    assert state["load"]["max_over_mean"] >= 1
    assert state["telemetry"][1]["unavailable"] == "the rank runs without a GPU"


def test_dashboards_are_counted(make_running):
    running = make_running(event_clients=1)
    with HTTP.stream("GET", running.url + "/events", timeout=10) as first:
        lines = first.iter_lines()  # closing the iterator would close the stream
        next(lines)
        assert HTTP.get(running.url + "/events").status_code == 429
    deadline = time.monotonic() + 5
    while running.app.state.dashboard.clients:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert events(running, 1)[0][0] == "history"


def test_assets_are_served_from_here_and_nowhere_else(server):
    page = HTTP.get(server.url + "/")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    for text in (page.text, (STATIC / "app.js").read_text(), (STATIC / "style.css").read_text()):
        assert "http://" not in text
        assert "https://" not in text
    for path in page.text.split('"'):
        if path.startswith("/static/"):
            assert HTTP.get(server.url + path).status_code == 200, path
    licence = HTTP.get(server.url + "/static/vendor/uPlot.LICENSE").text
    assert licence.startswith("The MIT License")
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/none.js"):
        assert HTTP.get(server.url + path).status_code == 404


@pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="no chromium and chromedriver here")
def test_the_page_in_a_browser(make_running, tmp_path):
    import tritonclient.http as oip
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    long = "random hidden=6144,heads=64,q_lora=2048,kv_lora=512,nope=192,rope=64,index_heads=32"
    named = replace(BOTH, attention=replace(BOTH.attention, name=long))
    running = make_running(EchoEngine(named))
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--window-size=1360,1200", f"--user-data-dir={tmp_path}"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(running, stop))
    thread.start()
    try:
        browser.get(running.url + "/")

        def text(element: str) -> str:
            return browser.find_element(By.ID, element).text

        def painted(canvas: str) -> int:
            script = """
                const c = document.getElementById(arguments[0]);
                const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
                let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n;"""
            return browser.execute_script(script, canvas)

        def drawn_as(role: str) -> int:
            """Pixels of the timeline that have the colour of the legend's entry."""
            script = """
                const mark = [...document.querySelectorAll('#roles span')].find(
                    (span) => span.textContent === arguments[0]).querySelector('i');
                const wanted = mark.style.backgroundColor.match(/\\d+/g).map(Number);
                const c = document.getElementById('timeline');
                const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
                let n = 0;
                for (let i = 0; i < d.length; i += 4)
                    n += wanted.every((value, k) => d[i + k] === value);
                return n;"""
            return browser.execute_script(script, role)

        wait = WebDriverWait(browser, 20)
        wait.until(lambda _: text("state") == "ready")
        wait.until(lambda _: "requests" in text("step-info"))
        wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "#latency canvas")) == 1)
        assert "256" in text("layer")
        assert painted("timeline") > 1000
        assert painted("experts") > 1000
        for role in ("gather", "layer", "tiles"):
            assert drawn_as(role) > 500, role
        assert "rank 1 L2" in text("rings")
        assert "2 / 8" in text("rings")
        assert "Gini" in text("load-info")
        with oip.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
            infer_attention(client, *attention_tokens(3), sequence=1, start=True)
        wait.until(lambda _: "1 sequence ·" in text("attention-info"))
        assert "3 tokens" in text("attention-info")
        assert "1 / 8" in text("pages")
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.execute_script(wide) <= 0, "the page is wider than its window"
        # No GPU yet: said to be so, and no chart that shows zeros.
        assert "no reading yet" in text("telemetry-info")
        assert not browser.find_elements(By.CSS_SELECTOR, "#power canvas")
        for turn in range(4):
            running.engine.telemetry(gpu_sample(0, 600 + 20 * turn, throttled=turn > 1))
            running.engine.telemetry(gpu_sample(1, 580 + 25 * turn))
            time.sleep(0.6)
        wait.until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "#power canvas")) == 1)
        assert "rank 0: sw_power_cap" in text("events")
        fault = EngineFault(kind="timeout", rank=1, message="rank 1 gave no sign of life")
        for observe in running.engine.observers.fault:
            observe(fault)
        wait.until(lambda _: "no sign of life" in text("faults"))
        severe = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
        assert severe == []
        if target := os.environ.get("MEGAMOE_SCREENSHOT"):
            browser.save_screenshot(target)
    finally:
        stop.set()
        thread.join()
        browser.quit()
