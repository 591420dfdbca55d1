"""Rows of the ResNets: images per second, and steps in ten hours (Figs. 21 to 23)."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from reproduction.claim import Row
from reproduction.prague.stated import IMAGES, ITERATIONS, Column
from reproduction.prague.testbed import AD_PSGD, ALL_REDUCE
from reproduction.prague.training import FIVE_TIMES, HOMOGENEOUS
from reproduction.prague.vgg_claims import faster_first
from reproduction.stated import explained

FIGURES = {"ResNet-18": 21, "ResNet-200": 22}
_INPUT = (
    "Ours is the speed of the GPU alone; at that speed a node's 16 cores would have to read and "
    "scale four times as many images, which the paper's input may not."
)
_REMOTE = (
    "AD-PSGD's steps are bytes over gRPC here. By the paper's tables it loses 0.4 to 0.5 s a step "
    "with each ResNet, though their sizes are as 1 to 2 to 6: that is not the cost of bytes."
)
_HOROVOD = (
    "Horovod averages gradients while the backward goes on; ours begins after it. Were all of it "
    "hidden, All-Reduce would be first here, but also with ResNet-18 and -50, where it is not."
)
_TOLERANT = (
    "Nobody waits for the one that sleeps, but those that meet it: ours keeps nearly the speed of "
    "the 15 others. The table's loses more than half, unlike VGG-16's in section 7.4, and the "
    "paper does not say why."
)


def image_rows(name: str, found: Mapping[int, Column]) -> Iterator[Row]:
    place, printed = f"Fig. {FIGURES[name]}", IMAGES[name]
    calm, slow = found[HOMOGENEOUS], found[FIVE_TIMES]
    slowed = [
        each[HOMOGENEOUS][ALL_REDUCE] / each[FIVE_TIMES][ALL_REDUCE] for each in (found, printed)
    ]
    yield explained(
        Row(
            place=place,
            what=f"{name}: images/s of a GPU, {ALL_REDUCE}",
            printed=printed[HOMOGENEOUS][ALL_REDUCE],
            ours=calm[ALL_REDUCE],
        ),
        _INPUT,
    )
    reasons = _Reasons(pairs=_REMOTE, groups=_HOROVOD)
    yield from _over_all_reduce(place, f"{name}: images/s", printed[HOMOGENEOUS], calm, reasons)
    yield explained(
        Row(
            place=place,
            what=f"{name}: images/s that {ALL_REDUCE} keeps if one worker sleeps 5x",
            printed=printed[FIVE_TIMES][ALL_REDUCE] / printed[HOMOGENEOUS][ALL_REDUCE],
            ours=slow[ALL_REDUCE] / calm[ALL_REDUCE],
        ),
        "Sleep as section 7.4 has it for VGG-16, 5 times what a step computes, slows all-reduce "
        f"{slowed[0]:.1f} times; the table's {slowed[1]:.1f} times is that of less sleep.",
    )
    what, reasons = f"{name}, one worker sleeps 5x: images/s", _Reasons(_TOLERANT, _TOLERANT)
    yield from _over_all_reduce(place, what, printed[FIVE_TIMES], slow, reasons)


def iteration_rows(found: Column) -> Iterator[Row]:
    yield Row(
        place="Fig. 23",
        what=f"ResNet-50, 32 workers: steps in 10 hours, {ALL_REDUCE}",
        printed=ITERATIONS[ALL_REDUCE],
        ours=found[ALL_REDUCE],
    )
    what = "ResNet-50, 32 workers: steps in 10 hours"
    reasons = _Reasons(pairs=_REMOTE, groups=_HOROVOD)
    yield from _over_all_reduce("Fig. 23", what, ITERATIONS, found, reasons)


class _Reasons(NamedTuple):
    """Why a ratio over all-reduce differs, if it does."""

    pairs: str  # AD-PSGD's
    groups: str  # Prague's


def _over_all_reduce(
    place: str, what: str, printed: Column, ours: Column, reasons: _Reasons
) -> Iterator[Row]:
    for method in printed:
        if method == ALL_REDUCE:
            continue
        theirs, here = printed[method] / printed[ALL_REDUCE], ours[method] / ours[ALL_REDUCE]
        yield explained(
            Row(
                place=place,
                what=f"{what}, {method} over {ALL_REDUCE}",
                printed=theirs,
                ours=here,
                printed_order=faster_first(method, ALL_REDUCE, theirs),
                our_order=faster_first(method, ALL_REDUCE, here),
            ),
            reasons.pairs if method == AD_PSGD else reasons.groups,
        )
