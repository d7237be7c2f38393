"""Control messages: each comes back as it was; whatever else arrives is a ProtocolError and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcps.errors import ProtocolError
from hpcps.protocol.control import (
    BarrierEnter,
    BarrierLeave,
    ControlMessage,
    DecodeCosts,
    Done,
    EndOfData,
    JoinGroup,
    LoaderOpen,
    Order,
    OrderRequest,
    Register,
    RegisterReply,
    decode_control,
    encode_control,
)

MESSAGES: list[ControlMessage] = [
    Register(rank=1, digest="ab-cd", route="{}", tensors="[]", rule='"ü\\"'),
    RegisterReply(refusal=""),
    JoinGroup(rank=1, generation=2, group=3),
    LoaderOpen(rank=1, loader=0, num_samples=10, global_batch=4, trains=True),
    OrderRequest(
        rank=1,
        loader=0,
        epoch=2,
        index=3,
        num_epochs=4,
        timed=[4.0, 0.5],
        logged=["loss"],
        sums=[1.5],
        weights=[4.0],
        staleness=1,
    ),
    Order(
        loader=0,
        epoch=1,
        index=2,
        end=False,
        start=3,
        count=4,
        group_count=5,
        num_idle=0,
        share_frac=0.5,
        generation=1,
        groups=[[1, 2], [3]],
    ),
    EndOfData(generation=0, group=0, clock=7),
    BarrierEnter(rank=2, index=1),
    BarrierLeave(index=1),
    Done(rank=3),
    DecodeCosts(server=1, codecs=[2, 4], elem_s=[1e-9, 5e-10]),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: ControlMessage) -> None:
    assert decode_control(encode_control(message)) == message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"3",
        b'"Done"',
        b'["Done"]',
        b'["Done",{"rank":1},2]',
        b'["Nobody",{}]',
        b'[["Done"],{"rank":1}]',
        b'["Done",{}]',
        b'["Done",{"rank":1,"more":2}]',
        b'["Done",{"rank":true}]',
        b'["Done",{"rank":1.0}]',
        b'["Done",{"rank":"1"}]',
        b'["Done",["rank"]]',
        b'["RegisterReply",{"refusal":null}]',
        b"[" * 100_000,
        b'["Done",{"rank":' + b"1" * 5000 + b"}]",
    ],
)
def test_other_text_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot read a control message of .* bytes"):
        decode_control(text)


@pytest.mark.parametrize("groups", [[1, 2], [["a"]], [[1.5]], "ab", {"a": [1]}, [[True]]])
def test_nested_lists_are_checked(groups: object) -> None:
    name, fields = json.loads(encode_control(MESSAGES[5]))
    with pytest.raises(ProtocolError, match="field groups is"):
        decode_control(json.dumps([name, {**fields, "groups": groups}]).encode())


@settings(deadline=None, max_examples=300, derandomize=True)
@given(data=st.binary(max_size=60))
def test_random_bytes_give_only_protocol_errors(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_control(data)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(message=st.sampled_from(MESSAGES), data=st.data())
def test_one_changed_field_is_fine_or_a_protocol_error(message: ControlMessage, data: st.DataObject) -> None:
    name, fields = json.loads(encode_control(message))
    field = data.draw(st.sampled_from(sorted(fields)))
    text = json.dumps([name, {**fields, field: data.draw(json_values)}]).encode()
    try:
        decoded = decode_control(text)
    except ProtocolError:
        return
    assert type(decoded) is type(message)
