"""The report in a real browser: headless Chromium, without a network."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reporting import settings, write_run
from sorl_lightning.report.page import page
from sorl_lightning.report.runs import read_run
from sorl_lightning.trajectory_files import TrajectoryFiles

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
COUNT = 1000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Chromium of its own profile, whose network is cut."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        sentence = "no browser: apt-get install chromium chromium-driver"
        pytest.fail(sentence) if os.environ.get("CI") == "true" else pytest.skip(sentence)
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    driver.execute_cdp_cmd("Network.enable", {})
    cut = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", cut)
    driver.implicitly_wait(20)  # seconds: some elements are drawn after an event that the browser sends later
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of 1,000 trajectories, and a comparison of two runs."""
    root = tmp_path_factory.mktemp("runs")
    large = write_run(root / "large", trajectories=COUNT)
    other = write_run(root / "other", seed=1, trajectories=40, depth_control=True, config=settings("token"))
    files = {"one": root / "one.html", "two": root / "two.html"}
    files["one"].write_text(page([read_run(large, "large")], COUNT), encoding="utf-8")
    files["two"].write_text(page([read_run(large, "large"), read_run(other, "other")], 80), encoding="utf-8")
    files["log"] = large / "trajectories"
    return files


@pytest.fixture
def opened(browser: Any, reports: dict[str, Path]) -> Any:
    """Open a report at a size and in a colour scheme; nothing may be said on the console, before or after the test."""

    def opening(name: str, width: int = 1280, height: int = 900, scheme: str = "light") -> Any:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(reports[name].as_uri())
        return browser

    yield opening
    assert browser.get_log("browser") == []


@pytest.fixture(scope="module")
def lines(reports: dict[str, Path]) -> list[dict[str, Any]]:
    return list(TrajectoryFiles(reports["log"]))


