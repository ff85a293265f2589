"""How many floating-point operations per second one device could do: the denominator of MFU."""

import time

import torch

GPU_PEAK_FLOPS: dict[str, float] = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756.5e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "RTX 6000 Ada": 364.2e12,
    "RTX A6000": 154.8e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI300X": 1307.4e12,
    "MI250X": 191.5e12,
}
"""Dense bfloat16 (float16 where the device lacks it), from the makers' data sheets; MI250X is one of its two dies."""


def gpu_peak_flops(device_name: str) -> float | None:
    """Peak of the GPU called `device_name` (as `torch.cuda.get_device_name` says it); None for an unknown one."""
    words = device_name.upper().replace("-", " ")
    matches = [name for name in GPU_PEAK_FLOPS if _contains_words(words, name.upper())]
    return GPU_PEAK_FLOPS[max(matches, key=len)] if matches else None


def _contains_words(text: str, phrase: str) -> bool:
    # Whole words, so that "A10" is not found in "A100"; the words of a phrase may lie apart ("H100 80GB PCIe").
    return set(phrase.split()) <= set(text.split())


LEAST_PRODUCTS = 50
"""So many are made where other work on the machine lets only a few happen in the time: their best would say little."""


def measure_cpu_peak_flops(size: int = 512, seconds: float = 0.2) -> float:
    """What this process reaches in a float32 matrix product with its present number of threads.

    A practical peak: the best of the repetitions that fit into `seconds`, or of fifty within ten times as long. Draws
    no random numbers.
    """
    left = torch.full((size, size), 0.5)
    right = torch.full((size, size), 0.25)
    product = left @ right
    best = float("inf")
    began, products = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds or (products < LEAST_PRODUCTS and spent < 10 * seconds):
        start = time.perf_counter()
        torch.mm(left, right, out=product)
        best = min(best, time.perf_counter() - start)
        products += 1
    return 2.0 * size**3 / best


def device_peak_flops(device_type: str) -> float | None:
    """Peak of the device this process trains on: measured for a CPU, from the table for a GPU, else None."""
    if device_type == "cpu":
        return measure_cpu_peak_flops()
    if device_type == "cuda":
        return gpu_peak_flops(torch.cuda.get_device_name())
    return None
