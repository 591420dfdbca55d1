"""Quantities: parsing gives the written value, and formatted values parse back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.describe.units import check_amount, keys_with_unit, parse, show
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, BytesPerSecond, Seconds


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("34ms", Seconds, 0.034),
        (" 1.5 min ", Seconds, 90.0),
        ("-2e3us", Seconds, -0.002),
        ("0s", Seconds, 0.0),
        (".5h", Seconds, 1800.0),
        ("24GiB", Bytes, 24 * 2**30),
        ("1.5kB", Bytes, 1500),
        ("0.1GiB", Bytes, 107374182),
        ("1.5 Gbit/s", BytesPerSecond, 187_500_000.0),
        ("1.2GB/s", BytesPerSecond, 1.2e9),
    ],
)
def test_written_quantity_has_its_value_in_base_units(text, kind, value):
    assert parse(text, kind) == value
    assert type(parse(text, kind)) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "wrong", "fix"),
    [
        ("34", Seconds, "'34' has no unit", 'write it like "34ms"'),
        ("", Seconds, "'' is not a time", 'write it like "34ms"'),
        ("fast", Seconds, "'fast' is not a time", 'write it like "34ms"'),
        ("34MS", Seconds, "'34MS' is not a time", 'write "34ms"'),
        ("34msec", Seconds, "'34msec' is not a time", 'write it like "34ms"'),
        ("1 gbit/s", BytesPerSecond, "'1 gbit/s' is not a rate", 'write "1Gbit/s"'),
        ("1TiB", Bytes, "'1TiB' is not a size", 'write it like "24GiB"'),
        ("24GIB", Bytes, "'24GIB' is not a size", 'write "24GiB"'),
        ("1.1Gbps", BytesPerSecond, "'1.1Gbps' is not a rate", 'write "1.1Gbit/s"'),
        ("1e999s", Seconds, "Infinity is out of range", 'write it like "34ms"'),
        ("1e308h", Seconds, "1e+308 is out of range", 'write it like "34ms"'),
        ("nan s", Seconds, "'nan s' is not a time", 'write it like "34ms"'),
    ],
)
def test_bad_quantity_is_refused_with_a_correct_spelling(text, kind, wrong, fix):
    with pytest.raises(DescriptionError) as caught:
        parse(text, kind)
    assert (caught.value.wrong, caught.value.fix) == (wrong, fix)


@given(st.text() | st.from_regex(r"[0-9.eE+-]{1,12} ?[a-zA-Z/]{0,6}"))
def test_any_text_is_a_finite_quantity_or_a_description_error(text):
    for kind in (Seconds, Bytes, BytesPerSecond):
        try:
            value = parse(text, kind)
        except DescriptionError:  # any other exception fails the test
            continue
        assert math.isfinite(value)


@given(st.integers(0, 10**7))
def test_milliseconds_are_the_float_nearest_to_a_thousandth(number):
    assert parse(f"{number}ms", Seconds) == number / 1000  # a division rounds once; * 1e-3 does not


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.034, Seconds, "34ms"),
        (0.25, Seconds, "250ms"),
        (100.0, Seconds, "100s"),
        (5400.0, Seconds, "1.5h"),
        (0.0, Seconds, "0s"),
        (math.inf, Seconds, "inf"),
        (24 * 2**30, Bytes, "24GiB"),
        (1000, Bytes, "1000B"),
        (137.5e6, BytesPerSecond, "1.1Gbit/s"),
        (12.5e6, BytesPerSecond, "100Mbit/s"),
    ],
)
def test_quantity_is_shown_in_the_unit_that_makes_it_short(value, kind, text):
    assert show(value, kind) == text


@given(
    st.tuples(st.floats(-1e7, 1e7), st.just(Seconds))
    | st.tuples(st.integers(-(2**60), 2**60), st.just(Bytes))
    | st.tuples(st.floats(0, 1e12), st.just(BytesPerSecond))
)
def test_what_is_shown_parses_back_to_four_digits(case):
    value, kind = case
    # A size is a whole number of bytes; the smallest floats of all do not have four digits.
    tolerance = 0.5 if kind is Bytes else 1e-300
    assert parse(show(value, kind), kind) == pytest.approx(value, rel=6e-4, abs=tolerance)


def test_keys_name_bits_per_second_but_never_bytes_per_second():
    keys = {"rate_kbps": 125.0, "rate_mbps": 125e3, "rate_gbps": 125e6}
    assert keys_with_unit("rate", BytesPerSecond) == keys


@pytest.mark.parametrize("value", [-1.0, math.inf, -math.inf, math.nan])
def test_amount_must_be_finite_and_not_negative(value):
    with pytest.raises(DescriptionError, match="speed is"):
        check_amount("speed", value)


def test_zero_is_allowed_unless_excluded():
    check_amount("latency", 0.0, Seconds)
    with pytest.raises(DescriptionError, match="bandwidth is 0kbit/s"):
        check_amount("bandwidth", 0.0, BytesPerSecond, zero=False)
