"""One implementation is chosen, the fastest that can run; a named one is never replaced."""

import pytest

from kvjax.dispatch import Implementation, select
from kvjax.errors import UnsupportedError


def fast(x): ...


def slow(x): ...


IMPLEMENTATIONS = {
    "fast": Implementation(fast, lambda x: None if x % 2 == 0 else f"{x} is odd"),
    "slow": Implementation(slow, lambda x: None if x < 10 else f"{x} is not below 10"),
}


@pytest.mark.parametrize(
    "name, x, chosen", [(None, 2, fast), (None, 12, fast), (None, 3, slow), ("slow", 2, slow)]
)
def test_the_fastest_that_can_run_or_the_named_one(name, x, chosen):
    assert select("double", IMPLEMENTATIONS, name, x) is chosen


def test_a_named_one_is_never_replaced():
    with pytest.raises(UnsupportedError, match=r"^double cannot run; fast: 3 is odd$"):
        select("double", IMPLEMENTATIONS, "fast", 3)


def test_every_reason_reaches_the_user():
    expected = r"^double cannot run; fast: 13 is odd; slow: 13 is not below 10$"
    with pytest.raises(UnsupportedError, match=expected):
        select("double", IMPLEMENTATIONS, None, 13)


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match="double has no implementation 'best'; it has fast, slow"):
        select("double", IMPLEMENTATIONS, "best", 2)


def test_why_not_sees_keywords_too():
    only = {"only": Implementation(fast, lambda x, *, wide: "too wide" if wide else None)}
    assert select("double", only, None, 1, wide=False) is fast
    with pytest.raises(UnsupportedError, match="only: too wide"):
        select("double", only, None, 1, wide=True)
