"""The command `atoll distill`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manifests.catalog import Catalog
from manifests.jobs import make_job
from manifests.store import Store
from pipeline.ingest import ingest
from pipeline.sources import SourceSpec
from tools.cli import _run


def test_it_predicts_the_rest_and_says_how_well_it_orders(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["tide", "reef", "9#x", "q7%"], 30).tolist()) + f" {n}" for n in range(140)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "reef.parquet")
    ingest(store, [SourceSpec(uri=str(tmp_path / "reef.parquet"), format="parquet", corpus="reef")], holdout_share=0.0)
    job = make_job(store, "score", config={"sample": 90}, inputs={})
    rows = [
        {"doc_id": row["doc_id"], "method": "m", "score": -float(texts[row["source_row"]].count("9#x")), "stderr": 0.1,
         "checkpoint": "c", "probe": "p", "scored_at": 0, "direct": True, "job": job.id}
        for row in Catalog(store).rows("SELECT doc_id, source_row FROM documents ORDER BY doc_id LIMIT 90")
    ]  # fmt: skip
    job.append("influence", rows, part=1)
    job.commit({})
    assert _run(["distill", "--store", store.uri, "--score-job", job.id, "--max-fit", "80"]) == 0
    said = capsys.readouterr().err
    assert "documents: 50" in said
    assert "fitted_on: 80" in said
    assert "rank_correlation: 0." in said
    assert _run(["distill", "--store", store.uri, "--score-job", job.id, "--max-fit", "80"]) == 0
    assert "done before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "mend"), [([], "atoll score --sample N"), (["--max-fit", "3"], "50 or more"), (["--score-job", "x"], "none")]
)  # fmt: skip
def test_what_it_cannot_do_is_one_line_with_the_mend(
    store: Store, capsys: pytest.CaptureFixture[str], options: list[str], mend: str
) -> None:
    assert _run(["distill", "--store", store.uri, *options]) == 2
    said = capsys.readouterr().err
    assert mend in said
    assert "Traceback" not in said
