"""Fused kernels of attention, by platform. Only `fused_attention` is for others; it chooses the kernels."""
