"""A validation set taken from the training set."""

from tiny import points

from speedkit.lab.workloads.validation import hold_out


def test_a_share_of_each_label_is_held_out_the_same_every_time():
    work = hold_out(points(), 0.25)  # of 96
    assert sorted(item.label for item in work.validation) == 12 * [0] + 12 * [1]
    assert work.validation == hold_out(points(), 0.25).validation
    assert {*work.train} | {*work.validation} == {*points().train} and len(work.train) == 72
    assert len(hold_out(work, 0.001).validation) == 25, "one at least, beside those there are"
