"""lm-evaluation-harness on a checkpoint of ours: how many requests share a batch changes no answer."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")

VOCAB = 128


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint")
    words = {"<eos>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", model_max_length=64
    ).save_pretrained(place)
    torch.manual_seed(0)
    config = OlmoHfConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = OlmoHfForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # likelihoods that differ, so that a wrong mask would show
    model.save_pretrained(place)
    return place


def test_twenty_requests_of_mixed_length_in_batches_of_1_4_and_20(checkpoint: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    generator = torch.Generator().manual_seed(1)
    reader = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=1)
    requests = []
    for i in range(20):
        ids = torch.randint(2, VOCAB, (3 + 2 * i,), generator=generator)
        context = " ".join(f"w{n}" for n in ids.tolist())
        with torch.no_grad():
            likely = 2 + int(reader.model(ids[None]).logits[0, -1, 2:].argmax())
        word = likely if i % 2 == 0 else 2 + likely % (VOCAB - 2)  # half of them are what greedy decoding would say
        requests.append(Instance("loglikelihood", {}, (context, f" w{word}"), i))
    answers = {}
    for batch_size in (1, 4, 20):
        model = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=batch_size)
        answers[batch_size] = model.loglikelihood(requests, disable_tqdm=True)
    sums, greedy = zip(*answers[1], strict=True)
    assert list(greedy) == [i % 2 == 0 for i in range(20)]
    assert max(sums) - min(sums) > 1.0
    for batch_size in (4, 20):
        others, flags = zip(*answers[batch_size], strict=True)
        assert flags == greedy
        # float32 sums over 128 logits in rows of another length
        assert list(others) == pytest.approx(list(sums), abs=1e-4)
