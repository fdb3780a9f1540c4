"""How a call runs, and how its activations are recomputed in the backward pass."""
