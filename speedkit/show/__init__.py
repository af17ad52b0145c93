"""Plots and reports, drawn from records only."""
