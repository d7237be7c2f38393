"""Settings: precedence, reading of text, refusals, and the printed form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcps.config import CompressionConfig, RunConfig, WindowConfig
from hpcps.errors import ConfigError
from hpcps.settings import (
    Layer,
    document,
    file_layers,
    load_toml,
    names,
    nested_layer,
    parse_assignment,
    pending,
    resolve,
    set_pending,
    show,
)


def layer(source: str = "command line", **values: object) -> Layer:
    """A layer; a double underscore in a name stands for the dot."""
    return Layer(source=source, values={name.replace("__", "."): value for name, value in values.items()})


def value_of(config: RunConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_no_layers_give_the_defaults() -> None:
    resolved = resolve([])
    assert resolved.config == RunConfig()
    assert set(resolved.sources.values()) == {"default"}
    assert tuple(resolved.sources) == names()


def test_later_layers_win_setting_by_setting() -> None:
    resolved = resolve(
        [
            layer("script", seed=1, server_num=2, comm__mode="p2p", comm__num_slots=4),
            layer("file run.toml", seed=2, comm__mode="rma"),
            layer("command line", seed="3"),
        ]
    )
    expected = {
        "seed": (3, "command line"),
        "server_num": (2, "script"),
        "comm.mode": ("rma", "file run.toml"),
        "comm.num_slots": (4, "script"),
        "comm.publish_buffers": (3, "default"),
    }
    got = {name: (value_of(resolved.config, name), resolved.sources[name]) for name in expected}
    assert got == expected


GOOD = [
    ("heterogeneous", "on", True),
    ("heterogeneous", "TRUE", True),
    ("heterogeneous", "yes", True),
    ("heterogeneous", "off", False),
    ("heterogeneous", "false", False),
    ("heterogeneous", "no", False),
    ("heterogeneous", True, True),
    ("seed", "7", 7),
    ("seed", 7, 7),
    ("window.mad_k", "2.5", 2.5),
    ("window.mad_k", 2, 2.0),
    ("comm.shard_bytes", "4MiB", 4194304),
    ("comm.shard_bytes", "2 KiB", 2048),
    ("comm.shard_bytes", "4096", 4096),
    ("comm.shard_bytes", 4096, 4096),
    ("capacity.prior", "3:2:1:1", (3.0, 2.0, 1.0, 1.0)),
    ("capacity.prior", "3,2, 1,1", (3.0, 2.0, 1.0, 1.0)),
    ("capacity.prior", "3", (3.0,)),
    ("capacity.prior", "", ()),
    ("capacity.prior", [3, 2.5], (3.0, 2.5)),
    ("worker_endpoints", "a:1, b:2", ("a:1", "b:2")),
    ("worker_endpoints", ["a", "b"], ("a", "b")),
    ("worker_endpoints", "", ()),
    ("compression.rules", "embedding.*=fp16, *=auto", ("embedding.*=fp16", "*=auto")),
    ("compression.rules", [], ()),
    ("compression.auto_codecs", "none,int8", ("none", "int8")),
    ("compression.error_feedback", "off", False),
    ("log.dir", "", ""),
    ("log.dir", Path("runs/1"), "runs/1"),
]


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_values_are_read_by_the_type_of_their_setting(name: str, value: object, expected: object) -> None:
    got = value_of(resolve([Layer(source="script", values={name: value})]).config, name)
    assert got == expected
    assert type(got) is type(expected)


BAD = [
    ("heterogeneous", "maybe", "need on or off"),
    ("heterogeneous", 1, "need on or off"),
    ("seed", "two", "need a whole number"),
    ("seed", 2.0, "need a whole number"),
    ("seed", True, "need a whole number"),
    ("window.mad_k", "fast", "need a finite number"),
    ("window.mad_k", "nan", "need a finite number"),
    ("window.mad_k", True, "need a finite number"),
    ("comm.shard_bytes", "4 parsecs", "need a size in bytes"),
    ("comm.shard_bytes", 4.5, "need a size in bytes"),
    ("comm.mode", 3, "need text"),
    ("capacity.prior", "3::1", "need finite numbers"),
    ("capacity.prior", 3, "need finite numbers"),
    ("capacity.prior", ["inf"], "need finite numbers"),
    ("worker_endpoints", "a,,b", "need names separated by commas"),
    ("worker_endpoints", [1], "need names separated by commas"),
]


@pytest.mark.parametrize(("name", "value", "need"), BAD)
def test_a_wrong_type_is_refused(name: str, value: object, need: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([Layer(source="file run.toml", values={name: value})])
    text = str(caught.value)
    assert text.startswith(f"cannot accept {name} of the file run.toml: got {value!r}, {need}")
    assert f"write for example {name}=" in text


UNKNOWN = [
    ("sync_mod", "unknown, nearest is 'sync_mode' in the top level; write sync_mode"),
    ("comm.num_slot", "unknown, nearest is 'comm.num_slots' in section 'comm'; write comm.num_slots"),
    ("com.shard_bytes", "unknown, nearest is 'comm.shard_bytes' in section 'comm'; write comm.shard_bytes"),
    ("quorum_frac", "unknown, nearest is 'window.quorum_frac' in section 'window'; write window.quorum_frac"),
    ("quorum_fraction", "unknown, nearest is 'window.quorum_frac' in section 'window'; write window.quorum_frac"),
    ("comm.seed", "unknown, nearest is 'seed' in the top level; write seed"),
    ("log", "it is a section, need one setting; set one of log.dir, log.level, log.progress_s"),
    ("xyzzy", "unknown, and no name is near it; list all with hpcps run --show-config"),
]


@pytest.mark.parametrize(("name", "text"), UNKNOWN)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([Layer(source="script", values={name: 1})])
    assert str(caught.value) == f"cannot accept setting {name!r} of the script: {text}"


def test_a_value_out_of_range_names_its_source() -> None:
    layers = [layer("script", partition__min_share=5), layer("file run.toml", partition__max_share=3)]
    with pytest.raises(ConfigError) as caught:
        resolve(layers)
    assert str(caught.value) == (
        "cannot accept partition.max_share: got 3, need 0 or at least partition.min_share = 5; raise it"
        " (partition.min_share is set by the script, partition.max_share is set by the file run.toml)"
    )


COMPRESSION = [
    ({"rules": ("fp16",)}, "cannot accept compression.rules: got 'fp16', need PATTERN=CODEC; write for example *=fp16"),
    ({"rules": ("=fp16",)}, "cannot accept compression.rules: got '=fp16', need PATTERN=CODEC"),
    ({"rules": ("*=ftp16",)}, "cannot accept compression.rules: got codec 'ftp16', nearest is 'fp16'; write fp16"),
    ({"rules": ("*=topc:0.1",)}, "got codec 'topc:0.1', nearest is 'topk'; write topk:0.1"),
    ({"rules": ("*=atuo",)}, "got codec 'atuo', nearest is 'auto'; write auto"),
    ({"rules": ("*=zzz",)}, "cannot accept compression.rules: cannot read codec 'zzz': need one of none, fp32"),
    ({"rules": ("*=fp16:2",)}, "cannot accept compression.rules: cannot use codec fp16 with part 2"),
    ({"rules": ("*=topk:2",)}, "cannot accept compression.rules: cannot use codec topk with part 2"),
    ({"auto_codecs": ("fp16",)}, "cannot accept compression.auto_codecs: got ('fp16',), need none among them"),
    ({"auto_codecs": ("none", "auto")}, "cannot accept compression.auto_codecs: cannot read codec 'auto'"),
    ({"auto_codecs": ("none", "topk", "topk:0.01")}, "need each codec once; leave one out"),
    ({"min_gain_frac": 1.0}, "cannot accept compression.min_gain_frac: got 1.0, need 0 to below 1"),
    ({"switch_gain_frac": -0.1}, "cannot accept compression.switch_gain_frac: got -0.1, need 0 to below 1"),
    ({"max_error": -1.0}, "cannot accept compression.max_error: got -1.0, need 0 or more"),
    ({"hold_steps": 0}, "cannot accept compression.hold_steps: got 0, need at least 1"),
]


@pytest.mark.parametrize(("values", "text"), COMPRESSION)
def test_wrong_compression_is_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompressionConfig(**values)
    assert text in str(caught.value)


def test_rules_of_compression_are_read_into_one_spelling() -> None:
    config = CompressionConfig(rules=("a=b.*= TopK", "*=AUTO"))
    assert config.parsed_rules() == (("a=b.*", "topk:0.01"), ("*", "auto"))


def test_sections_may_be_mappings_or_config_values() -> None:
    made = nested_layer("script", {"seed": 4, "comm": {"mode": "rma"}, "window": WindowConfig(mad_k=2.0)})
    config = resolve([made]).config
    assert (config.seed, config.comm.mode, config.window) == (4, "rma", WindowConfig(mad_k=2.0))


def test_toml_tables_are_sections(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'seed = 5\nheterogeneous = true\n[comm]\nshard_bytes = "1MiB"\n[emulate]\nspeeds = [3, 2, 1]\n'
        '[compression]\nrules = ["[abc]*=fp16", "*=auto"]\n'
    )
    resolved = resolve([load_toml(path)])
    assert (resolved.config.seed, resolved.config.heterogeneous) == (5, True)
    assert resolved.config.comm.shard_bytes == 1048576
    assert resolved.config.emulate.speeds == (3.0, 2.0, 1.0)
    assert resolved.config.compression.rules == ("[abc]*=fp16", "*=auto")
    assert resolved.sources["comm.shard_bytes"] == f"file {path}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file or directory; correct its path"),
        (b"seed = = 2", "need TOML, correct it"),
        (b"log.dir = '\xff'", "need TOML, correct it"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(caught.value).startswith(f"cannot read settings file '{path}': ")
    assert str(caught.value).endswith(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("comm.mode=rma", ("comm.mode", "rma")),
        ("server-num = 2", ("server_num", "2")),
        ("log.dir=a=b", ("log.dir", "a=b")),
        ("capacity.prior=", ("capacity.prior", "")),
    ],
)
def test_assignments_split_at_the_first_equals_sign(text: str, expected: tuple[str, str]) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["comm.mode", "=rma", " = 3", ""])
def test_an_assignment_needs_a_name_and_an_equals_sign(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot read assignment .*: need name=value; write for example"):
        parse_assignment(text)


def test_every_setting_has_a_line_of_documentation() -> None:
    assert [name for name in names() if not document(name)] == []
    assert document("comm.num_slots") == "push slots of each worker on each server, at least 2"


def test_show_prints_value_and_source_of_each_setting() -> None:
    resolved = resolve([layer(comm__shard_bytes="1MiB", emulate__speeds="2:1", heterogeneous="on", log__dir='a"b')])
    lines = dict(line.split(" = ", 1) for line in show(resolved).splitlines())
    assert tuple(lines) == names()
    parts = {name: tuple(part.strip() for part in text.split("  # ")) for name, text in lines.items()}
    assert parts["comm.shard_bytes"] == ("1048576", "command line")
    assert parts["emulate.speeds"] == ("[2.0, 1.0]", "command line")
    assert parts["heterogeneous"] == ("true", "command line")
    assert parts["log.dir"] == ('"a\\"b"', "command line")
    assert parts["comm.mode"] == ('"auto"', "default")


@given(
    seed=st.integers(0, 2**62),
    speeds=st.lists(st.floats(1e-300, 1e300), max_size=4),
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    rate=st.floats(1e-12, 1e12),
    heterogeneous=st.booleans(),
)
def test_what_show_prints_is_toml_that_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    speeds: list[float],
    text: str,
    rate: float,
    heterogeneous: bool,
) -> None:
    values = {"seed": seed, "emulate.speeds": speeds, "log.dir": text, "staleness.rate": rate}
    resolved = resolve([Layer(source="file\nx", values={**values, "heterogeneous": heterogeneous})])
    path = tmp_path_factory.getbasetemp() / "shown.toml"
    path.write_text(show(resolved), encoding="utf-8")
    assert resolve([load_toml(path)]).config == resolved.config
    assert replace(resolved.config, seed=0) != resolved.config or seed == 0


def test_a_given_file_comes_before_that_of_the_environment(tmp_path: Path) -> None:
    for name, seed in (("a.toml", 1), ("b.toml", 2)):
        (tmp_path / name).write_text(f"seed = {seed}\n")
    environ = {"HPCPS_CONFIG": str(tmp_path / "b.toml")}
    chosen = [file_layers(str(tmp_path / "a.toml"), environ), file_layers(None, environ), file_layers(None, {})]
    assert [[dict(found.values) for found in layers] for layers in chosen] == [[{"seed": 1}], [{"seed": 2}], []]


def test_pending_layers_replace_the_file_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text("seed = 9\n")
    monkeypatch.setenv("HPCPS_CONFIG", str(tmp_path / "run.toml"))
    try:
        assert [dict(found.values) for found in pending()] == [{"seed": 9}]
        set_pending([layer(seed="1")])
        assert pending() == (layer(seed="1"),)
        set_pending([])
        assert pending() == ()
    finally:
        set_pending(None)
