"""What lessons and commands run on: the built-in workloads and their data, records, notebooks, figures, reports."""
