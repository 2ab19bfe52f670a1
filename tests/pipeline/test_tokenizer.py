"""Tokenizers: the same texts give the same one, special tokens in texts stay text, and a store's tokenizer is found again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from manifests.catalog import Catalog
from manifests.errors import Failure, UserError
from manifests.store import Store
from manifests.tables import create_store
from pipeline.ingest import ingest
from pipeline.sources import SourceSpec
from pipeline.tokenizer import LoadedTokenizer, adopt_tokenizer, load_tokenizer, train_tokenizer

WORDS = ["reef", "lagoon", "island", "atoll", "coral", "tide", "sea", "sand", "wind", "palm", "ring", "deep", "shallow"]


def texts(count: int) -> list[str]:
    draw = random.Random(1)
    return [f"{i}: " + " ".join(draw.choices(WORDS, k=30)) for i in range(count)]


def fill(store: Store, folder: Path, count: int = 200) -> Catalog:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"text": texts(count)}), folder / "x.parquet")
    ingest(store, [SourceSpec(uri=str(folder / "x.parquet"), format="parquet", corpus="c")], holdout_share=0.1)
    return Catalog(store)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    folder = tmp_path_factory.mktemp("loaded")
    store = create_store(str(folder / "store"))
    train_tokenizer(store, fill(store, folder), vocab_size=300)
    return load_tokenizer(store, Catalog(store))


def word_level(path: Path, tokens: list[str]) -> Path:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def test_the_same_texts_give_the_same_tokenizer(store: Store, tmp_path: Path, loaded: LoadedTokenizer) -> None:
    catalog = fill(store, tmp_path / "elsewhere")
    seen: list[tuple[str, int, int | None]] = []
    assert train_tokenizer(store, catalog, vocab_size=300, report=lambda *now: seen.append(now)) == loaded.id
    assert (
        seen[-1][1] == seen[-1][2] == catalog.rows("SELECT count(*) AS n FROM documents WHERE split = 'train'")[0]["n"]
    )
    versions = Catalog(store).versions
    assert train_tokenizer(store, Catalog(store), vocab_size=300) == loaded.id
    assert Catalog(store).versions == versions
    assert loaded.vocab_size == 300


def test_a_cap_on_the_bytes_takes_the_documents_of_lowest_id(store: Store, tmp_path: Path) -> None:
    catalog = fill(store, tmp_path)
    ids = {size: train_tokenizer(store, catalog, vocab_size=300, max_bytes=size) for size in (1, 2_000, 1_000_000)}
    assert len(set(ids.values())) == 3


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_its_tokens(loaded: LoadedTokenizer, text: str) -> None:
    tokens = loaded.encode_batch([text])[0]
    assert tokens.dtype == np.uint16
    assert tokens[-1] == loaded.eos_id
    assert loaded.tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False) == text


def test_a_text_that_spells_the_end_of_a_document_does_not_end_it(loaded: LoadedTokenizer) -> None:
    tokens, empty = loaded.encode_batch(["reef <|endoftext|> sea", ""])
    assert (tokens == loaded.eos_id).sum() == 1
    assert empty.tolist() == [loaded.eos_id]


def test_a_large_vocabulary_has_wide_tokens(loaded: LoadedTokenizer) -> None:
    wide = LoadedTokenizer(tokenizer=loaded.tokenizer, id="x", eos_id=65_536, vocab_size=65_537)
    assert wide.token_dtype == np.uint32
    assert wide.encode_batch([""])[0].tolist() == [65_536]


def test_wrong_wishes_are_errors_with_their_mend(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocabulary size 256 is too small"):
        train_tokenizer(store, Catalog(store), vocab_size=256)
    with pytest.raises(UserError, match="no documents to train a tokenizer on; `atoll ingest`"):
        train_tokenizer(store, Catalog(store), vocab_size=300)
    with pytest.raises(UserError, match=r"has no tokenizer; `atoll tokenizer` makes one"):
        load_tokenizer(store, Catalog(store))
    with pytest.raises(UserError, match="there is no such file"):
        adopt_tokenizer(store, str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"give the path of a tokenizer\.json"):
        adopt_tokenizer(store, str(tmp_path))


@pytest.mark.parametrize("named", ["stop", {"content": "stop", "special": True}])
def test_an_adopted_folder_names_its_own_end_of_document(store: Store, tmp_path: Path, named: object) -> None:
    word_level(tmp_path / "tokenizer.json", ["?", "reef", "</s>", "stop"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    adopted = adopt_tokenizer(store, str(tmp_path))
    tokenizer = load_tokenizer(store, Catalog(store), adopted)
    assert [tokens.tolist() for tokens in tokenizer.encode_batch(["reef nowhere"])] == [[1, 0, 3]]
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (3, 4)


def test_an_adopted_file_falls_back_to_common_names(store: Store, tmp_path: Path) -> None:
    path = word_level(tmp_path / "mine.json", ["?", "reef", "</s>"])
    adopted = adopt_tokenizer(store, str(path))
    assert load_tokenizer(store, Catalog(store)).eos_id == 2
    assert adopt_tokenizer(store, str(path.rename(tmp_path / "moved.json"))) == adopted
    assert len(Catalog(store).rows("FROM tokenizers")) == 1
    bare = word_level(tmp_path / "bare.json", ["?", "reef"])
    with pytest.raises(UserError, match=r"has no token .* to end a document"):
        adopt_tokenizer(store, str(bare))
    assert adopt_tokenizer(store, str(bare), eos="reef") != adopted


def test_several_tokenizers_must_be_chosen_from(store: Store, tmp_path: Path) -> None:
    one = adopt_tokenizer(store, str(word_level(tmp_path / "one.json", ["?", "</s>"])))
    two = adopt_tokenizer(store, str(word_level(tmp_path / "two.json", ["?", "reef", "</s>"])))
    with pytest.raises(UserError, match=r"has 2 tokenizers; choose one by its id: .*one\.json"):
        load_tokenizer(store, Catalog(store))
    with pytest.raises(UserError, match="no single tokenizer 'zzz'"):
        load_tokenizer(store, Catalog(store), "zzz")
    assert load_tokenizer(store, Catalog(store), one).id == one
    assert load_tokenizer(store, Catalog(store), two[:8]).id == two


def test_a_damaged_tokenizer_is_not_used(store: Store, tmp_path: Path) -> None:
    adopted = adopt_tokenizer(store, str(word_level(tmp_path / "one.json", ["?", "</s>"])))
    with (store.root / "tokenizers" / adopted / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(Failure, match="is damaged"):
        load_tokenizer(store, Catalog(store))


def test_the_ingest_side_imports_nothing_heavy() -> None:
    script = (
        "import sys, pipeline.ingest, pipeline.texts, pipeline.tokenizer\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'streaming', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
