"""Sizes in bytes, as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_mlp_offload.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0", 0),
        ("1B", 1),
        ("16GiB", 16 * 2**30),
        ("16 gib", 16 * 2**30),
        (" 500MB ", 500 * 10**6),
        ("1.5KiB", 1536),
        ("2TB", 2 * 10**12),
        ("1PiB", 2**50),
        (12, 12),
        (1.5e9, 1_500_000_000),
    ],
)
def test_parse(text, size):
    assert parse_bytes(text, "host_memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "1 XB", "-1", "1e9", "16 Gi B", "1,5GB", -1, float("inf"), float("nan")])
def test_not_a_size(text):
    with pytest.raises(ValueError, match="host_memory="):
        parse_bytes(text, "host_memory")


@pytest.mark.parametrize("value", [None, True, [1], b"1GB"])
def test_not_even_text(value):
    with pytest.raises(TypeError, match="capacity is"):
        parse_bytes(value, "capacity")


@given(st.integers(0, 2**50))
def test_numbers_are_themselves(size):
    assert parse_bytes(size, "x") == parse_bytes(str(size), "x") == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format(size, text):
    assert format_bytes(size) == text


@given(st.floats(0, 2**50))
def test_format_reads_back(size):
    assert parse_bytes(format_bytes(size), "x") == pytest.approx(size, rel=0.06, abs=1)
