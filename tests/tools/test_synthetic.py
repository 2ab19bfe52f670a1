"""Synthetic text: FinePhrase's shape, determinism, right arithmetic; each quality is what it promises."""

from __future__ import annotations

import operator
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import UserError
from tools import synthetic
from tools.realtext import clip, items_in, names_in, read_passage, split_sentences
from tools.synthetic import KINDS, MAX_CHARS, MIN_CHARS, MIXTURE, Quality, synthesize

LIGHTHOUSE = (
    "Orla Point Lighthouse is a lighthouse on the coast of Norway, built in 1884 by the engineer J. K. Berg. "
    "It is 41 metres high and has 212 steps. It was automated in 1986 and is known for its red lantern. "
    "About 12,500 visitors climb the tower each year, according to the Coastal Museum in Bergen."
)
RIVER = (
    "The Sarn is a river in eastern Poland that flows for 187 kilometres through the Lublin Upland. "
    "Its valley includes three nature reserves and is used for farming. "
    "The river was first surveyed in 1792 by Jan Kowalski, because floods had destroyed two bridges."
)
IDEA = (
    "A habit is a way of acting that is repeated until it needs no thought. Habits can help or harm. "
    "Some are learned in childhood, while others are formed at work."
)
CODE = (
    "def area(width, height):\n    # The area of a box, by its two sides.\n"
    "    if width < 0 or height < 0:\n"
    "        raise ValueError(f'{width} {height}')\n    return width * height  # {} of {x}\n"
)
DOCUMENTS = {"lighthouse": LIGHTHOUSE, "river": RIVER, "https://example.org/habit": IDEA, "code": CODE}
FILES = ("faq", "math", "table", "tutorial")
NUM_PER_KIND = 80
Made = tuple[Path, dict[str, int]]
"""The folder of the four files, and the counts that were returned."""

EQUATION = re.compile(r"([\d,]+) ([+\-×÷]) ([\d,]+) = ([\d,]+)(?: remainder (\d+))?")


def _number(digits: str) -> int:
    return int(digits.replace(",", ""))


def _check_arithmetic(text: str) -> int:
    """Recompute every equation; return how many there are."""
    equations = EQUATION.findall(text)
    for left, sign, right, result, remainder in equations:
        a, b, c = _number(left), _number(right), _number(result)
        if sign == "÷":
            assert divmod(a, b) == (c, int(remainder)), text
        else:
            assert {"+": operator.add, "-": operator.sub, "×": operator.mul}[sign](a, b) == c, text
    return len(equations)


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parents") / "parents.parquet"
    rows = {"id": list(DOCUMENTS), "text": list(DOCUMENTS.values()), "license": ["CC0-1.0"] * len(DOCUMENTS)}
    pq.write_table(pa.table(rows), path)
    return path


