"""Rows of VGG-16: steps, steps to a loss, and both together (Figs. 18 to 20)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from reproduction.claim import Row, ordered
from reproduction.prague.models import VGG_16
from reproduction.prague.stated import OVERALL, SPEED_OF_STEP, STEPS_TO_LOSS
from reproduction.prague.testbed import (
    AD_PSGD,
    ALL_REDUCE,
    RANDOM,
    SERVER,
    SMART,
    STATIC,
)
from reproduction.prague.training import (
    FIVE_TIMES,
    HOMOGENEOUS,
    TWICE,
    Trained,
)
from reproduction.stated import explained

Vgg = Mapping[int, Mapping[str, Trained]]  # by what one worker sleeps, and by method

_SERVERS = (
    "The paper does not say how many servers it had; ours are faster than its must have been (see "
    "above), so all that is over them is low."
)
_TIED = (
    f"{_SERVERS} And a fixed schedule ties all workers to the one that sleeps, which costs as much "
    "of a step as under all-reduce; the paper's loses less, and does not say why."
)
_CONFLICTS = (
    f"{_SERVERS} And random groups wait for each other and share connections for much of a step "
    "here."
)
_ANYWAY = (
    "Random groups wait for each other for much of a step here, whether one of them sleeps or not; "
    "the paper's lose less without sleep, and more with it."
)
_FEWER = (
    "Neither pairs nor smart groups need fewer steps than the server on our problem; the paper's "
    "do, which it puts down to their randomness."
)
_BYTES = "AD-PSGD's steps are bytes over gRPC here; the paper's must have cost more than that."
_WHY = {STATIC: _TIED, RANDOM: _CONFLICTS}


def vgg_rows(found: Vgg) -> Iterator[Row]:
    for row in _rows(found):
        yield replace(row, what=f"VGG-16: {row.what}")


def _rows(found: Vgg) -> Iterator[Row]:
    calm, five = found[HOMOGENEOUS], found[FIVE_TIMES]
    yield from _homogeneous(calm)
    yield from _over_server(found, HOMOGENEOUS, "Fig. 18, sections 7.3 and 7.4")
    yield from _over_server(found, TWICE, "Fig. 20, section 7.4")
    for method, printed in OVERALL[TWICE].items():
        row = Row(
            place="Fig. 20, section 7.4",
            what=f"speed to the loss that {method} keeps if one worker sleeps 2x",
            printed=printed / OVERALL[HOMOGENEOUS][method],
            ours=calm[method].time / found[TWICE][method].time,
            is_given=True,  # by the two rows over the server
        )
        yield explained(row, _ANYWAY if method == RANDOM else "")
    yield _faster("abstract", "", calm, SMART, ALL_REDUCE, 1.2)
    yield _faster("abstract", "", calm, SMART, AD_PSGD, 3.7, why=_BYTES)
    yield _faster("Fig. 1, section 1", "", calm, ALL_REDUCE, AD_PSGD, 3.02, why=_BYTES)
    slept = ", one worker sleeps 5x"
    yield _faster("Fig. 1, section 1", slept, five, AD_PSGD, ALL_REDUCE, 1.75)
    # Section 7.4: random "is slightly slower than AD-PSGD", smart "outperforms" it by far.
    speeds = {method: 1 / five[method].time for method in (SMART, AD_PSGD, RANDOM, ALL_REDUCE)}
    row = _faster("abstract, section 7.4", slept, five, SMART, ALL_REDUCE, 4.4)
    yield replace(row, printed_order=tuple(speeds), our_order=ordered(speeds))


def _homogeneous(calm: Mapping[str, Trained]) -> Iterator[Row]:
    server = calm[SERVER]
    share = 1 - VGG_16.compute / calm[AD_PSGD].step
    yield explained(
        Row(
            place="Fig. 2 (b), section 2.3",
            what="part of a step in which AD-PSGD synchronises",
            printed=0.9,
            ours=share,
        ),
        _BYTES,
    )
    for method, printed in SPEED_OF_STEP.items():
        ours = server.step / calm[method].step
        yield explained(
            Row(
                place="Fig. 18, section 7.3",
                what=f"speed of a step, {method} over {SERVER}",
                printed=printed,
                ours=ours,
                printed_order=(method, SERVER),
                our_order=faster_first(method, SERVER, ours),
            ),
            _SERVERS,
        )
    for method, printed in STEPS_TO_LOSS.items():
        yield explained(
            Row(
                place="Fig. 19, section 7.3",
                what=f"steps to the loss, {method} over {SERVER}",
                printed=printed,
                ours=calm[method].steps / server.steps,
            ),
            _FEWER,
        )


def _over_server(found: Vgg, times: int, place: str) -> Iterator[Row]:
    """The row of the best is about the order of all."""
    column, base = OVERALL[times], found[HOMOGENEOUS][SERVER].time
    ours = {method: base / found[times][method].time for method in column}
    slept = f", one worker sleeps {times}x" if times else ""
    for method, printed in column.items():
        is_best = method == SMART
        yield explained(
            Row(
                place=place,
                what=f"speed to the loss, {method} over {SERVER}{slept}",
                printed=printed,
                ours=ours[method],
                printed_order=ordered(column) if is_best else (method, SERVER),
                our_order=ordered(ours) if is_best else faster_first(method, SERVER, ours[method]),
            ),
            _WHY.get(method, _SERVERS) if times or method == RANDOM else _SERVERS,
        )


def _faster(
    place: str,
    slept: str,
    found: Mapping[str, Trained],
    one: str,
    other: str,
    printed: float,
    *,
    why: str = "",
) -> Row:
    ours = found[other].time / found[one].time
    row = Row(
        place=place,
        what=f"speed to the loss, {one} over {other}{slept}",
        printed=printed,
        ours=ours,
        printed_order=(one, other),
        our_order=faster_first(one, other, ours),
    )
    return explained(row, why)


def faster_first(one: str, other: str, ratio: float) -> tuple[str, str]:
    return (one, other) if ratio >= 1 else (other, one)
