"""Reports of a training run: sentences, a summary, an HTML page, TensorBoard files."""
