"""The test of an operator of your own: ``pytest examples/operators``."""

from examples.operators.block_squares import block_squares
from tracelake.testing import run_operator


def test_every_block_of_the_range_has_its_square() -> None:
    run = run_operator(block_squares, blocks=range(10, 13), config={"offset": 1})
    assert run.outputs["result"].to_pydict() == {"block_number": [10, 11, 12], "square": [101, 122, 145]}
    assert run.progress == {"done": 3, "total": 3}
    assert "squaring blocks=3" in run.log