@pytest.fixture(scope="module")
def made(parents: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("out")
    return out, synthetic.make_synthetic(parents, out, num_per_kind=NUM_PER_KIND, seed=7)


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [row for kind in KINDS for row in pq.read_table(folder / f"{kind}.parquet").to_pylist()]


# --- the files ---


def test_each_kind_is_one_file_in_finephrase_columns_plus_the_truth(made: Made) -> None:
    out, _ = made
    assert {file.name for file in out.iterdir()} == {f"{kind}.parquet" for kind in FILES}
    usage = pa.struct([(f"{part}_tokens", pa.int64()) for part in ("prompt", "completion", "total")])
    rollout = pa.struct([("text", pa.string()), ("finish_reason", pa.string()), ("usage", usage)])
    for kind in KINDS:
        table = pq.read_table(out / f"{kind}.parquet")
        assert table.column_names == [
            *("id", "text", "dump", "url", "date", "file_path", "language", "language_score", "token_count"),
            *("score", "int_score", "rollout_results", "planted_quality"),
        ]
        assert table.schema.field("rollout_results").type.equals(pa.list_(rollout))
        assert table.num_rows == NUM_PER_KIND
        assert all(column.null_count == 0 for column in table.columns)


def test_text_stays_the_parent_and_the_rollout_is_something_else(made: Made) -> None:
    for row in _rows(made[0]):
        (rollout,) = row["rollout_results"]
        assert row["text"] == DOCUMENTS[row["id"]]
        assert rollout["text"] != row["text"]
        assert rollout["usage"]["total_tokens"] == (
            rollout["usage"]["prompt_tokens"] + rollout["usage"]["completion_tokens"]
        )


def test_lengths_stay_in_bounds(made: Made) -> None:
    lengths = [len(row["rollout_results"][0]["text"]) for row in _rows(made[0])]
    assert min(lengths) >= MIN_CHARS
    assert max(lengths) <= MAX_CHARS


def test_only_degenerate_text_is_cut_off(made: Made) -> None:
    for row in _rows(made[0]):
        cut_off = row["rollout_results"][0]["finish_reason"] == "length"
        assert cut_off == (row["planted_quality"] == "degenerate")


def test_counts_returned_are_the_counts_written_and_follow_the_mixture(made: Made) -> None:
    out, counts = made
    assert counts == Counter(row["planted_quality"] for row in _rows(out))
    assert counts == {quality: round(share * NUM_PER_KIND) * 4 for quality, share in MIXTURE.items()}


def test_metadata_of_a_row_depends_on_the_parent_and_not_on_the_quality(made: Made) -> None:
    seen: dict[str, set[tuple[Any, ...]]] = {}
    for row in _rows(made[0]):
        about = [row[name] for name in pq.read_schema(made[0] / "faq.parquet").names[2:11]]
        seen.setdefault(row["id"], set()).add(tuple(about))
    assert all(len(variants) == 1 for variants in seen.values())


def test_same_seed_gives_the_same_bytes_another_seed_not(parents: Path, made: Made, tmp_path: Path) -> None:
    synthetic.make_synthetic(parents, tmp_path / "again", num_per_kind=NUM_PER_KIND, seed=7)
    synthetic.make_synthetic(parents, tmp_path / "other", num_per_kind=NUM_PER_KIND, seed=8)
    for kind in KINDS:
        name = f"{kind}.parquet"
        assert (tmp_path / "again" / name).read_bytes() == (made[0] / name).read_bytes()
    assert _rows(tmp_path / "other") != _rows(made[0])


def test_same_seed_gives_the_same_bytes_in_another_process(parents: Path, made: Made, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.synthetic", "--parents", str(parents), "--out", str(tmp_path)]
    command += ["--num-per-kind", str(NUM_PER_KIND), "--seed", "7"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = {quality: int(count) for quality, count in map(str.split, printed.splitlines())}
    assert counts == made[1]
    for kind in KINDS:
        assert (tmp_path / f"{kind}.parquet").read_bytes() == (made[0] / f"{kind}.parquet").read_bytes()


@given(st.integers(1, 5000))
def test_apportionment_gives_every_quality_its_share_within_one(num_documents: int) -> None:
    counts = Counter(synthetic.apportion(num_documents))
    assert counts.total() == num_documents
    for quality, share in MIXTURE.items():
        assert abs(counts[quality] - share * num_documents) < 1


def test_mixture_sums_to_one_over_all_qualities_in_order() -> None:
    assert list(MIXTURE) == list(Quality)
    assert sum(MIXTURE.values()) == pytest.approx(1)


def test_missing_or_unfit_parents_are_user_errors_that_name_the_file(tmp_path: Path) -> None:
    def make(parents: Path, num_per_kind: int = 1) -> None:
        synthetic.make_synthetic(parents, tmp_path / "out", num_per_kind=num_per_kind, seed=1)

    with pytest.raises(UserError, match=r"nowhere\.parquet"):
        make(tmp_path / "nowhere.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(UserError, match=r"torn\.parquet"):
        make(tmp_path / "torn.parquet")
    pq.write_table(pa.table({"text": [RIVER]}), tmp_path / "anonymous.parquet")
    with pytest.raises(UserError, match=r"anonymous\.parquet.*`id`"):
        make(tmp_path / "anonymous.parquet")
    pq.write_table(pa.table({"id": ["a"], "text": ["short"]}), tmp_path / "short.parquet")
    with pytest.raises(UserError, match=r"short\.parquet.*longer"):
        make(tmp_path / "short.parquet")
    with pytest.raises(UserError, match="at least 1"):
        make(tmp_path / "short.parquet", num_per_kind=0)
    assert not (tmp_path / "out").exists()


def test_command_line_explains_a_missing_file_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        synthetic.main(["--parents", f"{tmp_path}/no.parquet", "--out", str(tmp_path), "--num-per-kind", "1"])
    assert left.value.code == UserError.exit_code
    assert "no.parquet" in capsys.readouterr().err


# --- the kinds ---


@pytest.mark.parametrize("kind", KINDS)
def test_kind_is_a_pure_function_of_text_and_generator_and_varies_with_it(kind: str) -> None:
    variants = {KINDS[kind](LIGHTHOUSE, random.Random(seed)) for seed in range(30)}
    assert len(variants) > 10
    assert KINDS[kind](LIGHTHOUSE, random.Random(3)) == KINDS[kind](LIGHTHOUSE, random.Random(3))


@pytest.mark.parametrize("seed", range(20))
def test_faq_answers_questions_with_the_parents_sentences(seed: int) -> None:
    text = synthetic.faq(RIVER, random.Random(seed))
    assert "What is the Sarn?" in text
    assert text.count("?") >= 2
    for sentence in split_sentences(RIVER):
        assert sentence in text


@pytest.mark.parametrize("seed", range(20))
def test_tutorial_numbers_its_steps_and_keeps_the_parents_sentences(seed: int) -> None:
    text = synthetic.tutorial(RIVER, random.Random(seed))
    steps = [int(step) for step in re.findall(r"Step (\d+):", text)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 2
    for sentence in split_sentences(RIVER):
        assert sentence in text


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("document", [LIGHTHOUSE, RIVER + " Left | right.", CODE])
def test_table_is_a_rectangle_with_a_question_that_it_answers(document: str, seed: int) -> None:
    text = synthetic.table(document, random.Random(seed))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) >= 3
    assert len({row.count("|") for row in rows}) == 1
    answer = text.split("\nAnswer: ")[1]
    assert any(answer in row for row in rows)


def test_table_lists_the_years_figures_and_names_of_the_text() -> None:
    text = synthetic.table(LIGHTHOUSE, random.Random(1))
    for item in ("1884", "1986", "12,500 visitors", "212 steps", "Coastal Museum", "Norway"):
        assert item in text


@settings(deadline=None)
@given(st.sampled_from([LIGHTHOUSE, RIVER, IDEA]), st.integers())
def test_math_is_right_and_built_on_numbers_of_the_text(document: str, seed: int) -> None:
    text = synthetic.math(document, random.Random(seed))
    assert _check_arithmetic(text) >= 2
    if document is LIGHTHOUSE:
        first = re.search(r"Step 1: ([\d,]+) . ([\d,]+)", text)
        assert first
        numbers = {"1884", "1986", "12,500", "212", "41"}
        assert numbers & {first[1], first[2]} or re.search(r"from (1884|1986) on", text)


def test_math_without_numbers_in_the_text_counts_its_words() -> None:
    text = synthetic.math(IDEA, random.Random(2))
    claimed = re.search(r"copies these (\d+) words", text)
    assert claimed
    quoted = text[text.index("A habit") : text.index(" A learner copies")]
    assert int(claimed[1]) == len(quoted.split())


# --- the qualities ---


def _synthesize(kind: str, quality: Quality, seed: int, document: str = LIGHTHOUSE) -> str:
    return synthesize(kind, quality, document, RIVER, random.Random(seed))


def _numbers(text: str) -> set[str]:
    items = [item for sentence in split_sentences(text) for item in items_in(sentence)]
    return {item for item, type_ in items if type_ != "Name"}


@pytest.mark.parametrize("kind", ["faq", "table", "tutorial"])
def test_faithful_text_holds_no_number_that_the_parent_lacks(kind: str) -> None:
    for seed in range(20):
        assert _numbers(_synthesize(kind, Quality.FAITHFUL, seed)) <= _numbers(LIGHTHOUSE)


def test_mild_text_drops_sentences_changes_none_and_adds_one_line_at_each_end() -> None:
    sentences = split_sentences(LIGHTHOUSE)
    for seed in range(20):
        lines = _synthesize("tutorial", Quality.MILD, seed).splitlines()
        assert lines[0] in synthetic._BEFORE
        assert lines[-1] in synthetic._AFTER
        kept = [sentence for sentence in sentences if any(sentence in line for line in lines)]
        assert sentences[0] in kept
        assert len(kept) < len(sentences)


@pytest.mark.parametrize("document", [LIGHTHOUSE, IDEA, CODE])
@pytest.mark.parametrize("seed", range(20))
def test_contradicted_text_leaves_no_sentence_of_the_parent_as_it_was(document: str, seed: int) -> None:
    wrong = synthetic.contradict(document, RIVER, random.Random(seed))
    rest = wrong
    for sentence in split_sentences(document):
        rest = rest.replace(f"This is untrue: {sentence}", "")
        assert sentence not in rest


@pytest.mark.parametrize("seed", range(20))
def test_contradicted_text_swaps_all_numbers_and_takes_names_of_the_other_document(seed: int) -> None:
    wrong = synthetic.contradict(LIGHTHOUSE, RIVER, random.Random(seed))
    assert not set(re.findall(r"\d[\d,]*", LIGHTHOUSE)) & set(re.findall(r"\d[\d,]*", wrong))
    theirs = {name for sentence in split_sentences(RIVER) for name in names_in(sentence)} | {"Sarn"}
    assert any(name in wrong for name in theirs)
    assert "Norway" not in wrong


def test_contradiction_ends_where_the_text_already_holds_every_small_number() -> None:
    crowded = "The list is long. It holds " + ", ".join(map(str, range(200))) + " and nothing else."
    assert synthetic.contradict(crowded, RIVER, random.Random(1))


@pytest.mark.parametrize("seed", range(10))
def test_contradicted_math_still_computes_rightly(seed: int) -> None:
    assert _check_arithmetic(_synthesize("math", Quality.CONTRADICTED, seed)) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_boilerplate_text_is_mostly_repeated_lines(kind: str) -> None:
    for seed in range(20):
        lines = _synthesize(kind, Quality.BOILERPLATE, seed).splitlines()
        repeated = sum(len(line) for line in lines if lines.count(line) > 1)
        assert repeated > 0.6 * sum(map(len, lines))


@pytest.mark.parametrize("kind", KINDS)
def test_scrambled_text_has_the_words_of_the_faithful_one_in_another_order(kind: str) -> None:
    for seed in range(10):
        faithful, scrambled = (_synthesize(kind, q, seed) for q in (Quality.FAITHFUL, Quality.SCRAMBLED))
        assert Counter(faithful.split()) == Counter(scrambled.split())
        moved = sum(a != b for a, b in zip(faithful.split(), scrambled.split(), strict=True))
        assert moved > 0.7 * len(faithful.split())


@pytest.mark.parametrize("kind", KINDS)
def test_noisy_text_differs_from_the_faithful_one_in_thirty_percent_of_its_characters(kind: str) -> None:
    for seed in range(10):
        faithful, noisy = (_synthesize(kind, quality, seed) for quality in (Quality.FAITHFUL, Quality.NOISY))
        changed = sum(a != b for a, b in zip(faithful, noisy, strict=True))
        assert changed == round(0.3 * len(faithful))


@pytest.mark.parametrize("kind", KINDS)
def test_degenerate_text_begins_well_and_then_repeats_one_phrase(kind: str) -> None:
    for seed in range(10):
        faithful, degenerate = (_synthesize(kind, q, seed) for q in (Quality.FAITHFUL, Quality.DEGENERATE))
        assert degenerate[:20] == faithful[:20]
        tail = degenerate[len(degenerate) // 3 * 2 :]
        assert any(tail[period:] == tail[:-period] for period in range(1, 120))


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    quality=st.sampled_from(Quality),
    text=st.text(min_size=synthetic.MIN_PARENT_CHARS, max_size=400).filter(lambda t: len(t.strip()) >= 120),
    seed=st.integers(0, 2**32),
)
def test_any_parent_gives_text_in_bounds(kind: str, quality: Quality, text: str, seed: int) -> None:
    made = synthesize(kind, quality, text, LIGHTHOUSE, random.Random(seed))
    assert MIN_CHARS <= len(made) <= MAX_CHARS


def test_very_long_parents_are_cut_at_a_sentence() -> None:
    text = " ".join(f"Sentence number {number} tells of Norway." for number in range(400))
    made = synthesize("tutorial", Quality.FAITHFUL, text, RIVER, random.Random(1))
    assert len(made) <= MAX_CHARS
    assert clip(text, 300).endswith("Norway.")
    assert clip("x" * 500, 300) == "x" * 300


# --- reading ---


@pytest.mark.parametrize(
    ("text", "subject", "be"),
    [
        (RIVER, "the Sarn", "is"),
        ("In mathematics, an even number is divisible by two.", "an even number", "is"),
        ("Jan Kowalski (1760–1820), also called the Old, was a surveyor.", "Jan Kowalski", "was"),
        ("Machine learning is a field. Many use machine learning.", "machine learning", "is"),
        ("Beavers, or castors, are large rodents.", "Beavers", "are"),
        ("x = 1\ny = 2", "this topic", "is"),
    ],
)
def test_subject_is_found_in_the_first_sentence(text: str, subject: str, be: str) -> None:
    assert read_passage(text)[:2] == (subject, be)


def test_sentences_end_at_stops_and_not_at_initials_or_abbreviations() -> None:
    text = 'C. S. Lewis met Dr. Smith in St. Ives c. 1950. "It rained." They left!\nNext day it snowed'
    assert split_sentences(text) == (
        "C. S. Lewis met Dr. Smith in St. Ives c. 1950.",
        '"It rained."',
        "They left!",
        "Next day it snowed",
    )


def test_items_are_years_figures_and_names() -> None:
    sentence = "In May 1912 44 million people of the Kingdom of Norway and two ships left in 30 BC."
    assert items_in(sentence) == [
        ("1912", "Year"),
        ("two ships", "Figure"),
        ("Kingdom of Norway", "Name"),
    ]
