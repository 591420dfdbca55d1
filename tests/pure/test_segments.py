"""Plans of transfers give all that is wanted, once, from owners before buddies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.run.decoupled.segments import Range, plan_broadcast, plan_transfers


@dataclass
class Layout:
    """The shards of some parameters: what each replica owns, and copies as a buddy."""

    own: list[list[Range]]
    copies: list[list[Range]]

    @classmethod
    def of(cls, sizes: Sequence[int], num_replicas: int, bucket_size: int) -> "Layout":
        """Fill buckets with whole parameters, and cut each into equal shards."""
        own = [list[Range]() for _ in range(num_replicas)]
        bucket = list[int]()
        for parameter in range(len(sizes)):
            bucket.append(parameter)
            total = sum(sizes[each] for each in bucket)
            if total >= bucket_size or parameter == len(sizes) - 1:
                shard, offset = -(-total // num_replicas), 0
                for each in bucket:
                    for replica in range(num_replicas):
                        start = max(offset, replica * shard) - offset
                        stop = min(offset + sizes[each], (replica + 1) * shard) - offset
                        if start < stop:
                            own[replica].append(Range(each, start, stop))
                    offset += sizes[each]
                bucket.clear()
        return cls(own, [own[replica - 1] for replica in range(num_replicas)])

    def without(self, lost: set[int]) -> "Layout":
        left = [replica for replica in range(len(self.own)) if replica not in lost]
        return Layout([self.own[each] for each in left], [self.copies[each] for each in left])


sizes_of_parameters = st.lists(st.integers(0, 40), min_size=1, max_size=8)
bucket_sizes = st.integers(1, 80)


def numbers_in(ranges: Sequence[Range]) -> Counter[tuple[int, int]]:
    return Counter((each.parameter, n) for each in ranges for n in range(each.start, each.stop))


@given(
    *(sizes_of_parameters, bucket_sizes, bucket_sizes),
    *(st.integers(2, 6), st.integers(0, 2), st.data()),
)
def test_one_lost_replica_loses_nothing_and_all_that_is_wanted_arrives_once(
    sizes: list[int], old_bucket: int, new_bucket: int, num: int, joins: int, data: st.DataObject
) -> None:
    lost = data.draw(st.integers(0, num))  # num: none
    held = Layout.of(sizes, num, old_bucket).without({lost})
    num_members = len(held.own) + joins
    held.own += [[] for _ in range(joins)]
    held.copies += [[] for _ in range(joins)]
    goes_on = data.draw(st.sets(st.integers(0, num_members - 1), min_size=1))
    new = Layout.of(sizes, len(goes_on), new_bucket)
    wanted = [list[Range]() for _ in range(num_members)]
    for replica, member in enumerate(sorted(goes_on)):
        copies = new.copies[replica] if len(goes_on) > 1 else []
        wanted[member] = [*new.own[replica], *copies]

    plan = plan_transfers(held.own, held.copies, wanted)
    assert not plan.missing
    owned, copied = ([numbers_in(each) for each in some] for some in (held.own, held.copies))
    for member in range(num_members):
        arriving = [t for t in plan.transfers if t.receiver == member]
        assert numbers_in([t.piece for t in arriving]) == numbers_in(wanted[member])
        for source, _, piece in arriving:
            numbers = numbers_in([piece])
            is_held = numbers <= owned[member] or numbers <= copied[member]
            assert (source == member) == is_held
            if not numbers <= owned[source] and source != member:
                assert numbers <= copied[source]
                assert not any(numbers <= each for each in owned)
            ranges = [*held.own[source], *held.copies[source]]
            assert any(r.parameter == piece.parameter and _contains(r, piece) for r in ranges)
            assert any(
                r.parameter == piece.parameter and _contains(r, piece) for r in wanted[member]
            )


def _contains(outer: Range, inner: Range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


@given(sizes_of_parameters, bucket_sizes, st.integers(2, 6), st.data())
def test_all_receivers_get_all_weights_from_the_same_sources(
    sizes: list[int], bucket_size: int, num: int, data: st.DataObject
) -> None:
    held = Layout.of(sizes, num, bucket_size).without({data.draw(st.integers(0, num))})
    receivers = sorted(data.draw(st.sets(st.integers(0, len(held.own) - 1), min_size=1)))
    plan = plan_broadcast(held.own, held.copies, receivers, sizes)
    assert not plan.missing
    whole = numbers_in([Range(index, 0, size) for index, size in enumerate(sizes)])
    of_first = {(t.source, t.piece) for t in plan.transfers if t.receiver == receivers[0]}
    for receiver in receivers:
        arriving = [t for t in plan.transfers if t.receiver == receiver]
        assert numbers_in([t.piece for t in arriving]) == whole
        assert {(t.source, t.piece) for t in arriving} == of_first


@given(sizes_of_parameters, bucket_sizes, st.integers(3, 6), st.data())
def test_what_two_neighbours_alone_held_is_missing(
    sizes: list[int], bucket_size: int, num: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, num - 1))
    layout = Layout.of(sizes, num, bucket_size)
    held = layout.without({first, (first + 1) % num})
    receivers = range(len(held.own))
    lost = numbers_in(layout.own[first])
    assert numbers_in(plan_broadcast(held.own, held.copies, receivers, sizes).missing) == lost
    wanted = [[Range(index, 0, size) for index, size in enumerate(sizes) if size]]
    wanted += [[]] * (len(held.own) - 1)
    assert numbers_in(plan_transfers(held.own, held.copies, wanted).missing) == lost


@given(st.integers(2, 6), st.lists(st.integers(1, 40), min_size=1, max_size=30), st.randoms())
def test_holders_of_everything_share_the_sending(
    num: int, sizes: list[int], random: Random
) -> None:
    random.shuffle(sizes)
    whole = [Range(index, 0, size) for index, size in enumerate(sizes)]
    own, nothing = [*([whole] * num), []], [list[Range]()] * (num + 1)
    plan = plan_transfers(own, nothing, [*nothing[1:], whole])
    sent = Counter[int](dict.fromkeys(range(num), 0))
    for source, _, piece in plan.transfers:
        sent[source] += piece.stop - piece.start
    assert sent.total() == sum(sizes)
    assert max(sent.values()) - min(sent.values()) <= max(sizes)
