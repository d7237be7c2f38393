"""Headers and frames: what fits comes back as it was, what does not is refused before it is used."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from hpcps.errors import ProtocolError
from hpcps.plan import Codec
from hpcps.protocol.messages import HEADER_BYTES, MAGIC, PROTOCOL_VERSION, FrameShape, Kind, PushHeader

HEADER = PushHeader(
    kind=Kind.GRADIENT,
    codec=Codec.NONE,
    key=3,
    route_epoch=1,
    generation=2,
    group=4,
    num_groups=5,
    sender=6,
    clock=70,
    since_clock=8,
    base_version=68,
    weight=12.5,
    share_frac=0.25,
    numel=100,
    meta_bytes=41,
    payload_bytes=400,
    checksum=-123456789012345,
)


def test_a_header_comes_back_as_it_was() -> None:
    data = HEADER.pack()
    assert len(data) == HEADER_BYTES
    assert data[:4] == b"1SPH"
    assert PushHeader.unpack(data) == HEADER
    first = dataclasses.replace(HEADER, kind=Kind.INIT, clock=0, since_clock=1, weight=0.0)
    assert PushHeader.unpack(first.pack()) == first


@pytest.mark.parametrize("length", [0, 1, 40, 95])
def test_a_cut_header_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"cannot read a push header: got {length} bytes, need "):
        PushHeader.unpack(HEADER.pack()[:length])


@pytest.mark.parametrize(
    ("at", "code", "value", "match"),
    [
        (0, "<I", MAGIC + 1, "got magic 0x48505332 version 2, need 0x48505331 version 2"),
        (4, "<H", PROTOCOL_VERSION + 1, "got magic 0x48505331 version 3"),
        (6, "<B", 9, "9 is not a valid Kind"),
        (7, "<B", 9, "9 is not a valid Codec"),
    ],
)
def test_magic_version_kind_and_codec_are_checked(at: int, code: str, value: int, match: str) -> None:
    data = bytearray(HEADER.pack())
    struct.pack_into(code, data, at, value)
    with pytest.raises(ProtocolError, match=match):
        PushHeader.unpack(bytes(data))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", -1),
        ("generation", -1),
        ("group", -1),
        ("group", 5),
        ("num_groups", 0),
        ("sender", -2),
        ("clock", -1),
        ("clock", 0),
        ("clock", 7),
        ("since_clock", 0),
        ("since_clock", 71),
        ("weight", -0.5),
        ("weight", float("nan")),
        ("weight", float("inf")),
        ("share_frac", -0.1),
        ("share_frac", 1.1),
        ("share_frac", float("nan")),
        ("numel", -1),
        ("meta_bytes", -1),
        ("payload_bytes", -1),
    ],
)
def test_fields_out_of_range_are_refused(field: str, value: float) -> None:
    data = dataclasses.replace(HEADER, **{field: value}).pack()
    with pytest.raises(ProtocolError, match="cannot accept a push header: .* has a field out of range") as caught:
        PushHeader.unpack(data)
    assert caught.value.op == "push"


# options, pieces, payload bytes; meta bytes, payload offset
SHAPES = [(0, 0, 0, 0, 128), (0, 1, 1, 1, 192), (7, 8, 64, 64, 192), (8, 1, 65, 65, 256)]


@pytest.mark.parametrize(("options", "pieces", "payload", "meta", "offset"), SHAPES)
def test_frame_sizes(options: int, pieces: int, payload: int, meta: int, offset: int) -> None:
    shape = FrameShape(num_options=options, num_pieces=pieces, payload_bytes=payload)
    assert (shape.meta_bytes, shape.payload_offset) == (meta, offset)
    values, presence = tuple(float(n) for n in range(options)), bytes(n % 2 for n in range(pieces))
    packed = shape.pack_meta(values, presence)
    assert len(packed) == offset - HEADER_BYTES
    assert shape.unpack_meta(packed) == (values, presence)


def test_metas_that_do_not_fit_are_refused() -> None:
    shape = FrameShape(num_options=2, num_pieces=1, payload_bytes=4)
    with pytest.raises(ProtocolError, match="got 1 options and 1 presence bytes, need 2 and 1"):
        shape.pack_meta((1.0,), b"\1")
    with pytest.raises(ProtocolError, match="got 2 options and 2 presence bytes, need 2 and 1"):
        shape.pack_meta((1.0, 2.0), b"\1\1")
    with pytest.raises(ProtocolError, match="cannot read a frame: got 16 bytes of options, need 17"):
        shape.unpack_meta(bytes(16))
