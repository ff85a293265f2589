"""The loss of each source of a mix, in the trainer."""

import copy

import numpy as np
import pytest
import torch

from olmo_hf.data.args import DataArgs, SourceArgs
from olmo_hf.data.build import build_train_data
from olmo_hf.data.order import DataPosition
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.arguments import OlmoTrainingArguments
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.training.trainer import OlmoTrainer


class Read(OlmoCallback):
    """Remembers which instances each step read."""

    def __init__(self):
        self.ids = []

    def on_instances(self, state, instance_ids):
        self.ids.append(list(instance_ids))


@pytest.mark.parametrize("implementation", ["plain", "chunked"])
def test_each_source_has_its_own_loss(tmp_path, implementation):
    for name, seed in (("books", 0), ("code", 1)):
        tokens = np.random.default_rng(seed).integers(2, 100, 16 * 20, dtype=np.uint16)
        tokens.tofile(tmp_path / f"{name}.npy")
    section = DataArgs(
        sources={name: SourceArgs(paths=(str(tmp_path / f"{name}.npy"),)) for name in ("books", "code")},
        token_dtype="uint16",
        sequence_length=16,
    )
    dataset, collator = build_train_data(
        section,
        seed=3,
        eos_token_id=0,
        pad_token_id=1,
        vocab_size=128,
        global_train_batch_size=8,
        start=DataPosition(),
    )
    torch.manual_seed(0)
    model = OlmoHfForCausalLM(
        OlmoHfConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    )
    untrained, read = copy.deepcopy(model), Read()
    args = OlmoTrainingArguments(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        loss_implementation=implementation,
        ignore_data_skip=True,
        remove_unused_columns=False,
    )
    trainer = OlmoTrainer(model, args, train_dataset=dataset, data_collator=collator, callbacks=[read])
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if entry.get("step") == 1)
    mixed = dataset.dataset
    items = [mixed[index] for index in read.ids[0]]
    assert len(items) == 8
    for number, name in enumerate(mixed.source_names):
        rows = torch.stack([item["input_ids"].long() for item in items if item["source"] == number])
        assert 0 < len(rows) < 8
        with torch.no_grad():
            expected = untrained(input_ids=rows, labels=rows).loss.item()
        assert first[f"train/source/{name}/CrossEntropyLoss"] == pytest.approx(expected, rel=1e-6)
