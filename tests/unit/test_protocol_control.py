"""Control messages: each comes back as it was; whatever else arrives is a ProtocolError and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math

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
    GuardLevel,
    JoinGroup,
    LoaderOpen,
    Move,
    Order,
    OrderRequest,
    Register,
    RegisterReply,
)
from hpcps.protocol.control_json import check_sender, decode_control, encode_control

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


# message, what is changed, what is said
OUT_OF_RANGE = [
    (MESSAGES[2], {"group": -1}, "field group is -1, need finite numbers of 0 or more"),
    (MESSAGES[4], {"index": -1}, "field index is -1"),
    (MESSAGES[4], {"timed": [4.0, math.nan]}, "field timed is"),
    (MESSAGES[4], {"timed": [4.0, math.inf]}, "field timed is"),
    (MESSAGES[4], {"timed": [4.0]}, "field timed has an odd length"),
    (MESSAGES[4], {"link_s": [-0.5]}, "field link_s is"),
    (MESSAGES[4], {"num_samples": -3}, "field num_samples is -3"),
    (MESSAGES[4], {"sums": []}, "fields logged, sums, weights differ in length"),
    (MESSAGES[5], {"groups": [[1, -2]]}, "field groups is"),
    (MESSAGES[6], {"clock": -1}, "field clock is -1"),
    (MESSAGES[10], {"elem_s": [1e-9]}, "fields codecs, elem_s differ in length"),
    (MESSAGES[7], {"index": 10**400}, "field index is 1000"),
    (MESSAGES[10], {"elem_s": [10**400, 1e-9]}, "field elem_s is"),
    (MESSAGES[5], {"cost_weights": [math.nan]}, "field cost_weights or agreement is not finite"),
    (MESSAGES[5], {"cost_weights": [10**400]}, "too large to convert to float"),
]


@pytest.mark.parametrize(("message", "change", "said"), OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused(message: ControlMessage, change: dict[str, object], said: str) -> None:
    name, fields = json.loads(encode_control(message))
    with pytest.raises(ProtocolError, match=said):
        decode_control(json.dumps([name, {**fields, **change}]).encode())


def test_a_script_may_log_any_number() -> None:
    message = dataclasses.replace(MESSAGES[4], sums=[-math.inf])  # type: ignore[type-var]
    assert decode_control(encode_control(message)) == message


# message, who sent it, whether that is right; ranks 0 and 1 serve, 2 and 3 work
SENDERS = [
    (Done(rank=3), 3, True),
    (Done(rank=3), 2, False),
    (Done(rank=0), 0, True),
    (Done(rank=7), 7, False),
    (EndOfData(generation=0, group=0, clock=7), 2, True),
    (EndOfData(generation=0, group=0, clock=7), 9, False),
    (DecodeCosts(server=1, codecs=[], elem_s=[]), 1, True),
    (DecodeCosts(server=1, codecs=[], elem_s=[]), 0, False),
    (DecodeCosts(server=2, codecs=[], elem_s=[]), 2, False),
    (BarrierLeave(index=1), 0, True),
    (BarrierLeave(index=1), 1, False),
    (MESSAGES[5], 1, False),
    (GuardLevel(level=3), 0, True),
    (GuardLevel(level=3), 2, False),
    (Move(key=0, epoch=1, target=1, room=0), 2, False),
]


@pytest.mark.parametrize(("message", "source", "fine"), SENDERS)
def test_nobody_speaks_for_somebody_else(message: ControlMessage, source: int, fine: bool) -> None:
    if fine:
        check_sender(message, source, servers=(0, 1), workers=(2, 3))
        return
    with pytest.raises(
        ProtocolError, match=f"cannot accept {type(message).__name__} from rank {source}: it is for rank"
    ):
        check_sender(message, source, servers=(0, 1), workers=(2, 3))


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
