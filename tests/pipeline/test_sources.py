"""Sources: each format's columns, what is rejected, what is an error with its mend, and that rows keep their number."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.errors import UserError
from pipeline.sources import RejectedRow, SourceDocument, SourceSpec, expand, read_rows

ROLLOUTS = pa.list_(
    pa.struct(
        [
            ("text", pa.string()),
            ("finish_reason", pa.string()),
            ("usage", pa.struct([("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64())])),
        ]
    )
)


def rollout(text: str | None, reason: str = "stop", tokens: int = 7) -> list[dict[str, Any]]:
    return [{"text": text, "finish_reason": reason, "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}]


def write_finephrase(path: Path, rows: list[tuple[str, list[dict[str, Any]]]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "id": [f"<urn:{i}>" for i in range(len(rows))],
        "text": [text for text, _ in rows],
        "score": [3.5] * len(rows),
        "rollout_results": pa.array([results for _, results in rows], ROLLOUTS),
    }
    pq.write_table(pa.table(columns), path)
    return str(path)


def write_jsonl(path: Path, lines: list[str]) -> str:
    path.write_bytes("".join(line + "\n" for line in lines).encode(errors="surrogateescape"))
    return str(path)


def spec_of(uri: str | Path, format: str, **fields: Any) -> SourceSpec:
    return SourceSpec(uri=str(uri), format=format, corpus="c", **fields)


def documents(spec: SourceSpec) -> list[SourceDocument]:
    rows = list(read_rows(spec))
    assert all(isinstance(row, SourceDocument) for row in rows), rows
    return [row for row in rows if isinstance(row, SourceDocument)]


def test_finephrase_text_is_the_rollout_and_its_text_column_the_parent(tmp_path: Path) -> None:
    path = write_finephrase(
        tmp_path / "faq" / "000.parquet", [("The original.", rollout("Q: What? A: That.", "length", 12))]
    )
    assert documents(spec_of(path, "finephrase")) == [
        SourceDocument(
            row=0,
            text="Q: What? A: That.",
            parent_text="The original.",
            generator="HuggingFaceTB/SmolLM2-1.7B-Instruct",
            prompt="faq",
            license="odc-by",
            access="public",
            label=None,
            finish_reason="length",
            tokens=12,
        )
    ]


@pytest.mark.parametrize(
    ("path", "given", "prompt"),
    [
        ("table-0001.parquet", None, "table"),
        ("math/part.parquet", None, "math"),
        ("other/part.parquet", None, None),
        ("math/part.parquet", "tutorial", "tutorial"),
    ],
)
def test_finephrase_kind_comes_from_the_user_then_the_file_then_the_folder(
    tmp_path: Path, path: str, given: str | None, prompt: str | None
) -> None:
    uri = write_finephrase(tmp_path / path, [("Original.", rollout("New."))])
    assert documents(spec_of(uri, "finephrase", prompt=given))[0].prompt == prompt


def test_finephrase_rows_without_a_rollout_are_rejected_and_keep_their_number(tmp_path: Path) -> None:
    rows = [("a", []), ("b", rollout("New b.")), ("c", rollout(None)), ("d", rollout("  "))]
    path = write_finephrase(tmp_path / "x.parquet", rows)
    found = list(read_rows(spec_of(path, "finephrase")))
    assert [row.row for row in found] == [0, 1, 2, 3]
    assert [getattr(row, "reason", None) for row in found] == ["no text", None, "no text", "empty text"]


def test_finephrase_as_json_lines_reads_alike(tmp_path: Path) -> None:
    path = tmp_path / "faq.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"text": "Original.", "rollout_results": rollout("New.")}).encode()))
    document = documents(spec_of(path, "finephrase"))[0]
    assert (document.text, document.parent_text, document.prompt) == ("New.", "Original.", "faq")


def test_a_finephrase_file_without_rollouts_is_an_error_that_names_what_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["plain"], "url": ["u"]}), tmp_path / "x.parquet")
    with pytest.raises(
        UserError, match=r"x\.parquet has no column rollout_results; it has text, url; .*use format parquet"
    ):
        list(read_rows(spec_of(tmp_path / "x.parquet", "finephrase")))


def test_cosmopedia_has_its_kind_in_format_and_no_parent(tmp_path: Path) -> None:
    columns = {
        "prompt": ["Write a story"],
        "text": ["Once."],
        "token_length": [4],
        "audience": ["children"],
        "format": ["story"],
        "seed_data": ["web"],
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    spec = spec_of(tmp_path / "x.parquet", "cosmopedia")
    document = documents(spec)[0]
    assert spec.origin == "synthetic"
    assert (document.text, document.prompt, document.tokens, document.parent_text) == ("Once.", "story", 4, None)
    assert (document.generator, document.license) == ("mistralai/Mixtral-8x7B-Instruct-v0.1", "apache-2.0")


def test_plain_parquet_maps_columns_and_falls_back_to_constants_where_a_row_names_none(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"body": ["One.", "Two."], "rights": ["mit", None], "kind": ["clean", ""]}), tmp_path / "x.parquet"
    )
    found = documents(
        spec_of(
            tmp_path / "x.parquet",
            "parquet",
            columns={"text": "body", "license": "rights", "label": "kind"},
            license="cc0",
        )
    )
    assert [(d.text, d.license, d.label) for d in found] == [("One.", "mit", "clean"), ("Two.", "cc0", None)]
    assert documents(spec_of(tmp_path / "x.parquet", "parquet", columns={"text": "body"}))[0].license == "unknown"


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_json_lines_read_plain_and_packed(tmp_path: Path, packed: str) -> None:
    data = b'\xef\xbb\xbf{"text": "One."}\n\n{"text": "Two.", "extra": 1}\n'
    path = tmp_path / f"x.jsonl{packed}"
    if packed:
        with pa.output_stream(path, compression={".gz": "gzip", ".zst": "zstd"}[packed]) as stream:
            stream.write(data)
    else:
        path.write_bytes(data)
    assert [(d.row, d.text) for d in documents(spec_of(path, "jsonl"))] == [(0, "One."), (2, "Two.")]


def test_unusable_text_is_rejected_with_its_reason(tmp_path: Path) -> None:
    lines = ['{"text": "fine"}', '{"text": " \\n "}', '{"text": "a\\u0000b"}', '{"text": "\\ud800"}', '{"text": null}']
    lines.append('{"text": "\udcff"}')  # a byte that is no UTF-8
    path = write_jsonl(tmp_path / "x.jsonl", lines)
    rejected = [row for row in read_rows(spec_of(path, "jsonl")) if isinstance(row, RejectedRow)]
    assert [(row.row, row.reason) for row in rejected] == [
        (1, "empty text"),
        (2, "NUL character"),
        (3, "invalid Unicode"),
        (4, "no text"),
        (5, "invalid Unicode"),
    ]


def test_invalid_utf8_in_parquet_costs_its_row_only(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff\xfe", b"fine too"])
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet")
    found = list(read_rows(spec_of(tmp_path / "x.parquet", "parquet")))
    assert [type(row) for row in found] == [SourceDocument, RejectedRow, SourceDocument]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "{broken"], r"x\.jsonl:2: not JSON .*mend or remove the line"),
        (['{"text": "a"}', '["text"]'], r"x\.jsonl:2: a line must be one JSON object, this is list"),
        (['{"body": "a"}'], r"x\.jsonl has no column text; it has body; map"),
        (['{"text": 5}'], r"x\.jsonl, row 0: column text holds int, not text; map text"),
    ],
)
def test_wrong_json_lines_are_errors_with_place_and_mend(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", lines)
    with pytest.raises(UserError, match=message):
        list(read_rows(spec_of(path, "jsonl")))


def test_a_mapped_column_that_no_json_line_has_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", ['{"text": "a"}', '{"text": "b", "kind": "k"}'])
    assert [d.label for d in documents(spec_of(path, "jsonl", columns={"label": "kind"}))] == [None, "k"]
    with pytest.raises(UserError, match="no line has the column sort; map it"):
        list(read_rows(spec_of(path, "jsonl", columns={"label": "sort"})))


def test_wrong_parquet_is_an_error_with_place_and_mend(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match=r"x\.parquet can't be read as Parquet: .*check the file"):
        list(read_rows(spec_of(tmp_path / "x.parquet", "parquet")))
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "y.parquet")
    with pytest.raises(UserError, match=r"y\.parquet, row 0: column text holds int, not text"):
        list(read_rows(spec_of(tmp_path / "y.parquet", "parquet")))
    with pytest.raises(UserError, match=r"y\.parquet has no column rights; it has text; map"):
        list(read_rows(spec_of(tmp_path / "y.parquet", "parquet", columns={"license": "rights"})))
    with pytest.raises(UserError, match=r"z\.parquet: the file doesn't exist"):
        list(read_rows(spec_of(tmp_path / "z.parquet", "parquet")))


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_reading_from_a_row_and_reading_some_rows_agree_with_reading_all(tmp_path: Path, format: str) -> None:
    texts = [f"document {i}" for i in range(9_000)]
    path = tmp_path / f"x.{format}"
    if format == "parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=5_000)
    else:
        write_jsonl(path, [json.dumps({"text": text}) for text in texts])
    spec = spec_of(path, format)
    whole = documents(spec)
    assert [d.text for d in whole] == texts
    assert list(read_rows(spec, start_row=4_998)) == whole[4_998:]
    only = np.array([0, 3, 4_095, 4_096, 4_999, 5_000, 8_999])
    assert list(read_rows(spec, only=only)) == [whole[i] for i in only]
    assert list(read_rows(spec, start_row=4_096, only=only)) == [whole[i] for i in only[3:]]


def test_datasets_read_a_local_folder_of_files_and_a_saved_data_set(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ['{"text": "One.", "n": 1}', '{"text": "Two.", "n": 2}'])
    spec = spec_of(folder, "datasets")
    assert [(d.row, d.text) for d in documents(spec)] == [(0, "One."), (1, "Two.")]
    assert list(read_rows(spec, start_row=1)) == documents(spec)[1:]
    assert list(read_rows(spec, only=np.array([1]))) == documents(spec)[1:]
    saved = tmp_path / "saved"
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["Three."]})}).save_to_disk(saved)
    assert [d.text for d in documents(spec_of(saved, "datasets", split="test"))] == ["Three."]
    with pytest.raises(UserError, match="there is no split 'train'; there are test"):
        list(read_rows(spec_of(saved, "datasets")))
    with pytest.raises(UserError, match=r"split nosuch: .*check the name"):
        list(read_rows(spec_of(folder, "datasets", split="nosuch")))
    with pytest.raises(UserError, match="has no column body; it has text, n"):
        list(read_rows(spec_of(folder, "datasets", columns={"text": "body"})))


def test_expand_takes_files_folders_and_globs_sorted_and_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.parquet", "a.parquet", "sub/c.parquet", ".hidden/d.parquet", "e.jsonl", "readme.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    found = [str(tmp_path / name) for name in ("a.parquet", "b.parquet", "sub/c.parquet")]
    assert expand(".", "parquet") == found
    assert expand("*.parquet", "parquet") == found[:2]
    assert expand("**/*.parquet", "parquet") == found
    assert expand(f"file://{tmp_path}/a.parquet", "parquet") == found[:1]
    assert expand(".", "jsonl") == [str(tmp_path / "e.jsonl")]
    assert expand("owner/name", "datasets") == ["owner/name"]
    with pytest.raises(UserError, match="no such file, folder or glob match"):
        expand("nowhere/*.parquet", "parquet")
    with pytest.raises(UserError, match="holds no file that ends in"):
        expand("sub", "jsonl")


def test_a_spec_says_what_will_be_done_and_survives_json() -> None:
    spec = spec_of("x", "finephrase", columns={"license": "rights"}, prompt="faq")
    assert (spec.origin, spec.license) == ("synthetic", "odc-by")
    assert SourceSpec.from_json(spec.to_json()) == spec
    assert spec_of("x", "finephrase", origin="real").origin == "synthetic"
    assert spec_of("x", "parquet").origin == "real"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "csv"}, "format 'csv' is not known; use one of finephrase"),
        ({"format": "parquet", "columns": {"url": "u"}}, "'url' is not a column of ours; map one of text"),
        ({"format": "finephrase", "columns": {"text": "text"}}, "format finephrase defines text itself"),
        ({"format": "parquet", "origin": "fake"}, "origin 'fake' is not known"),
        ({"format": "parquet", "columns": {"parent_text": "p"}}, "a text with a parent is synthetic"),
    ],
)
def test_a_wrong_spec_is_an_error_with_its_mend(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SourceSpec(uri="x", corpus="c", **fields)
