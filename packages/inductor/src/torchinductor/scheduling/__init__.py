"""Decides which operations share a kernel, and puts fused kernels into their final form."""
