"""A trained model -> a small one in one file that PyTorch alone can load."""
