"""Documents packed in one row see only themselves."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from olmo_hf.model.layers_olmo import document_positions, varlen_kwargs
from tests.model.tiny import SHAPES, tiny_model, token_ids
from tests.parity.original import GOLDEN, load_variant

LENGTHS = torch.tensor([[10, 1, 29, 0], [5, 7, 11, 17]])
ROW = 40


def alone(model, ids, lengths):
    """Logits of every document run by itself, put side by side."""
    rows = []
    for row, row_lengths in zip(ids, lengths.tolist(), strict=True):
        parts = row.split([n for n in row_lengths if n > 0])
        rows.append(torch.cat([model(part[None]).logits[0] for part in parts]))
    return torch.stack(rows)


def test_positions_restart_in_every_document():
    expected = [*range(10), 0, *range(29)]
    assert document_positions(LENGTHS, ROW)[0].tolist() == expected


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([[10, 20]], "add up to 40"),
        ([[50, -10]], "negative"),
        ([10, 30], "of shape"),
        ([[10, 30], [20, 20]], "of shape"),
        ([[]], "of shape"),
        ([[10.0, 30.0]], "whole numbers"),
    ],
)
def test_lengths_that_make_no_sense(lengths, words):
    with pytest.raises(ValueError, match=words):
        tiny_model()(token_ids(1, ROW), doc_lens=torch.tensor(lengths))


def test_boundaries_for_flash_attention():
    kwargs = varlen_kwargs(LENGTHS, None)
    assert kwargs["cu_seq_lens_q"].tolist() == [0, 10, 11, 40, 45, 52, 63, 80]
    assert kwargs["cu_seq_lens_q"].dtype == torch.int32
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 29
    assert varlen_kwargs(LENGTHS, [29, 17])["max_length_q"] == 29


@pytest.mark.parametrize("reset", [False, True], ids=["kept", "reset"])
@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "learned"])
def test_logits_loss_and_gradients_equal_documents_alone(shape, attn_implementation, reset):
    model = tiny_model(**SHAPES[shape] | {"reset_document_positions": reset})
    model.set_attn_implementation(attn_implementation)
    ids = token_ids(2, ROW)
    packed, separate = model(ids, doc_lens=LENGTHS).logits, alone(model, ids, LENGTHS)
    # RoPE and ALiBi look at distances only, so kept positions differ by rounding.
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=0)
    assert (packed - model(ids).logits).abs().max() > 0.1, "the mask makes no difference: the test is blind"

    gradients = []
    for logits in (packed, separate):
        model.zero_grad()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        gradients.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (packed_loss, packed_gradients), (loss, expected) = gradients
    torch.testing.assert_close(packed_loss, loss, atol=1e-6, rtol=0)
    for name in expected:
        torch.testing.assert_close(packed_gradients[name], expected[name], atol=1e-5, rtol=1e-4)


def test_learned_positions_need_the_reset():
    ids = token_ids(2, ROW)
    reset = tiny_model(**SHAPES["learned"], reset_document_positions=True)
    torch.testing.assert_close(reset(ids, doc_lens=LENGTHS).logits, alone(reset, ids, LENGTHS), atol=1e-5, rtol=0)
    kept = tiny_model(**SHAPES["learned"])
    difference = (kept(ids, doc_lens=LENGTHS).logits - alone(kept, ids, LENGTHS)).abs()
    assert difference[0, :10].max() < 1e-5
    assert difference[0, 11:].max() > 0.01


def test_another_first_document_changes_nothing_in_the_second():
    model, lengths = tiny_model(), torch.tensor([[15, 25]])
    ids, other = token_ids(1, ROW), token_ids(1, ROW, seed=2)
    other[:, 15:] = ids[:, 15:]
    first, second = (model(rows, doc_lens=lengths).logits for rows in (ids, other))
    assert torch.equal(first[:, 15:], second[:, 15:])
    assert not torch.equal(first[:, :15], second[:, :15])


def test_works_in_training_mode_and_with_use_cache():
    model, ids = tiny_model(), token_ids(2, ROW)
    expected = model(ids, doc_lens=LENGTHS, use_cache=False).logits
    out = model(ids, doc_lens=LENGTHS, use_cache=True)
    assert out.past_key_values is None
    assert torch.equal(out.logits, expected)
    assert torch.equal(model.train()(ids, doc_lens=LENGTHS).logits, expected)


@pytest.mark.parametrize("extra", ["attention_mask", "past_key_values"])
def test_refuses_what_contradicts_packing(extra):
    model, ids = tiny_model(), token_ids(2, ROW)
    given = {"attention_mask": torch.ones_like(ids), "past_key_values": model(ids, use_cache=True).past_key_values}
    with pytest.raises(ValueError, match="doc_lens excludes"):
        model(ids, doc_lens=LENGTHS, **{extra: given[extra]})


def test_flash_attention_is_refused_where_it_is_not_installed():
    with pytest.raises((ImportError, ValueError), match=r"(?i)flash"):
        tiny_model().set_attn_implementation("flash_attention_2")


def test_alibi_refuses_backends_that_take_no_bias():
    model = tiny_model(**SHAPES["alibi"])
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="ALiBi needs attn_implementation"):
        model(token_ids(1, 8))


def test_numbers_of_the_original():
    """The original run document by document, and with a block-diagonal bias."""
    stored = load_file(GOLDEN / "intra_document.safetensors")
    model = load_variant("olmo2_small").model
    lengths = stored["doc_lens"].long()
    with torch.no_grad():
        logits = model(stored["input_ids"].long(), doc_lens=lengths).logits
    for name in ("logits_documents_separately", "logits_block_diagonal_bias"):
        torch.testing.assert_close(logits, stored[name], atol=1e-5, rtol=0)
    assert (logits - stored["logits_without_doc_masking"]).abs().max() > 0.1
    kwargs = varlen_kwargs(lengths, None)
    assert kwargs["cu_seq_lens_q"].tolist() == stored["cu_doc_lens"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["olmo2_gqa", "alibi"])
def test_flex_attention_forward(shape):
    """flex_attention has no backward pass on the CPU; its forward pass must compile, which takes a minute."""
    model, ids = tiny_model(**SHAPES[shape]), token_ids(2, ROW)
    expected, plain = model(ids, doc_lens=LENGTHS).logits, model(ids).logits
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        torch.testing.assert_close(model(ids, doc_lens=LENGTHS).logits, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flash_attention_varlen():
    pytest.importorskip("flash_attn", reason="needs the flash-attn package")
    model, ids = tiny_model(hidden_size=128, num_key_value_heads=2).cuda().bfloat16(), token_ids(2, ROW).cuda()
    expected = model(ids, doc_lens=LENGTHS.cuda()).logits
    model.set_attn_implementation("flash_attention_2")
    for longest in (None, [29, 17]):
        logits = model(ids, doc_lens=LENGTHS.cuda(), max_doc_lens=longest).logits
        torch.testing.assert_close(logits, expected, atol=0.1, rtol=0)  # bf16
    assert (logits - model(ids).logits).abs().max() > 0.5
