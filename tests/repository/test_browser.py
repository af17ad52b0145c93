"""The live panel in a real browser: JupyterLab on this machine, Chromium driven by Playwright."""

import json
import os
import re
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

TOKEN = "a-token-for-this-test"
WAIT_MS = 60_000  # for a kernel that imports torch on a busy machine
LIVE = f"""import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
from tiny import points, slowed
from speedkit import Plan, fit
history = fit(slowed(points(epochs=None, steps=300), 0.01), plan=Plan(validate_every=100), device="cpu");"""


@pytest.fixture
def lab(browser, own_folders, tmp_path):
    """Yield the address of a JupyterLab over `tmp_path`; leave none of its processes behind."""
    settings = Path(os.environ["JUPYTER_CONFIG_DIR"], "labconfig")
    settings.mkdir()
    news = {"@jupyterlab/apputils-extension:announcements": True}
    (settings / "page_config.json").write_text(json.dumps({"disabledExtensions": news}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": tmp_path, "allow_root": True}
    flags = [f"--IdentityProvider.token={TOKEN}", *(f"--ServerApp.{name}={value}" for name, value in options.items())]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", *flags]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(f"{address}/api/status?token={TOKEN}"), (tmp_path / "server.log").read_text)
        yield address
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


def test_live_panel_follows_a_run_and_stays_as_plain_text(browser, lab, tmp_path):
    kernel = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}}
    nbformat.write(new_notebook(cells=[new_code_cell(LIVE)], metadata=kernel), tmp_path / "live.ipynb")
    requests, page = [], browser.new_page(viewport={"width": 1500, "height": 1400})
    page.set_default_timeout(WAIT_MS)
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"{lab}/lab/tree/live.ipynb?reset&token={TOKEN}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    output, texts = page.locator(".jp-OutputArea-output").first, set()
    until(lambda: texts.add(output.inner_text()) or any("300/300" in text for text in texts), lambda: str(texts))
    assert len({text.partition("/300")[0] for text in texts}) > 3, "it showed several steps on the way"
    page.get_by_text("step 300: accuracy").wait_for()
    assert re.search("[▁▂▃▄▅▆▇█]{4}", output.inner_text()), "the course of the loss"
    assert page.locator(".jp-OutputArea-output .jupyter-widgets").count() == 0, "plain text, no widget"
    page.close()
    hosts = {urllib.parse.urlsplit(url).netloc for url in requests if not url.startswith(("data:", "blob:"))}
    assert hosts == {urllib.parse.urlsplit(lab).netloc}, "nothing comes from another host"
