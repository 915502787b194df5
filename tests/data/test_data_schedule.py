"""Batch sizes as a function of consumed samples, and the same as megatron-core's own calculator."""

from __future__ import annotations

import pytest

from megaresume.data import BatchSizeSchedule


@pytest.mark.parametrize(
    ("last", "start", "increment", "samples"),
    [
        (16, 4, 4, 36),
        (64, 8, 8, 1000),
        (64, 8, 8, 997),
        (32, 16, 16, 1),
        (96, 2, 2, 12_345),
        (9, 3, 3, 7),
        (40, 4, 4, 3),
        # where floating point begins a stage one sample later than exact division would
        (8, 1, 1, 9),
        (8, 1, 1, 29),
    ],
)
def test_ramp_up_is_megatrons(last: int, start: int, increment: int, samples: int) -> None:
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(last, 1, 1, False, 1, start, increment, samples)
    ours = BatchSizeSchedule.ramp_up(last, start=start, increment=increment, samples=samples)
    for consumed in range(samples + 50):
        theirs.update(consumed, consistency_check=False)
        assert ours.at(consumed)[0] == theirs.get_current_global_batch_size(), consumed
    constant = calculators.ConstantNumMicroBatchesCalculator(last, 1, 1, False, 1)
    assert BatchSizeSchedule.constant(last).at(samples)[0] == constant.get_current_global_batch_size()


def test_table_says_where_the_next_stage_begins() -> None:
    table = BatchSizeSchedule(((0, 8), (80, 16), (800, 4)))
    assert [table.at(consumed) for consumed in (0, 79, 80, 799, 800, 10**15)] == [
        (8, 80),
        (8, 80),
        (16, 800),
        (16, 800),
        (4, None),
        (4, None),
    ]
    assert table.sizes == (4, 8, 16)
    assert str(table) == "[8 from 0, 16 from 80, 4 from 800]" and str(BatchSizeSchedule.constant(8)) == "8"


@pytest.mark.parametrize(
    ("stages", "error", "message"),
    [
        ((), ValueError, "at least one stage"),
        (((5, 8),), ValueError, "begin at 0 samples, got 5"),
        (((0, 8), (0, 16)), ValueError, "rising sample counts, got 0 after 0"),
        (((0, 0),), ValueError, "global_batch_size of stage 0 must be at least 1, got 0"),
        (((0, 8), (-4, 8)), ValueError, "samples of stage 1 must be at least 0, got -4"),
        (((0, 8.0),), TypeError, "must be an integer, got 8.0 of type float"),
        (((0, True),), TypeError, "got True of type bool"),
        ((7,), TypeError, r"must be a pair \(samples, global batch\), got 7"),
        (("08",), TypeError, "must be a pair"),
    ],
)
def test_bad_tables_are_named(stages: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchSizeSchedule(stages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("last", "start", "increment", "samples", "message"),
    [
        (16, 16, 4, 10, "start below global_batch_size 16, got start 16"),
        (16, 4, 5, 10, "multiple of increment 5; global_batch_size 14 or 19 would do"),
        (16, 4, 4, 0, "samples must be at least 1, got 0"),
        (16, 4, 0, 9, "increment must be at least 1, got 0"),
    ],
)
def test_ramps_megatron_would_fail_on_are_refused(
    last: int, start: int, increment: int, samples: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSizeSchedule.ramp_up(last, start=start, increment=increment, samples=samples)
