"""What the report on compiling says: where a graph ended early, and why one was made again."""

import torch

from speedkit.lessons.compile_report import Compilations


def reported(function, *calls):
    torch._dynamo.reset()
    profile, compiled = Compilations(), torch.compile(function, backend="eager", dynamic=False)
    for arguments in calls:
        compiled(arguments)
    return profile.report()


def test_a_graph_break_is_named_with_its_line_and_reason():
    def prints(x):
        doubled = x * 2
        print(end="")
        return doubled + 1

    report = reported(prints, torch.ones(3))
    (graph_break,) = report.breaks
    assert graph_break.startswith("test_compile_report.py:") and '`print(end="")`: Failed to trace' in graph_break
    assert report.graphs == 2 and reported(lambda x: x * 2 + 1, torch.ones(3)).breaks == ()


def test_recompiles_are_explained_and_so_is_their_limit():
    report = reported(lambda x: x * 2, *(torch.ones(size) for size in (3, 4, 4)))
    assert report.graphs == 2 and report.uncompiled == ()
    (recompile,) = report.recompiles
    assert recompile.endswith("tensor 'x' size mismatch at index 0. expected 3, actual 4")
    with torch._dynamo.config.patch(recompile_limit=2):
        report = reported(lambda x: x - 1, *(torch.ones(size) for size in (3, 4, 5)))
    assert report.graphs == 2 and "recompile limit" in " ".join(report.uncompiled)
