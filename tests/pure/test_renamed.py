"""Old names are refused with their new names, and nothing else changes."""

import inspect

import pytest

from polyrhythm.renamed import RenamedAttribute, renamed_arguments


class Thing:
    old = RenamedAttribute("new()")

    @renamed_arguments(count="n_items=", where="place=Place(...)")
    def __init__(self, n_items: int, *, place: str = "") -> None:
        self.n_items, self.place = n_items, place

    def new(self) -> int:
        return self.n_items


def test_new_names_work_and_the_signature_stays():
    thing = Thing(3, place="here")
    assert (thing.new(), thing.place) == (3, "here")
    assert list(inspect.signature(Thing).parameters) == ["n_items", "place"]


@pytest.mark.parametrize(("old", "new"), [("count", "n_items="), ("where", "place=Place(...)")])
def test_old_argument_names_the_new_one(old, new):
    with pytest.raises(TypeError, match=f"{old}= is now ") as caught:
        Thing(**{old: 1})
    assert new in str(caught.value)


def test_old_attribute_names_the_new_one():
    with pytest.raises(AttributeError, match=r"Thing.old is now new\(\)"):
        _ = Thing(1).old
    assert not hasattr(Thing(1), "old")


def test_unknown_argument_is_still_a_type_error():
    with pytest.raises(TypeError, match="unexpected keyword"):
        Thing(1, other=2)
