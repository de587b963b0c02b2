"""`python -m benchmarks.kernels.limits` prints what an H200 could do at best, on paper."""

from __future__ import annotations

from benchmarks.kernels import costs
from benchmarks.kernels.costs import LLAMA_3_8B as MODEL

H200_BANDWIDTH, H200_RATE = 4.8e12, 990e12
"""The vendor's figures: bytes a second, dense bf16 operations a second."""

ON_PAPER = {
    "`rms_norm`, 256 rows": costs.rms_norm(MODEL, 256),
    "`silu_mul`, 256 rows": costs.silu_mul(MODEL, 256),
    "`rope_kv_write`, 256 tokens": costs.rope_kv_write(MODEL, 256),
    "`paged_attention`, 64 decodes at 4096": costs.decode_attention(MODEL, [4096] * 64),
    "`paged_attention`, 8192 new tokens": costs.prefill_attention(MODEL, 8192, 0),
    "`paged_attention`, 2048 after 6144": costs.prefill_attention(MODEL, 2048, 6144),
    "`gather_blocks`, 256 blocks": costs.block_copy(MODEL, 256),
    "`sample`, 64 rows": costs.sampling(MODEL, 64),
    "decode step, 64 at 4096": costs.decode_step(MODEL, [4096] * 64),
    "prefill step, 8192 tokens": costs.prefill_step(MODEL, 8192),
}


def limits() -> str:
    """A table for docs/kernels.md."""
    lines = ["| kernel | MB | GFLOP | bound by | limit, us |", "|---|---:|---:|---|---:|"]
    for name, cost in ON_PAPER.items():
        by_bytes = cost.bytes / H200_BANDWIDTH >= cost.flops / H200_RATE
        lines.append(
            f"| {name} | {cost.bytes / 1e6:.2f} | {cost.flops / 1e9:.1f} | "
            f"{'bytes' if by_bytes else 'products'} | "
            f"{cost.seconds(H200_BANDWIDTH, H200_RATE) * 1e6:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(limits())
