"""How long `import speedkit` takes in a fresh process that has imported torch."""

from collections.abc import Iterator

import common

# The clock runs in the process itself: how long a process takes to start varies by more than the limit.
CODE = "import time, torch; began_s = time.perf_counter(); import speedkit; print(time.perf_counter() - began_s)"


def measure(quick: bool) -> Iterator[common.Result]:
    """Measure the seconds that the import takes beyond that of torch."""
    common.in_fresh_process(CODE)  # reads the files from disk, which is not to be measured
    seconds = [float(common.in_fresh_process(CODE)) for _ in range(3 if quick else 15)]
    yield common.median_of("import speedkit, beyond import torch", seconds, limit=0.3, unit=" s")


if __name__ == "__main__":
    common.main(measure)
