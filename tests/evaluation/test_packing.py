"""Rows in which sequences share what they begin with say what each sequence alone would say."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Olmo2ForCausalLM

from olmo_hf.evaluation.encoding import ScoredSequence
from olmo_hf.evaluation.icl import batch_log_probabilities, takes_branches
from olmo_hf.evaluation.packing import ROW_TOKENS, SCORED_POSITIONS, collate_rows, pack_rows, plan_batches
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests.evaluation.test_perplexity import CPU, V, tiny_model


def sequence(tokens: list[int], num_scored: int, slot: int) -> ScoredSequence:
    """The last `num_scored` of the tokens are scored; the very last is not read."""
    ids = np.array(tokens, dtype=np.int32)
    return ScoredSequence(ids[:-1], len(ids) - 1 - num_scored, ids[len(ids) - num_scored :], slot)


# Few different tokens, so that sequences begin alike, contain each other and repeat.
SEQUENCES = st.lists(
    st.integers(2, 14).flatmap(
        lambda length: st.tuples(
            st.lists(st.integers(2, 4), min_size=length, max_size=length), st.integers(1, length - 1)
        )
    ),
    min_size=1,
    max_size=12,
).map(lambda listed: [sequence(tokens, count, slot) for slot, (tokens, count) in enumerate(listed)])


def packed(model: torch.nn.Module, sequences: list[ScoredSequence], *, share: bool, batch_tokens: int) -> np.ndarray:
    sums = np.zeros(len(sequences))
    for rows in plan_batches(pack_rows(sequences, share=share), batch_tokens=batch_tokens):
        batch = collate_rows(rows)
        with torch.no_grad():
            found = batch_log_probabilities(model, batch, device=CPU, autocast=contextlib.nullcontext)
        np.add.at(sums, batch.slots, found.double().numpy())
    return sums


def alone(model: torch.nn.Module, sequences: list[ScoredSequence]) -> np.ndarray:
    sums = []
    for one in sequences:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None], use_cache=False).logits[0]
        logs = torch.log_softmax(logits.double(), -1)  # (S, V)
        sums.append(sum(float(logs[one.first + place, token]) for place, token in enumerate(one.targets)))
    return np.array(sums)


def ours(**config: object) -> OlmoHfForCausalLM:
    torch.manual_seed(0)
    made = OlmoHfForCausalLM(
        OlmoHfConfig(
            vocab_size=V,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            eos_token_id=0,
            pad_token_id=1,
            **config,  # type: ignore[arg-type]
        )
    )
    made.lm_head.weight.data.mul_(20)
    return made.eval()


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "stock": lambda: tiny_model().eval(),
    "ours": ours,
    "eager": lambda: ours(attn_implementation="eager"),
    "scaled": lambda: ours(scale_logits=True),
    "learned": lambda: ours(position_embedding="learned"),
    "alibi": lambda: ours(position_embedding="alibi"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return MODELS[request.param]()


@settings(max_examples=15, deadline=None)
@given(sequences=SEQUENCES, batch_tokens=st.sampled_from([1, 24, 200]))
def test_a_row_says_what_its_sequences_say_alone(model: torch.nn.Module, sequences, batch_tokens: int) -> None:
    share = takes_branches(model)
    # Sums of up to 13 logarithms of float32 in another order; logits are up to 20 in size.
    expected = alone(model, sequences)
    np.testing.assert_allclose(packed(model, sequences, share=share, batch_tokens=batch_tokens), expected, atol=5e-4)
    np.testing.assert_allclose(packed(model, sequences, share=False, batch_tokens=batch_tokens), expected, atol=5e-4)


def test_models_without_masks_of_ones_own_get_plain_rows() -> None:
    assert takes_branches(ours())
    assert takes_branches(tiny_model())
    assert not takes_branches(ours(position_embedding="alibi"))
    flash = ours()
    flash.config._attn_implementation = "flash_attention_2"
    assert not takes_branches(flash)


def question(context: int, *, choices: int, length: int, slot: int) -> list[ScoredSequence]:
    return [
        sequence([*range(2, context + 2), *[50 + choice] * length], length, slot + choice) for choice in range(choices)
    ]


def test_a_context_is_computed_once_for_its_continuations() -> None:
    (row,) = pack_rows(question(300, choices=4, length=5, slot=0), share=True)
    assert row.length == 300 + 4 * 4
    (single,) = pack_rows(question(300, choices=4, length=1, slot=0), share=True)
    assert single.length == 300
    assert single.is_plain, "choices of one token need nothing but the context"
    assert len(collate_rows([single]).scored_positions) == 1
    assert sum(row.length for row in pack_rows(question(300, choices=4, length=5, slot=0), share=False)) == 4 * 304


def test_questions_with_the_same_examples_share_them_up_to_a_limit() -> None:
    examples = list(range(2, 402))
    many = [sequence([*examples, 500 + number, 1, 1, 9], 1, number) for number in range(400)]
    rows = pack_rows(many, share=True)
    assert all(row.length <= ROW_TOKENS for row in rows)
    assert sum(row.length for row in rows) < 1.05 * (400 * 3 + len(rows) * 400)
    assert len(rows) == 2


def test_batches_keep_to_their_limits_and_begin_with_the_longest() -> None:
    rng = np.random.default_rng(0)
    sequences = [sequence(rng.integers(2, 100, rng.integers(5, 90)).tolist(), 3, slot) for slot in range(200)]
    rows = pack_rows(sequences, share=True)
    batches = plan_batches(rows, batch_tokens=256)
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, rows))
    for batch in batches:
        assert len({row.is_plain for row in batch}) == 1
        assert len(batch) == 1 or len(batch) * max(row.length for row in batch) <= 256
        assert len(batch) == 1 or sum(sum(map(len, row.positions)) for row in batch) <= SCORED_POSITIONS
    plain = [batch[0].length for batch in batches if batch[0].is_plain]
    assert plain == sorted(plain, reverse=True)


def test_the_head_sees_scored_positions_only() -> None:
    model = tiny_model().eval()
    assert isinstance(model, Olmo2ForCausalLM)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(tuple(output.shape)))
    packed(model, question(20, choices=4, length=3, slot=0), share=True, batch_tokens=100)
    hook.remove()
    assert seen == [(1, 1 + 4 * 2, V)], "the end of the context, and two of three tokens of each continuation"
    assert not model.lm_head._forward_pre_hooks, "nothing is left behind"
