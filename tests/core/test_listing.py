"""What a message shows of a long list."""

from core import listing


def test_what_is_left_out_is_counted():
    assert listing.shortened(["a", "b", "c"], most=3) == ["a", "b", "c"]
    assert listing.shortened(["a", "b", "c"], most=1) == ["a", "… and 2 more"]
    assert listing.shortened([], most=1) == []
