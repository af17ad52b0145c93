"""Weights to evidence."""
