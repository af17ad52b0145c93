"""A Dask cluster: processes on this machine or on others, for what may run side by side."""

import concurrent.futures
import contextlib
from collections.abc import Iterator

CONNECT_S = 10  # that a cluster has to answer


@contextlib.contextmanager
def cluster_executor(address: str) -> Iterator[concurrent.futures.Executor]:
    """Yield an executor on the Dask cluster whose scheduler is at `address`, tcp://HOST:PORT.

    Each machine needs this package and a worker (`dask worker tcp://HOST:PORT --nthreads 1`), best one for each GPU.
    """
    import distributed  # the extra [cluster]

    with distributed.Client(address, timeout=CONNECT_S, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=CONNECT_S)
        yield client.get_executor(pure=False)  # not pure: a sweep that is run again runs
