"""Tokens per second of `olmo-hf prepare-data`, against `tokenizers` alone, on one core.

    python benchmarks/data_preparation.py [--megabytes 64]

Text is made up of the words of this machine's Python library, so that nothing has to be downloaded; a tokenizer is
trained on the beginning of it. `tokenizers` alone encodes the same texts, already in memory, in the same batches.
Processor time is compared: both run on one core.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from olmo_hf.data.document_sources import BATCH_DOCUMENTS
from olmo_hf.data.prepare import prepare_data
from olmo_hf.data.prepare_options import PrepareOptions
from olmo_hf.data.tokenizer_files import raw_tokenizer, save_tokenizer, train_tokenizer


def documents(size_bytes: int) -> list[str]:
    """Sources of Python's library, again and again, each time under another heading."""
    texts = []
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    while size_bytes > 0:
        for file in files:
            texts.append(f"{len(texts)}\n{file.read_text(encoding='utf-8', errors='ignore')}"[:20_000])
            size_bytes -= len(texts[-1])
            if size_bytes <= 0:
                break
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=8_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    texts = documents(options.megabytes * 2**20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = train_tokenizer(iter(texts[:200]), options.vocab_size)
        save_tokenizer(tokenizer, folder / "tokenizer", eos_token="<|endoftext|>", pad_token="<|padding|>")
        source = folder / "s.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        alone, ours, tokens = [], [], 0
        for number in range(options.repeats):
            raw = raw_tokenizer(folder / "tokenizer")
            began, tokens = time.process_time(), 0
            for first in range(0, len(texts), BATCH_DOCUMENTS):
                batch = raw.encode_batch_fast(texts[first : first + BATCH_DOCUMENTS], add_special_tokens=False)
                tokens += sum(len(encoding.ids) for encoding in batch)
            alone.append(tokens / (time.process_time() - began))
            began = time.process_time()
            report = prepare_data(
                PrepareOptions(
                    sources=(str(source),),
                    tokenizer=str(folder / "tokenizer"),
                    output=str(folder / f"out{number}"),
                )
            )
            ours.append(report.num_tokens_now / (time.process_time() - began))
        print(f"tokenizers alone  {max(alone):>12,.0f} tokens per second of one core")
        print(f"prepare-data      {max(ours):>12,.0f} tokens per second of one core  x {max(ours) / max(alone):.2f}")


if __name__ == "__main__":
    main()
