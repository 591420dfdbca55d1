"""The file reader: errors name the location of a mistake and a fix."""

import json
import re
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.read import read
from polyrhythm.describe.scenario import Scenario
from polyrhythm.errors import DescriptionError
from polyrhythm.types import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    source: str = field(metadata={"key": "from"})
    bandwidth: BytesPerSecond
    spare: bool = False

    def __post_init__(self) -> None:
        if self.source == "nowhere":
            raise DescriptionError("from nowhere", expected="a place", fix="name one")


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    name: str
    wires: tuple[Wire, ...] = ()
    latency: tuple[tuple[Seconds, ...], ...] = ()
    memory: Bytes | None = None
    load_bytes: Bytes = 0
    rooms: int = 1
    share: float = 0.5
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Street:
    house: House


def house(tmp_path: Path, text: str, name: str = "house.toml") -> House:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return read(tmp_path / name, House)


def refusal(tmp_path: Path, text: str, name: str = "house.toml") -> DescriptionError:
    with pytest.raises(DescriptionError) as caught:
        house(tmp_path, text, name)
    assert caught.value.wrong.startswith(f"{tmp_path / name}: ")
    return caught.value.__class__(
        caught.value.wrong.removeprefix(f"{tmp_path / name}: "),
        expected=caught.value.expected,
        fix=caught.value.fix,
    )


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ('memory = "24GiB"', "memory", 24 * 2**30),
        ("memory_gib = 24", "memory", 24 * 2**30),
        ("memory_bytes = 5", "memory", 5),
        ("load_bytes = 5", "load_bytes", 5),
        ('load_bytes = "5MiB"', "load_bytes", 5 * 2**20),
        ("load_mib = 5", "load_bytes", 5 * 2**20),
        ("latency_ms = [[5, 9], [0.5, 0]]", "latency", ((0.005, 0.009), (0.0005, 0.0))),
        ('latency = [["5ms", "9ms"]]', "latency", ((0.005, 0.009),)),
        ("share = 1", "share", 1.0),
        ('tags = ["a", "b"]', "tags", ("a", "b")),
    ],
)
def test_value_is_read_with_its_unit_from_value_or_key(tmp_path, line, name, value):
    assert getattr(house(tmp_path, f'name = "h"\n{line}'), name) == value


def test_renamed_key_and_list_of_tables_are_read(tmp_path):
    text = 'name = "h"\n[[wires]]\nfrom = "x"\nbandwidth_mbps = 8\n'
    assert house(tmp_path, text).wires == (Wire(source="x", bandwidth=1e6),)
    with pytest.raises(DescriptionError, match="unknown key 'source'"):
        house(tmp_path, text.replace("from", "source"))


def test_table_inside_a_table_follows_the_same_rules(tmp_path):
    path = tmp_path / "street.toml"
    path.write_text('[house]\nname = "h"\nmemory_gib = 1\n')
    assert read(path, Street) == Street(house=House(name="h", memory=2**30))
    path.write_text('[house]\nname = "h"\nmemory_gig = 1\n')
    with pytest.raises(DescriptionError, match="house: unknown key 'memory_gig'"):
        read(path, Street)


def test_null_omits_an_optional_value(tmp_path):
    assert house(tmp_path, '{"name": "h", "memory_gib": null}', "house.json") == House(name="h")


def test_json_and_toml_of_the_same_tables_are_the_same(tmp_path):
    toml = 'name = "h"\nmemory_gib = 1.5\n[[wires]]\nfrom = "x"\nbandwidth = "1GB/s"\n'
    tables = tomllib.loads(toml)
    assert house(tmp_path, toml) == house(tmp_path, json.dumps(tables), "house.json")


MEMORY = 'write memory = "24GiB" or memory_gib = 24'
LATENCY = 'write latency = "34ms" or latency_ms = 34'


