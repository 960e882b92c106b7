"""Captured frames, kept for other processes: what capture read by content, what it made as text."""
