"""The workbench: what it measures, and itself in JupyterLab, driven in a browser: switch, compare, stop, take over."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import nbformat
import pytest
from jupyter_server.serverapp import list_running_servers
from processes import ROOT, TESTS
from tiny import points

from speedkit import Plan
from speedkit.lab.exploration import explore_plan
from speedkit.lab.workbench import explore

CELL = f"""import sys
sys.path[:0] = ["{ROOT}", "{TESTS}"]
import speedkit
from tiny import points
bench = speedkit.explore(points(), device="cpu")
bench"""
# The sliders of a lesson: its picture is drawn anew where it stands.
SLIDERS = """import ipywidgets
from speedkit.lessons import pictures, pictures_measure
def queue(launch_us):
    return pictures_measure.queue([(0.0, launch_us)], [], [], title=f"{launch_us:.0f} us")
pictures.with_sliders(ipywidgets.FloatLogSlider, queue, launch_us=10.0)"""


@pytest.mark.slow
def test_news_of_a_plan_come_in_the_order_in_which_they_are_known():
    news = []
    explore_plan(points(), Plan(fused_optimizer=True, prefetch=True), tell=news.append, device="cpu")
    known = [key for each in news for key in each if key != "state"]
    assert [*dict.fromkeys(known)] == [
        "notes",
        "breakdowns",
        "predicted",
        "bytes",
        "ratio",
        "low",
        "high",
        "decision",
    ]
    assert "prefetch needs a CUDA GPU" in news[0]["notes"][0]
    known = {key: value for each in news for key, value in each.items()}
    assert {*known["breakdowns"]} == {"baseline", "plan"} and min(known["bytes"]) > 0
    assert known["low"] < known["ratio"] < known["high"]


def test_switches_say_what_this_machine_cannot_do_and_make_a_plan():
    bench = explore(points(), device="cpu")
    assert bench.switches["prefetch"].disabled and "CUDA GPU" in bench.switches["prefetch"].description
    assert not bench.switches["channels_last"].disabled
    assert any("cudnn: not here" in label for label, _ in bench.switches["attention"].options)
    bench.switches["precision"].value = "bf16"
    bench.switches["workers"].value = "2"
    assert bench.plan() == Plan(precision="bf16", workers=2)
    bench.take.value = "PyTorch"
    assert "autocast" in bench.taken.value
    bench.switches["workers"].value = "many"
    bench.start()
    assert "workers=" in bench.shown.value and bench.process is None


@contextlib.contextmanager
def jupyterlab(folder):
    """JupyterLab over `folder`; its address."""
    runtime = folder / "runtime"
    environment = os.environ | {"JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(folder / "config")}
    options = (
        "--no-browser",
        "--allow-root",
        "--port=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_s = time.monotonic() + 120
        while not (found := [*list_running_servers(runtime)]):
            assert server.poll() is None and time.monotonic() < until_s
            time.sleep(0.2)
        yield found[0]["url"]
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_the_workbench_compares_stops_and_hands_its_plan_over_in_jupyterlab(browser, tmp_path):
    from playwright.sync_api import expect

    cells = [nbformat.v4.new_code_cell(source) for source in (CELL, SLIDERS, "1 + 41")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "bench.ipynb")
    with jupyterlab(tmp_path) as address:
        page = browser.new_page(viewport={"width": 1400, "height": 1200})
        page.set_default_timeout(120_000)
        page.goto(f"{address}lab/tree/bench.ipynb")
        page.get_by_text("| Idle").wait_for()  # else the kernel would not get the cell
        page.locator(".jp-CodeCell").first.click()
        page.keyboard.press("Shift+Enter")
        page.get_by_label("fused_optimizer").check()
        page.get_by_role("button", name="Compare").click()
        page.get_by_text("ms per step").wait_for()
        page.locator(".jp-CodeCell").last.click()
        page.keyboard.press("Shift+Enter")  # the kernel stays usable
        page.get_by_text("42", exact=True).wait_for()
        page.get_by_text(re.compile("measured")).wait_for()
        page.get_by_text(re.compile("plain PyTorch, (faster|slower|not worth it|undecided)")).wait_for()
        page.screenshot(path=tmp_path / "compared.png", full_page=True)
        page.get_by_role("button", name="Compare").click()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("stopped").wait_for()
        page.get_by_role("combobox").last.select_option("YAML")
        page.get_by_text("fused_optimizer: true").wait_for()
        page.locator(".jp-CodeCell").nth(1).click()
        page.keyboard.press("Shift+Enter")
        picture = page.locator(".jp-CodeCell").nth(1).locator("img")
        drawn = picture.get_attribute("src")
        page.locator(".noUi-handle").press("ArrowRight")
        expect(picture).not_to_have_attribute("src", drawn)
        page.keyboard.press("Control+s")
        until_s = time.monotonic() + 60
        while not any("image/png" in str(cell) for cell in json.loads((tmp_path / "bench.ipynb").read_text())["cells"]):
            assert time.monotonic() < until_s
            time.sleep(0.5)
