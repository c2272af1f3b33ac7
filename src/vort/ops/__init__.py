"""Tensor programs: pure functions over tensors, one folder for each op."""
