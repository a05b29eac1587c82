from __future__ import annotations

import random
import statistics

import pytest

from inferencex.formats.errors import OptionError
from inferencex.runtime.load_test.lengths import LogNormal, Normal, Uniform, parse_lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Uniform(128, 128)),
        ("uniform:64:256", Uniform(64, 256)),
        ("normal:128:32", Normal(128, 32)),
        ("lognormal:128:0.5", LogNormal(128, 0.5)),
    ],
)
def test_every_form_is_read(text: str, lengths: object) -> None:
    assert parse_lengths("--prompt-length", text) == lengths
    assert str(lengths) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-3", "1.5", "many", "uniform", "uniform:5", "uniform:9:3", "uniform:0:3", "uniform:1:2:3"),
        *(
            "normal:0:1",
            "normal:8:-1",
            "normal:nan:1",
            "lognormal:8:inf",
            "lognormal:x:1",
            "zipf:3:4",
            "1e9",
            "99999999",
        ),
    ],
)
def test_anything_else_is_refused_in_a_line_that_names_the_option(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--prompt-length .*expected N, uniform:LOW:HIGH") as refused:
        parse_lengths("--prompt-length", text)
    assert "\n" not in str(refused.value)


def test_draws_are_as_the_distribution_says() -> None:
    source = random.Random(1)
    uniform = [Uniform(3, 6).draw(source) for _ in range(500)]
    assert set(uniform) == {3, 4, 5, 6}
    normal = [Normal(100, 10).draw(source) for _ in range(2000)]
    assert statistics.mean(normal) == pytest.approx(100, abs=1) and statistics.stdev(normal) == pytest.approx(10, abs=1)
    lognormal = [LogNormal(100, 1.0).draw(source) for _ in range(2000)]
    assert statistics.median(lognormal) == pytest.approx(100, rel=0.1) and max(lognormal) > 800
    assert min(Normal(1, 50).draw(source) for _ in range(100)) == 1


def test_a_seed_repeats_the_draws() -> None:
    first, again = (
        [LogNormal(50, 1).draw(source) for _ in range(20)] for source in (random.Random(3), random.Random(3))
    )
    assert first == again
