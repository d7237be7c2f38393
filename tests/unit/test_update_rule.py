"""RuleSpec: what it refuses, and its JSON text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcps.errors import ConfigError, ProtocolError
from hpcps.update.rule import RuleSpec

ADAM = RuleSpec(
    kind="adam",
    option_names=("lr", "beta1", "eps"),
    options=((1e-3, 0.9, 1e-8), (0.1, 0.8, 1e-6)),
    flags=((("amsgrad", True), ("foreach", None)), ()),
)


def test_the_text_is_plain_json():
    assert json.loads(ADAM.to_json()) == {
        "kind": "adam",
        "option_names": ["lr", "beta1", "eps"],
        "options": [[1e-3, 0.9, 1e-8], [0.1, 0.8, 1e-6]],
        "flags": [{"amsgrad": True, "foreach": None}, {}],
    }
    assert RuleSpec.from_json(ADAM.to_json()) == ADAM


NAMES = st.text(min_size=1, max_size=8)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
FLAGS = st.dictionaries(NAMES, st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=5), max_size=3)


@given(data=st.data(), kind=NAMES, names=st.lists(NAMES, unique=True, max_size=4), num_groups=st.integers(1, 3))
def test_any_spec_survives_the_wire(data, kind, names, num_groups):
    row = st.tuples(*[FINITE] * len(names))
    spec = RuleSpec(
        kind=kind,
        option_names=tuple(names),
        options=tuple(data.draw(row) for _ in range(num_groups)),
        flags=tuple(tuple(data.draw(FLAGS).items()) for _ in range(num_groups)),
    )
    back = RuleSpec.from_json(spec.to_json())
    assert back == spec
    assert repr(back) == repr(spec)  # also the types and the sign of zero


FIELDS = json.loads(ADAM.to_json())
BAD_TEXTS = [
    ("", "JSONDecodeError"),
    ("[" * 100_000, "need JSON|need an object"),
    ("[]", "list, need an object of kind, option_names, options and flags"),
    ("7", "int, need an object"),
    ('{"kind":"sgd"}', r"\['kind'\], need an object"),
    (json.dumps(FIELDS | {"extra": 1}), "extra.*need an object"),
    (json.dumps(FIELDS | {"kind": 3}), "kind is 3, need text"),
    (json.dumps(FIELDS | {"kind": ""}), "its kind is empty"),
    (json.dumps(FIELDS | {"option_names": "lr"}), "option_names has 'lr', need a list"),
    (json.dumps(FIELDS | {"option_names": ["lr", 1, "eps"]}), "option_names has 1, need text"),
    (json.dumps(FIELDS | {"option_names": ["lr", "lr", "eps"]}), "repeat; name each once"),
    (json.dumps(FIELDS | {"options": {}}), "options has {}, need a list"),
    (json.dumps(FIELDS | {"options": [1, 2]}), "options has 1, need a list"),
    (json.dumps(FIELDS | {"options": [[1, 2, True], [1, 2, 3]]}), "options has True, need a number"),
    (json.dumps(FIELDS | {"options": [[1, 2, "3"], [1, 2, 3]]}), "options has '3', need a number"),
    (json.dumps(FIELDS | {"options": [[1, 2, 10**400], [1, 2, 3]]}), "too large for a float"),
    (json.dumps(FIELDS | {"options": [[1, 2, float("nan")], [1, 2, 3]]}), "group 0 has eps = nan, need a finite"),
    (json.dumps(FIELDS | {"options": [[1, 2, 3], [1, 2]]}), "group 1 has 2 options, need 3; give lr, beta1, eps"),
    (json.dumps(FIELDS | {"options": []}), "0 rows of options and 2 of flags"),
    (json.dumps(FIELDS | {"flags": [{}]}), "2 rows of options and 1 of flags"),
    (json.dumps(FIELDS | {"flags": [[], {}]}), r"flags has \[\], need an object for each group"),
    (json.dumps(FIELDS | {"flags": [{"a": [1]}, {}]}), r"flag a is \[1\], need a number, text, true"),
    (json.dumps(FIELDS | {"flags": [{"a": float("inf")}, {}]}), "group 0 has a = inf, need a finite number"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS, ids=range(len(BAD_TEXTS)))
def test_bad_text_is_a_protocol_error(text, message):
    with pytest.raises(ProtocolError, match=f"(?s)^cannot read a rule: .*(?:{message})"):
        RuleSpec.from_json(text)


def test_a_repeated_flag_is_a_config_error():
    with pytest.raises(ConfigError, match="flags of group 0 repeat in"):
        RuleSpec(kind="sgd", option_names=(), options=((),), flags=((("a", 1), ("a", 2)),))
