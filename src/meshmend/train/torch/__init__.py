"""`Job` and the elastic group: training loops of PyTorch."""
