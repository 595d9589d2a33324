"""Where the text comes from: a file as its bytes, or the documents of a text or JSONL file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUILTIN = "builtin"

Messages = list[dict[str, Any]]
"""A conversation: {"role": ..., "content": ...} in order."""


def read_text(source: str) -> bytes:
    """The bytes of the file `source`, or for "builtin" the documentation text that every CPython carries.

    Raises OSError when the file cannot be read and ValueError when it is empty.
    """
    if source == BUILTIN:
        # Some 465 KB of English about Python, present wherever this runs: nothing needs to be downloaded.
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    text = Path(source).read_bytes()
    if not text:
        raise ValueError(f"data file {source!r} is empty")
    return text


def read_documents(source: str) -> Iterator[str | Messages]:
    """The documents of a file: one a line of a `.jsonl` file, else the file as a whole.

    A line is a JSON object with "text", a string, or "messages", a conversation. Raises OSError when the file cannot
    be read, and ValueError, naming the line, for anything else in it.
    """
    if not source.endswith(".jsonl"):
        yield _decoded(read_text(source), source)
        return
    with open(source, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _document(line, f"{source}, line {number}")


def _document(line: bytes, where: str) -> str | Messages:
    text = _decoded(line, where)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers too long, lists too deep
        raise ValueError(f"{where} is no JSON: {error}") from None
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return _encodable(record["text"], where)
    if isinstance(record, dict) and _is_conversation(record.get("messages")):
        return _encodable(record["messages"], where)
    raise ValueError(f'{where} has neither "text", a string, nor "messages", a list with "role" and "content" each')


def _encodable(document: Any, where: str) -> Any:
    """The document, unless it holds what JSON can write and no text can hold."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where} holds {half!r}, half of a character, which is no text") from None
    return document


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages)
    )


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no UTF-8 text: {error}") from None
