"""Batch to weights."""
