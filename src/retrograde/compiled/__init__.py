"""Stacks inside of models that torch.compile compiles."""
