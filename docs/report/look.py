"""Compare a report's numbers with TensorBoard's, open it in Chromium without a network, and take its pictures.

python docs/report/look.py REPORT FOLDER RUN [RUN ...]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from selenium import webdriver
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
SECONDS = 1.5  # in which a page that was scrolled has settled
CUT = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
PICTURES = (("light", 1280, 1500), ("dark", 1280, 1500), ("phone", 390, 844))


def compared(report: Path, runs: list[Path]) -> int:
    """How many numbers of the report are those of the event files, bit by bit; fails at one that is not."""
    data = json.loads(re.search(r'<script [^>]*id="data"[^>]*>(.*?)</script>', report.read_text(), re.DOTALL)[1])
    count = 0
    for drawn, run in zip(data["runs"], runs, strict=True):
        for part, folder in (("figures", "."), ("by_collection", "by_collection")):
            events = EventAccumulator(str(run / folder), size_guidance={SCALARS: 0})
            events.Reload()
            for tag, series in drawn[part].items():
                written = events.Scalars(tag)
                assert series["steps"] == [event.step for event in written], tag
                assert np.array_equal(np.float32(series["values"]), np.float32([e.value for e in written])), tag
                count += len(written)
    return count


def pictured(report: Path, folder: Path) -> list[str]:
    """Pictures of the page and of its browser of trajectories; what Chromium's console said."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tempfile.mkdtemp()}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options)
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", CUT)
    driver.implicitly_wait(20)
    for name, width, height in PICTURES:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "light" if name == "light" else "dark"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
        driver.get(report.resolve().as_uri())
        driver.execute_script("charts.forEach(draw); drawHeat();")
        driver.save_screenshot(str(folder / f"{report.stem}_{name}.png"))
        driver.execute_script("document.getElementById('trajectories').scrollIntoView({behavior: 'instant'})")
        driver.execute_script("arguments[0].click()", driver.find_element("css selector", ".row"))
        time.sleep(SECONDS)
        driver.save_screenshot(str(folder / f"{report.stem}_{name}_trajectories.png"))
    said = [entry["message"] for entry in driver.get_log("browser")]
    driver.quit()
    return said


if __name__ == "__main__":
    page, pictures, *places = map(Path, sys.argv[1:])
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB, {compared(page, places)} numbers equal TensorBoard's")
    print(f"console: {pictured(page, pictures) or 'nothing'}")
