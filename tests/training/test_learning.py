"""Loss and gradient through the trainer, on models of this package and of stock transformers.

The oracle is one forward pass over all rows of a step, with torch's own cross-entropy. One step of plain descent at
rate 1 makes the change of the weights the gradient; 1e-6 is some ten roundings of float32 at its size.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.schedulers import learning_rate_at
from tests.training.small import PLAIN_DESCENT, VOCAB, logged, ragged_rows, tiny, trainer_of, with_zero_head

LN_V = math.log(VOCAB)
KINDS = ["ours", "olmo2", "llama", "other_name"]


def oracle_step(model, rows, *, denominator=None):
    """Mean cross-entropy of the rows; the model takes one step of plain descent at rate 1."""
    ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
    targets = labels[:, 1:].flatten()
    total = F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), targets, reduction="sum")
    loss = total / (denominator or (targets != -100).sum())
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    return loss.item()


def same_weights(one, other):
    others = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(parameter, others[name], atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("kind", "micro_batch"), [*(("ours", size) for size in (8, 4, 2, 1)), *((kind, 2) for kind in KINDS[1:])]
)
def test_the_cut_into_micro_batches_changes_nothing(tmp_path, kind, micro_batch):
    rows, model, twin = ragged_rows(), tiny(kind), tiny(kind)
    trainer = trainer_of(
        tmp_path,
        model,
        rows,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=8 // micro_batch,
        **PLAIN_DESCENT,
    )
    trainer.train()
    loss = oracle_step(twin, rows)
    assert logged(trainer, "train/CrossEntropyLoss")[1] == pytest.approx(loss, abs=1e-6)
    assert logged(trainer, "loss")[1] == pytest.approx(loss, abs=1e-6)
    same_weights(model, twin)


def test_the_originals_denominator(tmp_path):
    rows, model, twin = ragged_rows(), tiny(), tiny()
    trainer = trainer_of(
        tmp_path,
        model,
        rows,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        loss_denominator="batch_tokens",
        **PLAIN_DESCENT,
    )
    trainer.train()
    assert logged(trainer, "train/CrossEntropyLoss")[1] == pytest.approx(
        oracle_step(twin, rows, denominator=8 * 16), abs=1e-6
    )
    same_weights(model, twin)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_of_a_row_is_nobodys_target(tmp_path, kind):
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(12).view(2, 6)]
    trainer = trainer_of(tmp_path, with_zero_head(tiny(kind)), rows, per_device_train_batch_size=2, **PLAIN_DESCENT)
    batch = {"labels": torch.arange(12).view(2, 6)}
    assert trainer._get_num_items_in_batch([batch], torch.device("cpu")) == 10
    trainer.train()
    # float32 at 4.85 rounds to 2.4e-7
    assert logged(trainer, "train/CrossEntropyLoss")[1] == pytest.approx(LN_V, abs=1e-6)


class NextIdConfig(PreTrainedConfig):
    model_type = "next_id"


class NextIdModel(PreTrainedModel):
    """Knows that each token is followed by the next number."""

    config: NextIdConfig

    def __init__(self, config):
        super().__init__(config)
        self.certainty = nn.Parameter(torch.tensor(1000.0))
        self.post_init()

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=F.one_hot((input_ids + 1) % VOCAB, VOCAB) * self.certainty)


def test_labels_are_shifted_once(tmp_path):
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(32).view(2, 16)]
    model = NextIdModel(NextIdConfig())
    trainer = trainer_of(tmp_path, model, rows, per_device_train_batch_size=2, **PLAIN_DESCENT)
    trainer.train()
    assert logged(trainer, "train/CrossEntropyLoss")[1] == 0.0


def test_z_is_apart_from_cross_entropy_and_perplexity(tmp_path):
    trainer = trainer_of(
        tmp_path,
        with_zero_head(tiny()),
        ragged_rows(),
        per_device_train_batch_size=8,
        z_loss_weight=1.0,
        **PLAIN_DESCENT,
    )
    trainer.train()
    assert logged(trainer, "train/CrossEntropyLoss")[1] == pytest.approx(LN_V, abs=1e-6)
    assert logged(trainer, "train/ZLoss")[1] == pytest.approx(LN_V**2, rel=1e-6)
    assert logged(trainer, "train/Perplexity")[1] == pytest.approx(VOCAB, rel=1e-6)
    assert logged(trainer, "loss")[1] == pytest.approx(LN_V + LN_V**2, rel=1e-6)


@pytest.mark.parametrize("weight", [1e-5, 1e-2])
def test_the_weight_of_z_that_is_asked_for_reaches_the_gradient(tmp_path, weight):
    # With a head of zeros d(CE + weight z)/d logits = (1 + 2 weight ln V) softmax - onehot: the bias-free head's
    # gradient summed over the vocabulary is the hidden states' sum times 2 weight ln V, and 0 without z.
    model = with_zero_head(tiny())
    trainer = trainer_of(
        tmp_path, model, ragged_rows(), per_device_train_batch_size=8, z_loss_weight=weight, **PLAIN_DESCENT
    )
    rows = ragged_rows()
    with torch.no_grad():
        hidden = model.model(torch.stack([row["input_ids"] for row in rows])).last_hidden_state[:, :-1]
    labelled = torch.stack([row["labels"] for row in rows])[:, 1:] != -100
    expected = -2 * weight * LN_V * hidden[labelled].mean(0)
    trainer.train()
    found = model.lm_head.weight.detach().double().sum(0)
    # 128 float32 entries near 1e-2 cancel in the sum
    torch.testing.assert_close(found, expected.double(), atol=2e-7, rtol=1e-3)
    assert expected.abs().max() > 1e-5


def test_labels_left_out_do_not_dilute_z(tmp_path):
    rows = [{"input_ids": ids, "labels": ids.clone()} for ids in torch.arange(64).view(4, 16)]
    for row in rows:
        row["labels"][::2] = -100
    trainer = trainer_of(
        tmp_path, with_zero_head(tiny()), rows, per_device_train_batch_size=4, z_loss_weight=1e-5, **PLAIN_DESCENT
    )
    trainer.train()
    assert logged(trainer, "train/ZLoss")[1] == pytest.approx(1e-5 * LN_V**2, rel=1e-6)


def test_both_losses_take_the_same_step(tmp_path):
    rows = ragged_rows()
    models = []
    for implementation in ("plain", "chunked"):
        models.append(tiny())
        settings = {"z_loss_weight": 1e-2, "loss_implementation": implementation, "loss_chunk_tokens": 7}
        trainer_of(tmp_path, models[-1], rows, per_device_train_batch_size=4, **settings, **PLAIN_DESCENT).train()
    same_weights(*models)


def in_windows(folder, rows, **settings):
    """14 rows in micro-batches of 2, of which 4 make a step: the second step of an epoch has only 3."""
    model = tiny()
    trainer = trainer_of(
        folder, model, rows, per_device_train_batch_size=2, gradient_accumulation_steps=4, **settings, **PLAIN_DESCENT
    )
    trainer.train()
    return trainer, model


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"num_train_epochs": 1, "max_steps": -1}, 2),
        ({"num_train_epochs": 2, "max_steps": -1}, 4),
        ({"max_steps": 3}, 3),
    ],
)
def test_a_shorter_last_window_is_a_step_of_its_own(tmp_path, settings, windows):
    rows = ragged_rows(14)
    trainer, model = in_windows(tmp_path, rows, **settings)
    twin = tiny()
    steps = [rows[:8], rows[8:], rows[:8], rows[8:]][:windows]
    expected = [oracle_step(twin, step) for step in steps]
    assert trainer.state.global_step == windows
    found = logged(trainer, "train/CrossEntropyLoss")
    assert list(found) == list(range(1, windows + 1))
    # Steps at rate 1 move the weights far; the second decimal of each step's rounding is carried on.
    assert list(found.values()) == pytest.approx(expected, rel=1e-5)
    if windows == 2:
        same_weights(model, twin)


def test_the_schedule_ends_where_a_short_epoch_does(tmp_path):
    scheduler = SchedulerArgs(name="linear_with_warmup", warmup=0, alpha_f=0.1)
    trainer = trainer_of(
        tmp_path,
        tiny(),
        ragged_rows(14),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        max_steps=-1,
        learning_rate=1e-3,
        scheduler=scheduler,
    )
    trainer.train()
    rates = logged(trainer, "optim/learning_rate_group0")
    assert rates == {k: learning_rate_at(scheduler, peak_lr=1e-3, current=k, max_=4) for k in (1, 2, 3, 4)}
    assert rates[4] == pytest.approx(1e-4, rel=1e-12)


def test_rates_in_tokens_follow_rows_of_any_length(tmp_path):
    rows = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (16, 16, 4, 4, 8, 8)]
    scheduler = SchedulerArgs(name="linear_with_warmup", units="tokens", warmup=0, alpha_f=0.0)
    settings = {"max_steps": 3, "max_tokens": 56, "learning_rate": 1e-3, "scheduler": scheduler}
    trainer = trainer_of(tmp_path, tiny(), rows, per_device_train_batch_size=2, **settings)
    trainer.train()
    assert logged(trainer, "throughput/total_tokens") == {1: 32, 2: 40, 3: 56}
    rates = logged(trainer, "optim/learning_rate_group0")
    assert rates == {
        k: learning_rate_at(scheduler, peak_lr=1e-3, current=t, max_=56) for k, t in enumerate((32, 40, 56), 1)
    }


class NoLength(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ragged_rows()


def test_a_schedule_in_tokens_needs_to_know_its_end(tmp_path):
    settings = {"learning_rate": 1e-3, "scheduler": SchedulerArgs(units="tokens", warmup=16)}
    with pytest.raises(ConfigError, match="set max_tokens"):
        trainer_of(tmp_path, tiny(), NoLength(), train_sampling_strategy="random", **settings).train()
    trainer = trainer_of(tmp_path, tiny(), NoLength(), train_sampling_strategy="random", max_tokens=128, **settings)
    trainer.train()
    rate = learning_rate_at(settings["scheduler"], peak_lr=1e-3, current=128, max_=128)
    assert logged(trainer, "optim/learning_rate_group0") == {1: rate}


@pytest.mark.parametrize("warmup", [0, 256])
def test_rates_in_tokens_are_those_of_the_tokens_seen(tmp_path, warmup):
    scheduler = SchedulerArgs(units="tokens", warmup=warmup, warmup_min_lr=0.0)
    trainer = trainer_of(
        tmp_path,
        tiny(),
        ragged_rows(40),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=10,
        learning_rate=1e-3,
        scheduler=scheduler,
    )
    trainer.train()
    tokens = logged(trainer, "throughput/total_tokens")
    assert tokens == {k: 64 * k for k in range(1, 11)}
    rates = logged(trainer, "optim/learning_rate_group0")
    assert rates == {k: learning_rate_at(scheduler, peak_lr=1e-3, current=64 * k, max_=640) for k in range(1, 11)}
