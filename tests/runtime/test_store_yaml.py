from __future__ import annotations

import time

import pytest

from flashsmith.generator.errors import StoreError
from flashsmith.runtime.store_yaml import MAX_BYTES, dump_yaml, parse_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def refused(text, words):
    with pytest.raises(StoreError, match=words) as caught:
        parse_yaml(text if isinstance(text, bytes) else text.encode(), where="f.yaml")
    assert "f.yaml" in str(caught.value)


def test_plain_data_comes_back():
    data = {"a": [1, -2, 2.5, True, None, "x: y", "yes", "1"], "b": {"c": "ü"}, "e": []}
    assert parse_yaml(dump_yaml(data, comment="for people").encode(), where="f") == data
    assert parse_yaml(b"", where="f") is None


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['echo no']",
        "!!python/name:os.system",
        "a: !custom 3",
        "a: !!binary aGk=",
        "a: !!set {x, y}",
        "!!omap [a: 1]",
        "!!map [a: 1]",
        "!!seq {a: 1}",
    ],
)
def test_tags_are_refused(text):
    refused(text, "tag|not a plain")


def test_without_the_c_library_the_same_is_read(monkeypatch):
    monkeypatch.delattr("yaml.CSafeLoader", raising=False)
    assert parse_yaml(b"a: [1, '1', x, 2.5, true, ~, !!str 3]", where="f") == {"a": [1, "1", "x", 2.5, True, None, "3"]}
    refused("a: &x 1", "anchors")
    refused("a: [1, 2", "not a readable YAML")


def test_a_word_is_typed_by_its_quotes_not_by_its_like():
    assert parse_yaml(b"[1, '1', 1, true, 'true', true]", where="f") == [1, "1", 1, True, "true", True]
    refused("[1.5, 1_5, 1_5]", "line 1")


def test_aliases_are_refused_before_they_grow():
    started = time.perf_counter()
    refused(BOMB, "aliases are not allowed")
    refused("a: &x {b: *x}", "aliases are not allowed")
    refused("a: &x 1", "aliases are not allowed")
    refused("a: *x", "aliases are not allowed")
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2", "not a readable YAML"),
        ("a: 1\n\tb: 2", "not a readable YAML"),
        ("a: 1\n---\nb: 2", "line 2: .* single document"),
        ("a: 1\na: 2", "twice"),
        ("{1: 2}", "a key must be a string"),
        ("{[1]: 2}", "a key must be a string"),
        ("a: .nan", "not a finite number"),
        ("a: 1e999", "not a plain|finite"),
        ("a: -.inf", "not a finite number"),
        ("a: 0x1F", "not a plain"),
        ("a: 1_000", "not a plain"),
        ("a: 190:20:30", "not a plain"),
        ("a: " + "9" * 5000, "not a plain"),
        ("a: 2026-01-01", "not a plain"),
        ("a: " + "[" * 50 + "]" * 50, "nested"),
        ("[" * 100_000, "nested|not a readable YAML"),
        (b"a: \xff\xfe", "UTF-8"),
        (b"a: \x00", "not a readable YAML"),
        (b"#" * (MAX_BYTES + 1), "may have"),
    ],
)
def test_what_no_file_of_ours_holds_is_refused(text, words):
    if text == "a: 1e999":  # YAML 1.1 reads it as a string
        assert parse_yaml(text.encode(), where="f") == {"a": "1e999"}
        return
    refused(text, words)


def test_many_values_are_refused():
    refused("a: [" + "1," * 500_000 + "]", "at most")


def test_the_line_at_fault_is_named():
    refused("a: 1\nb: 2\nc: !x 3\n", "line 3")


def test_comments_and_order_are_kept():
    text = dump_yaml({"z": 1, "a": {"k": 2}}, comment="one\ntwo")
    assert text.startswith("# one\n# two\nz: 1\n")
    assert "a: {k: 2}" in text
