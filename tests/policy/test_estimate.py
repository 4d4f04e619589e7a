"""What an answer is worth, against numbers worked by hand."""

from __future__ import annotations

from fedsched.core.decision import SpeedSample
from fedsched.core.ids import JobId
from fedsched.core.job import Allocation
from fedsched.policy.estimate import curves_of, worth
from tests.policy.observations import job, node, observation


def worth_of_one(*speeds: SpeedSample, progress_epochs: float = 0.0) -> float:
    """A job of 8 epochs with one worker and one PS, in a slot of 2 s."""
    seen = observation([node("n", 2)], [job("a", epochs=8.0, progress_epochs=progress_epochs, speeds=speeds)])
    return worth(seen, [(JobId("a"), Allocation(1, 1))], curves_of(seen))


def test_a_job_is_taken_to_train_as_fast_as_it_did_last() -> None:
    """At 4 epochs/s it would be all 8 of its epochs; it has become slower since: 1 of 8."""
    assert worth_of_one(SpeedSample(1, 1, 4.0), SpeedSample(1, 1, 0.5)) == 1 / 8


def test_nobody_trains_more_than_is_left() -> None:
    """Else an answer that feeds jobs which are all but done would look best."""
    assert worth_of_one(SpeedSample(1, 1, 4.0), progress_epochs=7.0) == 1 / 8
