#!/usr/bin/env python3
"""Times PyTorch's gradients of softmax and log-softmax on the CPU, given the result and its gradient, into fresh memory, and the
softmax of its top-k, and writes one CSV row per figure as the benchmark reads them: op,shape,dim,dtype,impl,us

pip install torch. Usage: cpu_more_peers.py [THREADS, default 2]
Run it in turn with `cargo bench --bench softmax -- --device cpu` and compare ratios."""

import statistics
import sys
import time

import torch

THREADS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
# The shapes of the benchmark's CPU side.
CASES = [
    ((1024, 32768), -1),
    ((512, 512), -1),
    ((8192, 128), -1),
    ((49152, 128), -1),
    ((1, 151936), -1),
    ((64, 1000), -1),
    ((1, 10_000_000), -1),
    ((64, 1000, 128), 1),
    ((4096, 4096), 0),
]
# Rows, columns and how many of these are looked for.
TOP_K = [(4096, 64, 8), (512, 128, 2), (16384, 256, 8), (32, 128256, 40), (1, 151936, 50)]
OPS = {
    "softmax_bwd": (torch.softmax, torch._softmax_backward_data),
    "log_softmax_bwd": (torch.log_softmax, torch._log_softmax_backward_data),
}


def median_us(call):
    call()
    start = time.perf_counter()
    call()
    runs = max(5, min(300, int(0.5 / max(time.perf_counter() - start, 1e-6))))
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def main():
    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    print("op,shape,dim,dtype,impl,us")
    row = lambda op, shape, dim, us: print(op, "x".join(map(str, shape)), dim, "f32,torch", f"{us:.1f}", sep=",", flush=True)
    for shape, dim in CASES:
        x, g = torch.randn(shape) * 3, torch.randn(shape) * 3
        for op, (forward, backward) in OPS.items():
            y = forward(x, dim)
            us = median_us(lambda: backward(g, y, dim, torch.float32))
            row(op, shape, dim, us)
    for *shape, k in TOP_K:
        x = torch.randn(shape) * 3
        row(f"top-{k} softmax", shape, -1, median_us(lambda: torch.softmax(torch.topk(x, k)[0], -1)))


if __name__ == "__main__":
    main()
