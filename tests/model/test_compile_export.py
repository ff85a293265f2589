"""torch.compile and torch.export take the model whole."""

import pytest
import torch

from tests.model.tiny import SHAPES, tiny_model, token_ids

LENGTHS = torch.tensor([[5, 11], [16, 0]])


@pytest.mark.parametrize(
    "shape", ["olmo2_gqa", *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name != "olmo2_gqa")]
)
def test_one_graph_with_equal_results(shape):
    """Backend aot_eager traces forward and backward as any compiler would, and needs none."""
    torch._dynamo.reset()
    model, ids = tiny_model(**SHAPES[shape]).train(), token_ids(2, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(ids, labels=ids)
        out.loss.backward()
        results.append((out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-6, rtol=0)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, atol=1e-6, rtol=1e-5)


def test_few_recompilations_when_training_and_evaluation_alternate():
    torch._dynamo.reset()
    model, compilations = tiny_model(), 0

    def counting_backend(graph, inputs):
        nonlocal compilations
        compilations += 1
        return graph.forward

    compiled = torch.compile(model, backend=counting_backend)
    for rows, training, repeats in ((4, True, 10), (2, False, 3), (4, True, 5)):
        model.train(training)
        for _ in range(repeats):
            with torch.set_grad_enabled(training):
                compiled(token_ids(rows, 16), use_cache=False)
    assert compilations <= 3


def test_packed_rows_compile():
    torch._dynamo.reset()
    model, ids = tiny_model().train(), token_ids(2, 16)
    expected = model(ids, doc_lens=LENGTHS).logits
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, doc_lens=LENGTHS).logits, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "shape",
    ["alibi", *(pytest.param(name, marks=pytest.mark.slow) for name in ("olmo2_gqa", "olmo1_clip", "learned"))],
)
def test_export(shape):
    model, ids = tiny_model(**SHAPES[shape]), token_ids(2, 16)
    rows = torch.export.Dim("rows", min=2, max=8)
    program = torch.export.export(
        model, (ids,), {"use_cache": False}, dynamic_shapes={"input_ids": {0: rows}, "use_cache": None}, strict=False
    )
    other = token_ids(5, 16, seed=9)
    torch.testing.assert_close(program.module()(other, use_cache=False).logits, model(other).logits, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_the_default_compiler():
    torch._dynamo.reset()
    model, ids = tiny_model(), token_ids(2, 16)
    expected = model(ids).logits
    torch.testing.assert_close(torch.compile(model)(ids, use_cache=False).logits, expected, atol=1e-5, rtol=0)
