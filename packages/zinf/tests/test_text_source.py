"""Text and documents out of files, and what is no text."""

from __future__ import annotations

import json

import pytest

from zinf.training.text_source import read_documents, read_text

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello yourself"}]


def test_the_builtin_text_is_pythons_documentation():
    text = read_text("builtin")
    assert len(text) > 300_000
    assert "assignment statement" in text.decode()


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "text").write_bytes(b"\xff\x00abc")
    assert read_text(str(tmp_path / "text")) == b"\xff\x00abc"


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "text").touch()
    with pytest.raises(ValueError, match="empty"):
        read_text(str(tmp_path / "text"))


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "text").write_text("one\n\ntwo é")
    assert list(read_documents(str(tmp_path / "text"))) == ["one\n\ntwo é"]
    assert next(read_documents("builtin")).encode() == read_text("builtin")


def test_a_jsonl_file_has_a_document_a_line(tmp_path):
    lines = [{"text": "one", "id": 3}, {"messages": TALK}, {"text": ""}]
    (tmp_path / "data.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    assert list(read_documents(str(tmp_path / "data.jsonl"))) == ["one", TALK, ""]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": 3}', "line 2 has neither"),
        (b'{"messages": []}', "line 2 has neither"),
        (b'{"messages": [{"role": "user"}]}', "line 2 has neither"),
        (b"[]", "line 2 has neither"),
        (b'{"text": "cut', "line 2 is no JSON"),
        (b'{"text": "\xff"}', "line 2 is no UTF-8"),
        (b'{"text": "\\ud83d"}', r"line 2 holds '\\ud83d', half of a character"),
        (b'{"messages": [{"role": "user", "content": [{"text": "\\ude00"}]}]}', "line 2 holds"),
        (b"[" * 100_000, "line 2 is no JSON"),
        (b'{"text": "one", "id": ' + b"9" * 5000 + b"}", "line 2 is no JSON"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, line, words):
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "one"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"data.jsonl, {words}"):
        list(read_documents(str(tmp_path / "data.jsonl")))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\x80abc")
    with pytest.raises(ValueError, match="binary is no UTF-8 text"):
        list(read_documents(str(tmp_path / "binary")))
