"""The widgets in a real browser: JupyterLab on this machine, Chromium driven by Playwright, nothing from elsewhere."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "a-token-for-this-test"
WAIT_MS = 60_000  # for a kernel that imports torch on a busy machine
SETUP = """import sys; sys.path[:0] = [{tests!r}]
from tiny import points, slowed
from speedkit import Plan, fit
from speedkit.show import widgets
"""
LIVE = "history = fit(slowed(points(epochs=None, steps=300), 0.01), plan=Plan(validate_every=100), device='cpu');"
PLANS = "panel = widgets.PlanPanel(points(), seconds=0.2)\npanel"


@pytest.fixture(scope="module")
def chromium():
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        why = "the browser tests need Chromium: make system installs it"
        pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)
    return path


@pytest.fixture(scope="module")
def lab(chromium, own_folders, tmp_path_factory):
    """Yield the address of a JupyterLab and the folder of its notebooks; leave none of its processes behind."""
    folder = tmp_path_factory.mktemp("lab")
    settings = Path(os.environ["JUPYTER_CONFIG_DIR"], "labconfig")
    settings.mkdir()
    news = {"@jupyterlab/apputils-extension:announcements": True}
    (settings / "page_config.json").write_text(json.dumps({"disabledExtensions": news}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": folder, "allow_root": True}
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        f"--IdentityProvider.token={TOKEN}",
        *(f"--ServerApp.{name}={value}" for name, value in options.items()),
    ]
    environment = os.environ | {
        "SPEEDKIT_NOTEBOOKS": str(ROOT / "notebooks"),
        "SPEEDKIT_PROFILE": "smoke",
        "SPEEDKIT_RUN_DIR": str(folder / "run"),
    }
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(f"{address}/api/status?token={TOKEN}"), (folder / "server.log").read_text)
        yield address, folder
    finally:
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        server.terminate()  # which shuts the kernels down
        _, left = psutil.wait_procs(processes, timeout=30)
        for process in left:
            process.kill()
    assert not left


def answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def until(true, otherwise, seconds=120):
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s, otherwise()
        time.sleep(0.2)


@pytest.fixture
def page(chromium, lab, tmp_path):
    """Yield a page of the browser, of which a picture stays; nothing of it may come from another host."""
    from playwright.sync_api import sync_playwright

    address, foreign = lab[0], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1400})
        page.set_default_timeout(WAIT_MS)
        page.on("request", lambda request: foreign.append(request.url))
        yield page
        page.screenshot(path=tmp_path / "page.png")
        browser.close()
    hosts = {urllib.parse.urlsplit(url).netloc for url in foreign if not url.startswith(("data:", "blob:"))}
    assert hosts == {urllib.parse.urlsplit(address).netloc}


def run_all(page, lab, path):
    """Open the notebook at `path` and run all its cells."""
    address, _ = lab
    page.goto(f"{address}/lab/tree/{path.name}?reset&token={TOKEN}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def write(folder, name, *sources):
    path = folder / f"{name}.ipynb"
    kernel = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}}
    setup = SETUP.format(tests=str(ROOT / "tests"))
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in (setup, *sources)], metadata=kernel), path)
    return path


def dropdown(page, name):
    return page.locator(".widget-dropdown", has=page.get_by_text(name, exact=True)).locator("select")


def changes(page, picture, act):
    """Do `act` and wait until `picture` is another one."""
    from playwright.sync_api import Error

    def taken():
        try:
            return picture.screenshot()
        except Error:  # it is just being replaced
            return None

    before = picture.screenshot()
    act()
    same = lambda: "the picture stays the same"  # noqa: E731
    until(lambda: page.wait_for_timeout(200) or taken() not in (None, before), same, 60)


def test_live_panel_follows_a_run_and_stays_as_plain_html(page, lab):
    path = write(lab[1], "live", LIVE)
    run_all(page, lab, path)
    output = page.locator(".jp-OutputArea-output").first
    seen = set()
    until(lambda: seen.add(output.inner_text()) or any("300/300" in text for text in seen), lambda: str(seen))
    assert len({text.partition("/300")[0] for text in seen}) > 3, "it showed several steps on the way"
    page.get_by_text("step 300: accuracy").wait_for()
    page.locator(".jp-OutputArea-output svg polyline").wait_for()
    assert page.locator(".jp-OutputArea-output .jupyter-widgets").count() == 0, "plain HTML, no widget"


def test_plan_panel_tells_and_measures(page, lab):
    run_all(page, lab, write(lab[1], "plan", PLANS))
    dropdown(page, "attention").select_option("cudnn")
    page.get_by_text("this kernel is one of CUDA's").wait_for()
    dropdown(page, "channels_last").select_option("true")
    measure = page.locator("button.jupyter-button", has_text="Run")
    measure.click()
    picture = page.locator("img:visible")
    picture.wait_for()
    assert "1. channels_last=True, attention=cudnn" in page.locator("table.dataframe").inner_text()
    changes(page, picture, measure.click)


def test_explorer_in_a_notebook_of_the_repository(page, lab):
    path = Path(shutil.copy(ROOT / "notebooks" / "01_measure.ipynb", lab[1]))
    run_all(page, lab, path)
    page.get_by_text("record of 01_measure").wait_for()
    pairs = page.locator(".widget-slider", has=page.get_by_text("pairs", exact=True)).locator(".noUi-handle")
    pairs.scroll_into_view_if_needed()
    picture = page.locator(".jp-OutputArea .jupyter-widgets img").last
    changes(page, picture, lambda: pairs.press("ArrowLeft"))
