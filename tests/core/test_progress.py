"""What a run shows while it runs: a bar where somebody sits before a cell, plain lines elsewhere."""

import re

from jupyter_client.manager import run_kernel
from processes import TESTS
from tiny import points

from speedkit import Plan, fit

CELL = """import sys; sys.path.insert(0, {tests!r})
from tiny import points
from speedkit import Plan, fit
fit(points(), plan=Plan(log_every=2), device="cpu");"""


def streams(client, code, metadata):
    """What a cell writes to stdout and to stderr, run with the metadata that a front end sends along."""
    client.shell_channel.send(client.session.msg("execute_request", {"code": code, "silent": False}, metadata=metadata))
    written = {"stdout": "", "stderr": ""}
    while (message := client.get_iopub_msg(timeout=60))["content"].get("execution_state") != "idle":
        if message["msg_type"] == "stream":
            written[message["content"]["name"]] += message["content"]["text"]
    return written


def test_an_interactive_cell_shows_a_bar_and_one_that_a_program_runs_plain_lines():
    code = CELL.format(tests=str(TESTS))
    with run_kernel(kernel_name="python3") as client:
        interactive = streams(client, code, {"cellId": "a-cell"})  # as JupyterLab and VS Code name it
        by_program = streams(client, code, {})  # as papermill and nbval run it
    assert "points: 100%|" in interactive["stderr"] and "00:00 left" in interactive["stderr"]
    assert "points step 12/12: loss" in by_program["stdout"] and not by_program["stderr"]
    assert re.search(r"step 12/12: loss .*, test 0\.\d+ at step 6, ", by_program["stdout"]), "the score is of step 6"
    for written in (interactive, by_program):
        assert "step 12: accuracy" in written["stdout"]


def test_plain_lines_where_there_is_no_notebook(capfd):
    fit(points(), device="cpu", plan=Plan(log_every=2), progress=True)
    shown = capfd.readouterr().out
    assert "points step 2/12: loss" in shown and "points step 12/12: loss" in shown and " left\n" in shown


def test_a_busy_machine_is_said_before_the_first_step(capfd, monkeypatch):
    """Other programs take 1.2 of the two cores that PyTorch computes with."""
    monkeypatch.setattr("speedkit.busy.others", lambda: {"encoder": 1.2})
    monkeypatch.setattr("speedkit.machine.torch.get_num_threads", lambda: 2)
    fit(points(), device="cpu", plan=Plan(log_every=2), progress=True)
    said, _, steps = capfd.readouterr().out.partition("points step 2/12")
    assert "this machine is busy: encoder (1.2 cores); with threads=1 no operation waits" in said and steps
    fit(points(), device="cpu", progress=False)
    assert "busy" not in capfd.readouterr().out
