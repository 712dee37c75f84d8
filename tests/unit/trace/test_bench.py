"""What `make bench-trace` counts is the same on every machine, and within its bounds; its times are not judged here."""

from bench.trace import BOUNDS, measure


def test_bytes_and_rows_are_within_their_bounds() -> None:
    figures = measure(1)
    assert set(BOUNDS) <= set(figures)
    assert figures["bytes_per_turn"] <= BOUNDS["bytes_per_turn"] <= 6 * 1024
    assert figures["row_ratio_8_turns"] >= BOUNDS["row_ratio_8_turns"] >= 5
    assert figures["build_ms"] > 0
