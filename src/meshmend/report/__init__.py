"""A training run as people read it: sentences, a summary, an HTML page, TensorBoard files."""
