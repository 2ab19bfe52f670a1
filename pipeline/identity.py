"""What makes two texts the same document, and which documents are held out. Pure functions; no I/O."""

from __future__ import annotations

import unicodedata

import xxhash


def normalise(text: str) -> str:
    """The text in the form in which it is hashed, tokenized and trained on.

    NFC, line ends as `\\n`, no spaces at the end of a line, none around the whole. Nothing that changes meaning: case, inner spaces and
    indentation stay.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(map(str.rstrip, text.split("\n"))).strip()


def document_id(text: str) -> bytes:
    """The 16-byte xxh3-128 of the normalised text. Text that isn't valid Unicode (a lone surrogate) has none: UnicodeEncodeError."""
    return hash_text(normalise(text).encode())


def hash_text(normalised: bytes) -> bytes:
    """The id of a document whose normalised UTF-8 text is at hand already."""
    return xxhash.xxh3_128_digest(normalised)


def in_holdout(doc_id: bytes, share: float) -> bool:
    """Whether a document belongs to the held-out share: a pure function of its id, so that every ingest and every parent agrees."""
    return xxhash.xxh3_64_intdigest(doc_id) / 2**64 < share
