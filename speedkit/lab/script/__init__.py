"""Profile, tune and count a training script that nobody edits, and write the patch for it."""
