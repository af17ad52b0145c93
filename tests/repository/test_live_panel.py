"""The live panel where somebody sits before it: a cell that is run as JupyterLab runs it, with the cell's name."""

from pathlib import Path

from jupyter_client.manager import run_kernel

LIVE = f"""import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
from tiny import points, slowed
from speedkit import Plan, fit
fit(slowed(points(epochs=None, steps=100), 0.02), plan=Plan(log_every=5, validate_every=0), device="cpu");"""


def test_a_cell_that_is_run_by_name_shows_several_steps_on_the_way():
    with run_kernel(kernel_name="python3") as client:
        content = {"code": LIVE, "silent": False}
        client.shell_channel.send(client.session.msg("execute_request", content, metadata={"cellId": "a-cell"}))
        shown = []
        while (message := client.get_iopub_msg(timeout=60))["content"].get("execution_state") != "idle":
            if message["msg_type"] == "update_display_data":
                shown.append(message["content"]["data"]["text/plain"])
    assert len(shown) > 2 and "points step 100/100" in shown[-1]
