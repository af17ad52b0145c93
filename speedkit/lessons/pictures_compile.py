"""What the lesson on compiling draws: passes over memory, and when compiling has paid for itself."""

from collections.abc import Mapping, Sequence

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import BLUE, GREEN, GREY, INK, ORANGE, STYLE, new_figure


@style.context(STYLE)
def memory_passes(operations: Sequence[tuple[str, int]]) -> Figure:
    """Return what operations, each with its number of inputs, read and write: one kernel for each, and one for all."""
    reads = sum(inputs for _, inputs in operations)
    figure, axes = new_figure(2.4)
    rows = {"one kernel each": [*operations], "compiled": [(" → ".join(name for name, _ in operations), 1)]}
    for y, kernels in enumerate(rows.values()):
        x = 0.0
        for name, inputs in kernels:
            axes.barh(y, inputs - 0.06, 0.5, left=x, color=BLUE)
            axes.barh(y, 0.94, 0.5, left=x + inputs, color=ORANGE)
            text = name if len(kernels) > 1 else f"{len(operations)} operations in registers"
            axes.text(x, y - 0.32, text, ha="left", va="bottom", fontsize=8.5)
            x += inputs + 1
    axes.set_yticks((0, 1), list(rows))
    axes.set(ylim=(1.5, -0.8), xlim=(0, None), xlabel="passes over memory (blue: reads, orange: writes)")
    axes.grid(visible=False)
    total = reads + len(operations)
    figure.suptitle(f"{len(operations)} operations: {total} passes over memory, or 2", x=0.01, ha="left")
    return figure


@style.context(STYLE)
def break_even(
    eager_s: float, compiled: Mapping[str, tuple[float, float]], paid: Mapping[str, int], *, title: str
) -> Figure:
    """Return total seconds by steps: eager ones of `eager_s`, and compiled, each with (seconds to compile, of a step).

    `paid` has the step at which a line crosses the eager one, where that was shown. The axis reaches to twice the
    latest, or to where compiling alone is a quarter of the eager time.
    """
    last = 2.0 * max(paid.values(), default=2 * max(seconds for seconds, _ in compiled.values()) / eager_s)
    figure, axes = new_figure(3.2)
    axes.plot([0, last], [0, last * eager_s], color=GREY, linewidth=2.5, label="eager")
    for (name, (seconds, step_s)), colour in zip(compiled.items(), (BLUE, ORANGE, GREEN), strict=False):
        axes.plot([0, last], [seconds, seconds + last * step_s], color=colour, label=name)
        if name in paid:
            axes.plot(paid[name], paid[name] * eager_s, "o", color=INK, markersize=5)
    axes.set(xlabel="training steps", ylabel="seconds since the start", xlim=(0, last), ylim=(0, None))
    axes.grid(visible=True, axis="both")
    axes.legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure
