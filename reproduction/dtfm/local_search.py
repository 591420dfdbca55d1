"""DT-FM's local searches: each improves a partition in place and leaves it balanced.

Both are passes like Kernighan and Lin's: the step with the largest gain is taken even if it is
a loss, a moved device stays fixed for the rest of the pass, and at the end all steps after the best
point are undone. They differ in their steps.

- `circular`: single devices move from group to group; where the gain is largest, the cycle closes:
  the first group receives a device. Only ends of the fastest link of a group are considered. The
  gain is that of section 3.4: what a device would pay on average to reach the other group, less its
  fast link, which a pipeline could use then. It is the circular version of the printed exchange of
  two devices, and the one that the published code runs.
- `kernighan_lin`: two groups exchange any two devices; the gain is the weight that is cut.

Source: Yuan et al., arXiv:2206.01288, section 3.4; the circular pass follows Kang and Moon, "A
hybrid genetic algorithm for multiway graph partitioning", GECCO 2000, as in DT-FM's code.
Departures: the paper does not state how many steps a pass has; here it ends when nothing is left to
move (`kernighan_lin`), or after one cycle per group or when each group has received a
device (`circular`, as in the code). A cycle may begin with either end of a fastest link, as
printed, not with the first one. The weight is eq. 3's term throughout; the code mixes in eq. 2's
for `kernighan_lin`, the paper does not. The first is compiled, so that comparisons at equal time
are fair to it.
"""

from typing import NamedTuple

import numpy as np

from polyrhythm.jit import Flags, Floats, Ints, compiled, inlined

_ROUNDING = 1e-12  # seconds: a gain below is none


class _Partition(NamedTuple):
    weights: Floats
    group_of: Ints
    sizes: Ints  # of groups
    reach: Floats  # [device, group]: the sum of the device's weights to all of the group
    free: Flags  # devices that have not moved in this pass
    ends: Ints  # [group, 2]: of the fastest link between free devices; -1 if there is none


def circular(group_of: Ints, weights: Floats, num_groups: int) -> None:
    """One pass of cycles of moves of ends of fastest links."""
    moved, origin = np.empty((2, len(group_of)), np.int64)
    got_one = np.zeros(num_groups, np.bool_)
    _circular(_partition(group_of, weights, num_groups), moved, origin, got_one)


def kernighan_lin(group_of: Ints, weights: Floats, num_groups: int) -> None:
    """One pass of exchanges of any two devices."""
    now = _partition(group_of, weights, num_groups)
    best, best_gain, gain = group_of.copy(), _ROUNDING, 0.0
    while True:
        to_group_of = now.reach[:, group_of]  # [a, b]: a's weights to all of b's group
        less = to_group_of - np.diag(to_group_of)[:, None]
        value = less + less.T - 2 * weights
        value[~now.free | ~now.free[:, None] | (group_of == group_of[:, None])] = -np.inf
        a, b = divmod(int(value.argmax()), len(group_of))
        if value[a, b] == -np.inf:
            break
        now.reach[:, group_of[a]] += weights[b] - weights[a]
        now.reach[:, group_of[b]] += weights[a] - weights[b]
        group_of[[a, b]] = group_of[[b, a]]
        now.free[[a, b]] = False
        gain += value[a, b]
        if gain > best_gain:
            best_gain = gain
            best[:] = group_of
    group_of[:] = best


def _partition(group_of: Ints, weights: Floats, num_groups: int) -> _Partition:
    member = np.eye(num_groups)[group_of]
    return _Partition(
        weights=weights,
        group_of=group_of,
        sizes=np.bincount(group_of, minlength=num_groups),
        reach=weights @ member,
        free=np.ones(len(group_of), np.bool_),
        ends=np.empty((num_groups, 2), np.int64),
    )


@compiled
def _circular(now: _Partition, moved: Ints, origin: Ints, got_one: Flags) -> None:
    num_groups = len(now.sizes)
    for _ in range(num_groups):
        start, highest, done = 0, -np.inf, True
        for group in range(num_groups):
            _find_fastest_link(now, group)
            value, _, _ = _best_move(now, group)
            if value > highest:
                start, highest = group, value
            done = done and got_one[group]
        if done:
            return
        at, num_moves, gain = start, 0, 0.0
        best_gain, num_kept, closing = _ROUNDING, 0, -1
        while True:
            for end in range(2):
                device = now.ends[at, end]
                if at != start and device >= 0 and gain + _gain(now, device, start) > best_gain:
                    best_gain = gain + _gain(now, device, start)
                    num_kept, closing = num_moves, device
            value, device, target = _best_move(now, at)
            if device < 0 or target == start:  # closing the cycle here is handled above
                break
            moved[num_moves], origin[num_moves] = device, at
            num_moves += 1
            gain += value
            _move(now, device, target)
            got_one[target] = True
            _find_fastest_link(now, target)
            at = target
        for i in range(num_moves - 1, num_kept - 1, -1):
            _move(now, moved[i], origin[i])
        if closing >= 0:
            _move(now, closing, start)
            got_one[start] = True


@inlined
def _best_move(now: _Partition, group: int) -> tuple[float, int, int]:
    """Return the largest gain of a move out of this group, its device and target; -1 if none."""
    best, best_device, best_target = -np.inf, -1, -1
    for end in range(2):
        device = now.ends[group, end]
        for target in range(len(now.sizes)):
            if device >= 0 and target != group:
                value = _gain(now, device, target)
                if value > best:
                    best, best_device, best_target = value, int(device), target
    return best, best_device, best_target


@inlined
def _gain(now: _Partition, device: int, target: int) -> float:
    """For an end of its group's fastest link: the mean weight to the target, less that link."""
    group = now.group_of[device]
    fastest = now.weights[now.ends[group, 0], now.ends[group, 1]]
    return float(now.reach[device, target] / now.sizes[target] - fastest)


@inlined
def _find_fastest_link(now: _Partition, group: int) -> None:
    now.ends[group, 0] = now.ends[group, 1] = -1
    fastest = np.inf
    for a in range(len(now.group_of)):
        if now.group_of[a] == group and now.free[a]:
            for b in range(a):
                if now.group_of[b] == group and now.free[b] and now.weights[a, b] < fastest:
                    fastest = now.weights[a, b]
                    now.ends[group, 0], now.ends[group, 1] = a, b


@inlined
def _move(now: _Partition, device: int, target: int) -> None:
    group = now.group_of[device]
    for other in range(len(now.group_of)):
        now.reach[other, group] -= now.weights[other, device]
        now.reach[other, target] += now.weights[other, device]
    now.sizes[group] -= 1
    now.sizes[target] += 1
    now.group_of[device] = target
    now.free[device] = False