def one(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def pick(browser: Any, name: str, value: str) -> None:
    one(browser, f"#{name} option[value='{value}']").click()


def shown(browser: Any) -> int:
    """The number of trajectories that the page says fit, which the list's height must say too."""
    count, total = re.fullmatch(r"([\d,]+) of ([\d,]+) trajectories", one(browser, "#count").text).groups()
    assert total == f"{COUNT:,}"
    height = browser.execute_script("return document.getElementById('spacer').getBoundingClientRect().height")
    number = int(count.replace(",", ""))
    assert height == 46 * number
    return number


def draw_all(browser: Any) -> None:
    browser.execute_script("charts.forEach(draw); drawHeat();")


def drawn(browser: Any) -> list[dict[str, Any]]:
    """Every curve of the page: its run, tag, colour and values."""
    draw_all(browser)
    script = """return JSON.stringify(charts.flatMap((figure) => figure.querySelector(".plot").data.map((trace) => (
        {...trace.meta, title: chartOf(figure).title, color: trace.line.color, x: trace.x, y: trace.y}))));"""
    return json.loads(browser.execute_script(script))


def test_a_thousand_trajectories_open_in_seconds_of_cpu_without_a_network(browser: Any, opened: Any) -> None:
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    opened("one")
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    seconds = {metric["name"]: metric["value"] for metric in metrics}["TaskDuration"]
    assert 0 < seconds < 4
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert len(browser.find_elements("css selector", ".row")) < 40  # of 1,000, those in sight
    assert shown(browser) == COUNT
    browser.execute_script("document.getElementById('list').scrollTop = 46 * 500")
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert browser.find_elements("css selector", "#row-500")


def test_filters_and_search_change_the_count(opened: Any, lines: list[dict[str, Any]]) -> None:
    page = opened("one")
    one(page, "#search").send_keys("TREASURE here")
    assert shown(page) == sum("Treasure" in line["turns"][0]["observation"] for line in lines) == COUNT // 5
    pick(page, "by-outcome", "1")
    assert shown(page) == sum(number % 15 == 0 for number in range(COUNT))
    one(page, "#search").clear()
    one(page, "#search").send_keys("no such words")
    assert shown(page) == 0
    assert "No trajectory fits" in one(page, "#spacer").text
    one(page, "#reset").click()
    assert shown(page) == COUNT
    pick(page, "by-ending", "turn_limit")
    pick(page, "by-collection", "4")
    assert shown(page) == sum(line["ending"] == "turn_limit" and line["collection"] == 4 for line in lines)
    one(page, "#reset").click()
    pick(page, "order", "reward")
    best = max(lines, key=lambda line: line["reward"])
    assert one(page, "#row-0 .reward").text == f"{best['reward']:.3f}"


def test_tokens_are_shaded_by_what_is_chosen(opened: Any, lines: list[dict[str, Any]]) -> None:
    page = opened("one")
    line = lines[1]
    one(page, "#row-1").click()
    tokens = [tokens for turn in line["turns"] for tokens in [turn["tokens"]]]

    def strengths() -> list[float]:
        return [float(t.get_attribute("data-strength")) for t in page.find_elements("css selector", "#detail .token")]

    def reach(name: str, size: Any) -> float:
        sizes = sorted(abs(size(v)) for ln in lines for turn in ln["turns"] for v in turn["tokens"].get(name, []))
        return sizes[int(0.99 * (len(sizes) - 1))]

    for name, size in (("ratio", math.log), ("advantage", float), ("policy_kl", float), ("entropy", float)):
        pick(page, "shade", name)
        full = reach(name, size)
        values = [size(value) for columns in tokens for value in columns[name]]
        assert strengths() == pytest.approx([min(1, abs(value) / full) for value in values], abs=2e-3)
        first = one(page, "#detail .token").value_of_css_property("background-color")
        hue = "213, 94, 0" if values[0] > 0 else "0, 114, 178"
        assert first.startswith(f"rgba({hue}, ")
        assert float(first.split(", ")[3].rstrip(")")) == pytest.approx(0.62 * min(1, abs(values[0]) / full), abs=3e-3)
    pick(page, "shade", "mask")
    clipped = [bool(flag) for columns in tokens for flag in columns["clipped"]]
    spans = page.find_elements("css selector", "#detail .token")
    assert ["clipped" in span.get_attribute("class") for span in spans] == clipped
    one(page, "#row-0").click()  # an expert played its first turn
    first = page.find_elements("css selector", "#detail .token[data-turn='0']")
    assert all("unmasked" in span.get_attribute("class") for span in first)
    text = page.execute_script("return arguments[0].textContent", one(page, "#detail .tokens"))
    assert text.replace("⏎", "") == lines[0]["turns"][0]["text"]


def test_everything_is_reached_by_keys(opened: Any, lines: list[dict[str, Any]]) -> None:
    from selenium.webdriver.common.keys import Keys

    page = opened("one")

    def press(*keys: str) -> Any:
        for key in keys:
            page.switch_to.active_element.send_keys(key)
        return page.switch_to.active_element

    page.find_element("tag name", "body").send_keys("/")
    assert page.switch_to.active_element.get_attribute("id") == "search"
    while page.switch_to.active_element.get_attribute("id") != "list":
        press(Keys.TAB)
    focused = press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert focused.get_attribute("aria-activedescendant") == "row-2"
    assert one(page, "#row-2").get_attribute("aria-selected") == "true"
    assert focused.value_of_css_property("outline-style") == "solid"
    assert f"reward {lines[2]['reward']:.4g}" in one(page, "#detail").text.replace("\n", " ")
    assert press(Keys.END).get_attribute("aria-activedescendant") == f"row-{COUNT - 1}"
    press(Keys.HOME, Keys.ARROW_DOWN)
    token = press(Keys.ENTER)
    assert (token.get_attribute("data-turn"), token.get_attribute("data-token")) == ("0", "0")
    token = press(Keys.ARROW_RIGHT)
    assert token.get_attribute("data-token") == "1"
    assert token.value_of_css_property("outline-style") == "solid"
    ratio = lines[1]["turns"][0]["tokens"]["ratio"][1]
    assert f"importance ratio {float(f'{ratio:.4g}'):g}" in one(page, "#token").text
    token = press(Keys.ARROW_DOWN)
    assert (token.get_attribute("data-turn"), token.get_attribute("data-token")) == ("1", "0")
    assert press(Keys.ESCAPE).get_attribute("id") == "list"
    unnamed = """return [...document.querySelectorAll("button, select, input, [role=listbox], [role=region]")].filter(
        (node) => !(node.textContent.trim() || node.ariaLabel || node.labels?.[0]?.textContent.trim())).length"""
    assert page.execute_script(unnamed) == 0


def test_a_run_has_one_hue_and_can_be_taken_out(opened: Any) -> None:
    page = opened("two")
    curves = drawn(page)
    hues = [{curve["color"] for curve in curves if curve["run"] == number} for number in (0, 1)]
    assert all(len(hue) == 1 for hue in hues)
    assert hues[0] != hues[1]
    for number, hue in enumerate(hues):
        swatch = one(page, f".run .hue{number}").value_of_css_property("background-color")
        (code,) = hue
        assert [int(code[place : place + 2], 16) for place in (1, 3, 5)] == [
            int(n) for n in re.findall(r"\d+", swatch)[:3]
        ]
    assert {curve["run"] for curve in curves if curve["tag"].startswith("depth/")} == {1}
    one(page, ".run[data-run='0']").click()
    assert {curve["run"] for curve in drawn(page)} == {1}
    assert one(page, ".run[data-run='0']").get_attribute("aria-pressed") == "false"


def test_curves_are_drawn_against_what_is_chosen(opened: Any) -> None:
    page = opened("two")
    held = json.loads(page.execute_script("return document.getElementById('data').textContent"))["runs"]
    for value, part, name in (("collection", "by_collection", "steps"), ("step", "figures", "steps")):
        one(page, f"input[value='{value}'] + span").click()
        for curve in drawn(page):
            if curve["title"] != "Success by wall-clock time":
                source = "by_collection" if curve["title"] == "Success by collection" else part
                series = held[curve["run"]][source][curve["tag"]]
                assert (curve["x"], curve["y"]) == (series[name], series["values"])
    one(page, "figure.chart summary").click()
    cell = "figure.chart details tbody tr:nth-child(2) td"
    one(page, cell)  # waits: the table is filled after an event of its own, and anew whenever its chart is drawn
    success = held[0]["by_collection"]["rollout/success"]["values"][1]
    assert page.execute_script(f"return document.querySelector('{cell}').textContent") == str(success)
    one(page, "input[value='ratio'] + span").click()
    draw_all(page)
    grid = page.execute_script("return document.querySelector('.heat .plot').data[0].z")
    assert grid[3] == held[0]["by_collection"]["turns/ratio/3"]["values"]


def test_light_dark_and_a_small_screen(opened: Any) -> None:
    page = opened("two", scheme="dark")
    paper = one(page, "body").value_of_css_property("background-color")
    dark = drawn(page)[0]["color"]
    one(page, "#theme").click()
    assert page.execute_script("return document.documentElement.dataset.theme") == "light"
    assert one(page, "body").value_of_css_property("background-color") != paper
    assert drawn(page)[0]["color"] != dark
    page.execute_script("localStorage.clear()")
    page = opened("two", width=390, height=844)
    draw_all(page)
    assert page.execute_script("return document.documentElement.scrollWidth") == 390
    wide = "return charts.filter((figure) => figure.getBoundingClientRect().right > 390).length"
    assert page.execute_script(wide) == 0
