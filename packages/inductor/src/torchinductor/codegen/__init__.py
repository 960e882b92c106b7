"""Back ends that turn fused kernels into source and source into code."""
