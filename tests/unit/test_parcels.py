"""Parcels between servers: what was packed comes out, and damage is an error that says so, never another array."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from hpcps.errors import ProtocolError
from hpcps.protocol.key_state import KeyState
from hpcps.runtime.parcels import Kind, ShardParcel, pack_frame, pack_shard, unpack_head, unpack_shard
from hpcps.runtime.shard_store import ShardArrays

STATE = KeyState(
    version=3,
    generation=0,
    num_groups=2,
    since_clock=1,
    settled=[[0, 3]],
    window=[[1, 1]],
    weight=2.0,
    decayed=1.0,
    share_frac=0.5,
    window_age_s=0.125,
    missed=[0],
    missed_age_s=0.5,
)
ARRAYS: dict[str, np.ndarray] = {
    "values": np.arange(5, dtype=np.float32),
    "sum": np.array([1, np.nan, np.inf, -0.0, 1e-40], np.float32),
    "rule/0/step": np.array(7.0, np.float32),
    "rule/0/exp_avg": np.linspace(0, 1, 17),
    "rule/1/count": np.array([1 << 40], np.int64),
    "rule/1/flag": np.array([True, False]),
    "rule/1/empty": np.zeros(0),
}


def parcel_of(arrays: dict[str, np.ndarray], **fields: Any) -> ShardParcel:
    given = ShardArrays(arrays=arrays, presence=[1, 0], options=[0.1, 1e-300], options_clock=4, window_bytes=80)
    made = ShardParcel(key=2, epoch=7, room=1, began_s=0.25, state=STATE, given=given)
    return dataclasses.replace(made, **fields)


def test_a_shard_comes_out_as_it_went_in() -> None:
    sent = parcel_of(ARRAYS)
    head, body = pack_shard(sent)
    kind, rest = unpack_head(head)
    assert kind is Kind.SHARD
    got = unpack_shard(rest, body)
    assert list(got.given.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (got.given.arrays[name].dtype, got.given.arrays[name].shape) == (array.dtype, array.shape)
        assert got.given.arrays[name].tobytes() == array.tobytes(), name
    bare = dataclasses.replace(sent.given, arrays={})
    assert dataclasses.replace(got, given=dataclasses.replace(got.given, arrays={})) == dataclasses.replace(
        sent, given=bare
    )


def test_parts_of_arrays_travel_too() -> None:
    """What a rule gives may be a piece of a larger array, or one that is not contiguous."""
    whole = np.arange(24.0).reshape(4, 6)
    head, body = pack_shard(parcel_of({"values": whole[:, 1], "sum": whole[1]}))
    got = unpack_shard(head[1:], body).given.arrays
    assert got["values"].tolist() == [1.0, 7.0, 13.0, 19.0]
    assert got["sum"].tolist() == whole[1].tolist()


def test_a_frame_keeps_its_head() -> None:
    assert unpack_head(pack_frame(b"head")) == (Kind.FRAME, b"head")


@pytest.mark.parametrize("head", [b"", b"\0", b"\3{}"])
def test_an_unknown_kind_is_refused(head: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read a parcel"):
        unpack_head(head)


def test_an_array_that_does_not_travel_is_refused() -> None:
    with pytest.raises(ProtocolError, match="cannot send 'values' to another server: its dtype is complex128"):
        pack_shard(parcel_of({"values": np.zeros(2, np.complex128)}))


# field of the head, or of the state; its value; the message
DAMAGE: list[tuple[str, Any, str]] = [
    ("key", -1, "out of range"),
    ("epoch", -1, "out of range"),
    ("room", -1, "out of range"),
    ("window_bytes", -1, "out of range"),
    ("options_clock", -2, "out of range"),
    ("began_s", float("nan"), "out of range"),
    ("options", [0.1, float("inf")], "out of range"),
    ("names", ["values"], "1 names, 7 dtypes and 7 shapes"),
    ("names", ["values"] * 7, "7 names, 7 dtypes"),
    ("dtypes", ["object"] * 7, "array 'values' of object"),
    ("dtypes", ["float32", "float32", "float32", "float32", "int64", "bool", "float64"], "704 bytes of arrays|need"),
    ("shapes", [[5], [5], [], [17], [1], [2], [-1]], "array 'rule/1/empty' of float64"),
    ("shapes", [[5], [5], [], [17], [1], [2], [1 << 60]], "ends at byte"),
    ("shapes", [[5, 1 << 40], [5], [], [17], [1], [2], [0]], "array 'values' ends at byte"),
    ("version", -5, "its state has version -5"),
    ("settled", 3, "field settled is 3"),
    ("presence", ["1"], "field presence"),
]


@pytest.mark.parametrize(("field", "value", "message"), DAMAGE)
def test_damage_is_refused(field: str, value: Any, message: str) -> None:
    head, body = pack_shard(parcel_of(ARRAYS))
    first, second = json.loads(head[1:])
    target = first if field in first else second
    assert field in target
    target[field] = value
    with pytest.raises(ProtocolError, match=message):
        unpack_shard(json.dumps([first, second]).encode(), body)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"[1, 2]", b"\xff\xfe", b"[" * 100_000])
def test_a_head_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read a parcel"):
        unpack_shard(text, np.zeros(64, np.uint8))


@pytest.mark.parametrize("change", [-64, -1, 1, 64])
def test_a_body_of_another_length_is_refused(change: int) -> None:
    head, body = pack_shard(parcel_of(ARRAYS))
    other = np.resize(body, body.size + change)
    with pytest.raises(ProtocolError, match="cannot read a parcel"):
        unpack_shard(head[1:], other)


def test_any_changed_byte_of_a_head_is_an_error_or_a_parcel() -> None:
    head, body = pack_shard(parcel_of(ARRAYS))
    rng = random.Random(1)
    refused = 0
    for _ in range(2000):
        text = bytearray(head[1:])
        text[rng.randrange(len(text))] = rng.randrange(256)
        try:
            unpack_shard(bytes(text), body)
        except ProtocolError:
            refused += 1
    assert refused > 1000
