"""LoRA of PEFT on the model: only adapters learn, they are saved alone, and merging gives the same logits."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests.model.tiny import SHAPES, tiny_model, token_ids


@pytest.mark.parametrize("shape", ["olmo2_gqa", "olmo1_clip", "all_extras"])
def test_lora(tmp_path, shape):
    base, ids = tiny_model(**SHAPES[shape]), token_ids(4, 24)
    base.save_pretrained(tmp_path / "base")
    before = base(ids).logits.detach()
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(base, settings)
    assert torch.equal(model(ids).logits, before), "fresh adapters change nothing"
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()  # as fine-tuning usually runs
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    assert all("lora_" in name for name in trainable)
    linear = [m for name, m in base.named_modules() if name.endswith("_proj")]
    assert len(trainable) == 2 * len(linear), "A and B for each projection, none for the head"

    optimizer, losses = torch.optim.AdamW(trainable.values(), lr=0.02), []
    model.train()
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)

    model.eval()
    adapted = model(ids).logits.detach()
    model.save_pretrained(tmp_path / "adapter")
    assert all("lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    fresh = OlmoHfForCausalLM.from_pretrained(tmp_path / "base").eval()
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert torch.equal(loaded(ids).logits, adapted)
    prompt = {"input_ids": ids[:1, :6], "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    generated = loaded.generate(**prompt)
    merged = loaded.merge_and_unload()
    # W + B A in one matrix instead of two products: rounding only.
    torch.testing.assert_close(merged(ids).logits, adapted, atol=1e-5, rtol=1e-5)
    assert torch.equal(merged.generate(**prompt), generated)
    merged.save_pretrained(tmp_path / "merged")
    again = OlmoHfForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(again(ids).logits, merged(ids).logits)
