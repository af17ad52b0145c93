"""What lesson 90 draws: how a tuning decides."""

import random

from matplotlib import style
from matplotlib.figure import Figure

from speedkit.lab.figures import GREEN, GREY, INK, ORANGE, STYLE, new_figure
from speedkit.measure.stats import FALSE_KEEP, LOOKS, decide, log_ratios, paired_interval, share_of


@style.context(STYLE)
def looks() -> Figure:
    """Return how the intervals of four made-up changes narrow from look to look, until one of them decides."""
    figure, axes = new_figure(3.4)
    draw = random.Random(5)
    colours = {"faster": GREEN, "slower": GREY, "not worth it": GREY, "undecided": ORANGE}
    for number, true_ratio in enumerate((1.3, 1.06, 1.0, 0.85)):
        noisy_s = [true_ratio * draw.gauss(1, 0.06) for _ in range(LOOKS[-1])]
        for look, pairs in enumerate(LOOKS):
            seconds = noisy_s[:pairs], [draw.gauss(1, 0.06) for _ in range(pairs)]
            found = paired_interval(*seconds, tail=FALSE_KEEP * share_of(pairs, LOOKS))
            answer = decide(log_ratios(*seconds))
            x = look + 0.16 * (number - 1.5)
            axes.plot([x, x], [found.low, found.high], color=colours[answer], linewidth=3, solid_capstyle="butt")
            axes.plot(x, found.ratio, "o", color=colours[answer], markersize=6)
            if answer != "undecided" or pairs == LOOKS[-1]:
                axes.text(x + 0.06, found.ratio + 0.01, f"{true_ratio:g}: {answer}", va="bottom", fontsize=8.5)
                break
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(LOOKS)), [f"after {pairs} pairs" for pairs in LOOKS])
    axes.set(xlim=(-0.5, 4.0), ylabel="ratio: above 1 is faster")
    axes.set_xlabel("a look at the pairs so far (green: keep; grey: reject; orange: measure on)")
    figure.suptitle("The smaller the effect, the more pairs until its interval leaves 1", x=0.01, ha="left")
    return figure
