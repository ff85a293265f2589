"""Loads a checkpoint with stock transformers and lets it write. Knows nothing of this project.

python examples/sample.py runs/tiny/latest --prompt "def read"
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    """Print one sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a checkpoint directory, for example runs/tiny/latest")
    parser.add_argument("--prompt", default="import os\n\ndef ", help="how the text begins")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not Path(options.checkpoint).is_dir():
        parser.error(f"{options.checkpoint} is no directory; give one that training wrote, such as runs/tiny/latest")

    logging.disable_progress_bar()  # the weights are read in no time
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint)
    print(f"{type(model).__name__} with {model.num_parameters():,} parameters from {options.checkpoint}\n")

    torch.manual_seed(options.seed)
    inputs = tokenizer(options.prompt, return_tensors="pt")
    written = model.generate(
        **inputs, max_new_tokens=options.tokens, do_sample=True, temperature=0.8, top_k=50, use_cache=True
    )
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
