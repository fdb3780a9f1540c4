"""retrograde beside plain autograd and its peers: who runs, at which sizes, what is measured, what is reported."""