@pytest.mark.parametrize(
    ("text", "wrong", "fix"),
    [
        ("nmae = 'h'", "unknown key 'nmae'", "did you mean 'name'?"),
        (
            "name = 'h'\nlatency_msec = []",
            "unknown key 'latency_msec'",
            "did you mean 'latency_ms'?",
        ),
        ("name = 'h'\nqqq = 1", "unknown key 'qqq'", "correct or remove 'qqq'"),
        ("rooms = 2", "the key 'name' is missing", "add name"),
        (
            "name = 'h'\n[[wires]]\nfrom = 'x'",
            "wires[0]: the key 'bandwidth' is missing",
            'add bandwidth = "100Mbit/s" or bandwidth_mbps = 100',
        ),
        (
            "name = 'h'\n[[wires]]\nbandwidth_mbps = 1",
            "wires[0]: the key 'from' is missing",
            "add from",
        ),
        (
            "name = 'h'\nmemory = 24",
            "memory: 24 has no unit",
            MEMORY,
        ),
        (
            "name = 'h'\nlatency = [['1ms', 0]]",
            "latency[0][1]: 0 has no unit",
            LATENCY,
        ),
        (
            "name = 'h'\nmemory = '1GiB'\nmemory_gib = 1",
            "memory is given twice, as memory and as memory_gib",
            "remove memory_gib",
        ),
        (
            "name = 'h'\nmemory = '24 Gigs'",
            "memory: '24 Gigs' is not a size",
            'write it like "24GiB"',
        ),
        ("name = 'h'\nmemory_gib = '24GiB'", "memory_gib: got a text", MEMORY),
        ("name = 'h'\nlatency_ms = [[1, 'x']]", "latency_ms[0][1]: got a text", LATENCY),
        ("name = 'h'\nlatency_ms = 3", "latency_ms: got a number", "write a list there"),
        ("name = 'h'\nmemory = true", "memory: got true or false", MEMORY),
        ("name = 'h'\nmemory = [1]", "memory[0]: 1 has no unit", MEMORY),
        ("name = 'h'\nmemory_gib = [1]", "memory_gib: got a list", MEMORY),
        ("name = 'h'\nrooms = 2.0", "rooms: got a number", "write a whole number there"),
        ("name = 'h'\nshare = '0.5'", "share: got a text", "write a number there"),
        ("name = 'h'\nshare = 12:30:00", "share: got time", "write a number there"),
        ("name = 3", "name: got a whole number", "write a text there"),
        ("name = 'h'\ntags = ['a', 1]", "tags[1]: got a whole number", "write a text there"),
        ("name = 'h'\nwires = 3", "wires: got a whole number", "write a list of tables there"),
        ("name = 'h'\nwires = [3]", "wires[0]: got a whole number", "write a table there"),
        ("name = 'h'\nshare = nan", "share: nan", "correct share"),
        (
            "name = 'h'\nlatency_ms = [[inf]]",
            "latency_ms[0][0]: inf",
            "correct latency_ms",
        ),
        (
            "name = 'h'\nmemory_gib = 1" + "0" * 400,
            "memory_gib: 1.000e+400 is out of range",
            'write it like "24GiB"',
        ),
        (
            "name = 'h'\n[[wires]]\nfrom = 'x'\nbandwidth_mbps = 1\n"
            "[[wires]]\nfrom = 'nowhere'\nbandwidth_mbps = 1",
            "wires[1]: from nowhere",
            "name one",
        ),
    ],
)
def test_mistake_is_refused_with_its_location_and_a_fix(tmp_path, text, wrong, fix):
    error = refusal(tmp_path, text)
    assert (error.wrong, error.fix) == (wrong, fix)


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("a.toml", "name = 'h'\nrooms = = 2", "syntax error: .*line 2"),
        ("a.toml", "name = 'h'\nrooms =", "syntax error: .*line 2, the end of the file"),
        ("a.json", '{"name": "h",\n "rooms" 2}', "syntax error: .*line 2"),
        ("a.json", '{"name": "h", "name": "i"}', "syntax error: .*'name' appears twice"),
        ("a.json", "[" * 100_000, "syntax error"),
        ("a.json", "[1]", "got a list"),
        ("a.json", '{"name": "h", "wires": null}', "wires: got null"),
        ("a.json", '{"name": null}', "name: got null"),
        ("a.json", '{"name": "h", "share": NaN}', "share: nan"),
        ("a.yaml", "name: h", "unknown file type '.yaml'"),
        ("a", "name: h", "unknown file type ''"),
    ],
)
def test_file_that_is_not_a_description_is_refused(tmp_path, name, text, wrong):
    assert re.match(wrong, refusal(tmp_path, text, name).wrong)


def test_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    for path, wrong in {
        tmp_path / "none.toml": "No such file",
        tmp_path / "folder.toml": "Is a directory",
        tmp_path: "Is a directory",
        tmp_path / "latin.toml": "byte 8 is not UTF-8",
    }.items():
        with pytest.raises(DescriptionError, match=wrong) as caught:
            read(path, House)
        assert str(path) in caught.value.wrong


def test_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbfname = 'h'")
    assert read(tmp_path / "bom.toml", House).name == "h"


MANUAL = (Path(__file__).parents[2] / "docs" / "describe.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```toml (\w+)\n(.*?)```", MANUAL, re.DOTALL)
LOADERS: dict[str, Any] = {"cluster": Cluster, "model": ModelProfile, "scenario": Scenario}


@pytest.mark.parametrize(("kind", "text"), EXAMPLES)
def test_example_of_the_manual_loads(tmp_path, kind, text):
    path = tmp_path / "example.toml"
    path.write_text(text, encoding="utf-8")
    assert LOADERS[kind].load(path).name


def test_scenario_of_the_manual_fits_its_cluster(tmp_path):
    loaded = []
    for kind in ("cluster", "scenario"):
        path = tmp_path / f"{kind}.toml"
        path.write_text(next(text for k, text in EXAMPLES if k == kind), encoding="utf-8")
        loaded.append(LOADERS[kind].load(path))
    cluster, scenario = loaded
    scenario.check(cluster)


def test_error_in_the_manual_is_the_real_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [(text, shown)] = re.findall(
        r"```toml cluster refused\n(.*?)```.*?```text\n(.*?)\n```", MANUAL, re.DOTALL
    )
    Path("cluster.toml").write_text(text, encoding="utf-8")
    with pytest.raises(DescriptionError) as caught:
        Cluster.load("cluster.toml")
    assert str(caught.value) == shown


def tables_of(value: Any) -> list[dict[str, Any]]:
    """Yield every table in a file, the outermost first."""
    if isinstance(value, list):
        return [table for item in value for table in tables_of(item)]
    if isinstance(value, dict):
        return [value, *(table for item in value.values() for table in tables_of(item))]
    return []


@settings(deadline=None)  # a file per example: slow on a busy machine
@given(st.data())
def test_misspelt_key_is_always_refused_by_name(data):
    kind, text = data.draw(st.sampled_from(EXAMPLES))
    file = tomllib.loads(text)
    table = data.draw(st.sampled_from(tables_of(file)))
    key = data.draw(st.sampled_from(sorted(table)))
    at = data.draw(st.integers(0, len(key)))
    misspelt = key[:at] + data.draw(st.sampled_from("qxz")) + key[at:]
    table[misspelt] = table.pop(key)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        path.write_text(json.dumps(file))
        with pytest.raises(DescriptionError) as caught:
            LOADERS[kind].load(path)
    assert f"unknown key {misspelt!r}" in caught.value.wrong
    assert caught.value.fix.startswith("did you mean ")
