"""PyTorch's threads within one operation on the CPU, while a plan says how many."""

import torch

own: list[int] = []  # the process's own number, while a plan has set another


def set_threads(count: int | None) -> None:
    """Set the number of threads; None is the process's own."""
    if count is None:
        restore_threads()
        return
    if not own:
        own.append(torch.get_num_threads())
    torch.set_num_threads(count)


def restore_threads() -> None:
    """Set the process's own number of threads, if a plan has set another."""
    if own:
        torch.set_num_threads(own.pop())
