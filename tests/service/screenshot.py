"""Makes the screenshot of docs/service.md from a real service over two CPU ranks.

python tests/service/screenshot.py docs/images/dashboard.png
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.service.attention import SPEC, infer, tokens
from tests.service.served import Served, make_tokens, output_bits

CLIENTS = 16
SECONDS = 25
SHAPE = "hidden=512,inter=256,experts=32,topk=4"


def load(served: Served, stop: threading.Event, seed: int) -> None:
    case = make_tokens(1 + seed % 24, seed, hidden=512, experts=32, topk=4)
    with served.client() as client:
        while not stop.is_set():
            output_bits(client, *case)
            time.sleep(0.05)


def sequences(served: Served, stop: threading.Event) -> None:
    """Three sequences of attention_pre, a token now and then."""
    with served.client() as client:
        turn = 0
        while not stop.wait(0.3):
            for name in (1, 2, 3):
                infer(client, *tokens(40 if turn == 0 else name), sequence=name, start=turn == 0)
            turn += 1


def main(target: str) -> None:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    stop = threading.Event()
    os.environ["MEGAMOE_TRACE"] = "1"  # a timeline of every worker
    options = ("--heartbeat", "0.5", "--attention-pre", SPEC, "--cache-pages", "16")
    with Served(*options, shape=SHAPE) as served, tempfile.TemporaryDirectory() as home:
        served.wait_ready()
        threads = [threading.Thread(target=load, args=(served, stop, i)) for i in range(CLIENTS)]
        threads.append(threading.Thread(target=sequences, args=(served, stop)))
        for thread in threads:
            thread.start()
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage"
        for argument in (*flags.split(), "--window-size=1360,1100", f"--user-data-dir={home}"):
            options.add_argument(argument)
        browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        browser.get(served.url + "/")
        time.sleep(SECONDS)
        browser.save_screenshot(target)
        browser.quit()
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(sys.argv[1])
