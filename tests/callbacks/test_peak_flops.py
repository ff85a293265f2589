import pytest
import torch

from olmo_hf.callbacks.peak_flops import gpu_peak_flops, measure_cpu_peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
    ],
)
def test_known_gpus(name: str, peak: float) -> None:
    assert gpu_peak_flops(name) == peak


def test_an_unknown_gpu_is_not_guessed() -> None:
    assert gpu_peak_flops("Wonder 9000") is None


def test_a_busy_machine_gets_more_time(monkeypatch) -> None:
    """Where the first products are slow, their best is no peak: MFU would be above 100 %."""
    now, made = 0.0, 0

    def slow_at_first(left, right, *, out) -> None:
        nonlocal now, made
        made += 1
        now += 0.1 if made < 10 else 0.01

    monkeypatch.setattr("olmo_hf.callbacks.peak_flops.time.perf_counter", lambda: now)
    monkeypatch.setattr("olmo_hf.callbacks.peak_flops.torch.mm", slow_at_first)
    assert measure_cpu_peak_flops(size=100) == pytest.approx(2 * 100**3 / 0.01)
    assert made == 50


def test_measuring_a_cpu_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    assert 1e8 < measure_cpu_peak_flops(size=128, seconds=0.02) < 1e15
    assert torch.equal(torch.get_rng_state(), before)
